"""`rap evaluate`: quality of a dense or pruned checkpoint."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..checkpoint.device import AUTO
from ..checkpoint.provenance import provenance
from ..data.held_out import evaluation_tokens
from ..evaluation.quality.intervals import exponential
from ..evaluation.quality.perplexity import check_sizes, perplexity
from . import options
from .cache import cache_command
from .checkpoints import Quantize, ResultFile, deliver, label, open_checkpoint
from .fidelity import fidelity_command
from .generation import generation_command
from .options import print_table
from .retrieval import retrieval_command
from .zero_shot import zero_shot_command

evaluate_app = typer.Typer(no_args_is_help=True, help="Measure the quality of a checkpoint.")


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    evaluate_app.command("fidelity")(fidelity_command)
    evaluate_app.command("cache")(cache_command)
    evaluate_app.command("retrieval")(retrieval_command)
    evaluate_app.command("zero-shot")(zero_shot_command)
    evaluate_app.command("generation")(generation_command)
    app.add_typer(evaluate_app, name="evaluate")


@evaluate_app.command("perplexity")
def perplexity_command(
    model: options.Model,
    text: Annotated[
        str,
        typer.Option(
            help="'bundled' test novels, 'wikitext2', 'c4', a .txt or .jsonl file, or a dataset ID."
        ),
    ] = "bundled",
    window: Annotated[
        int | None,
        typer.Option(help="Tokens per evaluation window [2048, or the model's maximum]."),
    ] = None,
    max_windows: Annotated[
        int | None, typer.Option(help="Number of evaluation windows [all].")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 1,
    bos: options.Bos = "auto",
    quantize: Quantize = None,
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Perplexity in float32 over contiguous non-overlapping windows."""
    check_sizes(window, max_windows, batch_size)
    opened = open_checkpoint(
        model, device, device_map, [output], quantize, dtype="float32", bos=bos
    )
    tokens = evaluation_tokens(text, opened.tokenizer)
    scored = perplexity(
        opened.model,
        tokens,
        window=window,
        max_windows=max_windows,
        batch_size=batch_size,
        bos=opened.bos,
        progress=not as_json,
    )
    made = provenance(batch_size=batch_size, quantize=quantize)
    table: dict[str, Any] = {
        "title": f"Perplexity of {label(opened)}",
        "header": ["text", "windows", "tokens a window", "perplexity"],
        "rows": [[text, f"{scored.num_windows:,}", f"{scored.window:,}", f"{scored.value:.4f}"]],
    }
    deliver(opened, {"text": text, **asdict(scored)}, table, made, output, as_json)
    if len(scored.positions) > 1 and not as_json:
        rows = [
            [f"{part.start + 1:,} to {part.stop:,}", f"{exponential(part.nats_per_token):.2f}"]
            for part in scored.positions
        ]
        print_table("By position in the window", ["tokens before", "perplexity"], rows)
