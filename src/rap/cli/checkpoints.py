"""What every command of `rap evaluate` does with its checkpoint, and with its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.device import AUTO, placement, say_device
from ..checkpoint.files import check_output_file
from ..checkpoint.load import is_offloaded, load, load_tokenizer
from ..checkpoint.source import resolve_source
from ..data.bos import Bos, bos_token
from ..evaluation.quantization import KINDS, quantize_weights
from ..evaluation.retrieval.documents import WORDINGS, check_wording
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model
from . import options
from .options import print_json, print_table, write_result

ResultFile = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")]
Quantize = Annotated[
    str | None, typer.Option(help=f"Quantize the weights first: {', '.join(KINDS)}.")
]
Dense = Annotated[
    str, typer.Option("--dense", help="The dense model: local directory, Hub ID or GGUF file.")
]
Haystack = Annotated[
    str, typer.Option(help="Text around the facts: 'bundled', a file, or a dataset ID.")
]
Words = Annotated[
    str,
    typer.Option(
        "--wording",
        callback=check_wording,
        help=f"Wording of facts and questions: {', '.join(WORDINGS)}. Pretrained models need "
        "the natural one.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a checkpoint is opened that is asked for facts, and how they are drawn."""

    quantize: Quantize = None
    device: options.Device = AUTO
    device_map: options.DeviceMap = None
    bos: options.Bos = "auto"
    seed: options.Seed = 0


@dataclass(frozen=True)
class Opened:
    """A checkpoint to measure, and the entries that every result has about it.

    Windows and documents begin with the token `bos`, if any.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    record: dict[str, Any]
    bos: int | None = None


def open_checkpoint(
    model: str,
    device: str,
    device_map: str | None,
    outputs: Sequence[Path | None],
    quantize: str | None = None,
    dtype: str = "auto",
    bos: Bos = "auto",
) -> Opened:
    """Load a checkpoint once it is sure that its result can be written.

    `model` is what `resolve_source` knows, `outputs` the files that will be written (None: not
    asked for), `quantize` one of KINDS for its weights, `bos` what windows of text begin with.
    `dtype` auto is float32 on a CPU, as most of them convert lower precisions number by number; of
    weights that are quantized it is their own.
    The fingerprint is that of the weights as they are stored, before they are quantized.

    Raises RapError for an unknown `quantize`, CheckpointError for an output that cannot be written
    or a checkpoint that cannot be read.
    """
    for path in outputs:
        if path is not None:
            check_output_file(path, force=True)
    if quantize is not None and quantize not in KINDS:
        raise RapError(f"unknown quantization {quantize!r}: use one of {', '.join(KINDS)}")
    source = resolve_source(model)
    tokenizer = load_tokenizer(source)
    placed = placement(device, device_map)
    if dtype == "auto" and not placed and quantize is None:
        dtype = "float32"
    loaded = load(source, dtype=dtype, **placed)
    say_device(loaded)
    known = known_fingerprint(loaded)
    record: dict[str, Any] = {"model": model, "fingerprint": known, "quantize": quantize}
    record["dtype"] = str(loaded.dtype).removeprefix("torch.")
    if quantize is not None:
        quantize_weights(loaded, quantize)
    return Opened(loaded, tokenizer, record, bos_token(bos, tokenizer, loaded.config))


def open_dense(dense: str, device: str, device_map: str | None) -> Any:
    """The model that a pruned one is compared with, in float32."""
    return load(dense, dtype="float32", **placement(device, device_map))


def deliver(
    opened: Opened,
    figures: dict[str, Any],
    table: dict[str, Any],
    made: dict[str, Any],
    output: Path | None,
    as_json: bool,
) -> None:
    """Write what was measured of a checkpoint where that is wanted, and print it, or its table.

    `made` is its provenance, with the command.
    """
    made["settings"]["device"] = str(opened.model.device)
    result = {**opened.record, **figures, "table": table, "provenance": made}
    result["command"] = made["command"]
    if output is not None:
        write_result(output, result)
    if as_json:
        print_json(result)
    else:
        print_table(table["title"], table["header"], table["rows"])


def label(opened: Opened) -> str:
    """The checkpoint's name for a title, with how its weights were quantized."""
    kind = opened.record["quantize"]
    return str(opened.record["model"]) + (f", weights in {kind}" if kind else "")


def known_fingerprint(model: Any) -> str | None:
    """Of a model's weights; None where some of them are offloaded."""
    return None if is_offloaded(model) else fingerprint_model(model)
