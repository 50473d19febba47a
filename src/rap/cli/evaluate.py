"""`rap evaluate`: quality of a dense or pruned checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..checkpoint import check_output_file, load, load_tokenizer
from ..evaluation.perplexity import perplexity
from ..evaluation.recall import copy_loss, recall_grid
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


@evaluate_app.command("recall")
def recall_command(
    model: options.Model,
    text: Annotated[
        str, typer.Option(help="What the facts are hidden in: 'bundled', a file, or a dataset.")
    ] = "bundled",
    distances: Annotated[
        list[int], typer.Option("--distance", help="Tokens between fact and question; repeatable.")
    ] = [64, 256, 1000],  # noqa: B006 - typer copies it
    facts: Annotated[
        list[int], typer.Option("--facts", help="Facts in a document; repeatable.")
    ] = [1, 4, 16],  # noqa: B006 - typer copies it
    documents: Annotated[int, typer.Option(help="Questions per cell.")] = 32,
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file to write.")
    ] = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Recall of a number given earlier, over distance and number of facts, and loss on copies."""
    source = resolve_source(model)
    placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
    if output is not None:
        check_output_file(output, force=True)
    loaded, tokenizer = load(source, **placement), load_tokenizer(source)
    ids = np.asarray(evaluation_tokens(text, tokenizer))
    cells = recall_grid(
        loaded, tokenizer, ids, distances=distances, facts=facts, num_documents=documents, seed=seed
    )
    copied = copy_loss(loaded, ids, num_documents=documents, seed=seed)
    result = {
        "model": model,
        "text": text,
        "fingerprint": fingerprint_model(loaded),
        "recall": [asdict(cell) for cell in cells],
        "copy": {**asdict(copied), "gain": copied.gain},
        "provenance": provenance(seed=seed),
    }
    if output is not None:
        write_result(output, result)
    if as_json:
        print_json(result)
        return
    by_place = {(cell.distance, cell.num_facts): f"{cell.accuracy:.0%}" for cell in cells}
    print_table(
        f"Recall of {model}: share of numbers given back",
        ["distance", *(f"{count} facts" if count > 1 else "1 fact" for count in facts)],
        [[f"{far:,}", *(by_place[far, count] for count in facts)] for far in distances],
    )
    print_table(
        "Loss on a passage, nats per token",
        ["passage", "read again after", "first time", "second time"],
        [[copied.passage, copied.distance, f"{copied.first:.2f}", f"{copied.second:.2f}"]],
    )
