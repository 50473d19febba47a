"""`rap sample`: documents that a model generates, for calibration and distillation."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.device import AUTO
from ..checkpoint.files import check_output_file
from ..checkpoint.load import load_config
from ..data.sampling import Corpus, check_length, write_documents
from ..model.errors import RapError
from . import options
from .checkpoints import open_checkpoint
from .groups import grouped
from .options import print_json

TEXT = ".jsonl"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is drawn: the fields of Corpus, as options."""

    documents: Annotated[int, typer.Option(help="Number of documents.")] = Corpus.documents
    tokens: Annotated[int, typer.Option(help="Tokens per document.")] = Corpus.tokens
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = Corpus.temperature
    top_p: Annotated[float, typer.Option(help="Nucleus (top-p) threshold.")] = Corpus.top_p
    chats: Annotated[
        float, typer.Option(help="Share of documents that begin as a chat, by the chat template.")
    ] = Corpus.chats
    batch_size: Annotated[int, typer.Option(help="Documents per batch.")] = Corpus.batch_size


@grouped
def sample_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Output file, .jsonl.")],
    *,
    asked: Asked,
    dtype: options.Dtype = "auto",
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Let MODEL write documents, for --calibration and --text of other commands.

    The documents approximate its training distribution: prose, code, chat. A stopped command
    resumes.
    """
    if output.suffix != TEXT:
        raise RapError(f"{output} must end in {TEXT}: one document is written by line")
    check_output_file(output, force=force)
    drawn = Corpus(**asdict(asked), seed=seed)
    check_length(load_config(model), drawn)  # before weights are loaded
    opened = open_checkpoint(model, device, device_map, [], dtype=dtype)
    write_documents(
        opened.model, opened.tokenizer, output, drawn, force=force, progress=not as_json
    )
    if as_json:
        placed = str(opened.model.device)
        print_json({"model": model, "output": str(output), "device": placed, **asdict(drawn)})
    else:
        typer.echo(f"wrote {output}: {drawn.documents:,} documents of {drawn.tokens:,} tokens")
