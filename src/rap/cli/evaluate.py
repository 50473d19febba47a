"""`rap evaluate`: quality of a dense or pruned checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint import check_output_file, load, load_tokenizer
from ..evaluation.perplexity import perplexity
from ..fingerprint import fingerprint_model
from ..pipeline import evaluation_tokens, resolve_source
from ..provenance import provenance
from . import options
from .options import print_json, print_table, write_result

evaluate_app = typer.Typer(no_args_is_help=True, help="Measure the quality of a checkpoint.")


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.add_typer(evaluate_app, name="evaluate")


@evaluate_app.command("perplexity")
def perplexity_command(
    model: options.Model,
    text: Annotated[
        str, typer.Option(help="'bundled' test novels, a .txt or .jsonl file, or a dataset name.")
    ] = "bundled",
    window: Annotated[
        int | None, typer.Option(help="Tokens per window; default 2048 or the model's maximum.")
    ] = None,
    max_windows: Annotated[
        int | None, typer.Option(help="Stop after so many windows; default the whole text.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 1,
    device_map: options.DeviceMap = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file to write.")
    ] = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Perplexity in float32 over contiguous non-overlapping windows."""
    source = resolve_source(model)
    placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
    if output is not None:
        check_output_file(output, force=True)
    loaded = load(source, dtype="float32", **placement)
    tokens = evaluation_tokens(text, load_tokenizer(source))
    found = perplexity(
        loaded,
        tokens,
        window=window,
        max_windows=max_windows,
        batch_size=batch_size,
        progress=not as_json,
    )
    result = {
        "model": model,
        "text": text,
        "fingerprint": fingerprint_model(loaded),
        **asdict(found),
        "provenance": provenance(batch_size=batch_size),
    }
    if output is not None:
        write_result(output, result)
    if as_json:
        print_json(result)
    else:
        print_table(
            f"Perplexity of {model}",
            ["text", "windows", "tokens a window", "perplexity"],
            [[text, found.num_windows, found.window, f"{found.value:.4f}"]],
        )
