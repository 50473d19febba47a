"""`rap evaluate`: quality of a dense or pruned checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..calibration.held_out import evaluation_tokens
from ..checkpoint.device import AUTO
from ..checkpoint.files import whole_file
from ..checkpoint.provenance import provenance
from ..evaluation.quality.documents import check_grid
from ..evaluation.quality.intervals import exponential
from ..evaluation.quality.needle import check_depths, heat_map, needle_grid, needle_table
from ..evaluation.quality.perplexity import check_sizes, perplexity
from ..evaluation.quality.recall import copy_loss, recall_grid
from ..model.errors import RapError
from . import options
from .cache import cache_command
from .checkpoints import (
    Haystack,
    Opening,
    Quantize,
    ResultFile,
    Words,
    deliver,
    label,
    open_checkpoint,
)
from .fidelity import fidelity_command
from .generation import generation_command
from .groups import grouped
from .options import console, print_table
from .ruler import ruler_command
from .zero_shot import zero_shot_command

evaluate_app = typer.Typer(no_args_is_help=True, help="Measure the quality of a checkpoint.")

FIGURES = (".png", ".svg")


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    evaluate_app.command("fidelity")(fidelity_command)
    evaluate_app.command("cache")(cache_command)
    evaluate_app.command("ruler")(ruler_command)
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


@evaluate_app.command("recall")
@grouped
def recall_command(
    model: options.Model,
    *,
    text: Haystack = "bundled",
    distances: Annotated[
        list[int], typer.Option("--distance", help="Tokens between fact and question; repeatable.")
    ] = [64, 256, 1000],  # noqa: B006 - typer copies it
    facts: Annotated[
        list[int], typer.Option("--facts", help="Facts in a document; repeatable.")
    ] = [1, 4, 16],  # noqa: B006 - typer copies it
    documents: Annotated[int, typer.Option(help="Questions per setting.")] = 32,
    wording: Words = "plain",
    how: Opening,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Fact recall by distance and number of facts, and loss on repeated passages."""
    check_grid(documents, distances, facts)
    opened = open_checkpoint(model, how.device, how.device_map, [output], how.quantize, bos=how.bos)
    ids = np.asarray(evaluation_tokens(text, opened.tokenizer))
    cells = recall_grid(
        opened.model,
        opened.tokenizer,
        ids,
        distances=distances,
        facts=facts,
        num_documents=documents,
        seed=how.seed,
        bos=opened.bos,
        wording=wording,
    )
    copied = copy_loss(opened.model, ids, num_documents=documents, seed=how.seed, bos=opened.bos)
    by_place = {(cell.distance, cell.num_facts): f"{cell.accuracy:.0%}" for cell in cells}
    table: dict[str, Any] = {
        "title": f"Recall of {label(opened)}: share of numbers given back",
        "header": ["distance", *(f"{n} facts" if n > 1 else "1 fact" for n in facts)],
        "rows": [[f"{far:,}", *(by_place[far, n] for n in facts)] for far in distances],
    }
    made = provenance(seed=how.seed, quantize=how.quantize)
    figures = {
        "text": text,
        "bos": opened.bos,
        "wording": wording,
        "recall": [asdict(cell) for cell in cells],
        "copy": {**asdict(copied), "gain": copied.gain},
    }
    deliver(opened, figures, table, made, output, as_json)
    if not as_json:
        print_table(
            "Loss on a passage, nats per token",
            ["passage", "read again after", "first time", "second time"],
            [[copied.passage, copied.distance, f"{copied.first:.2f}", f"{copied.second:.2f}"]],
        )


@evaluate_app.command("needle")
@grouped
def needle_command(
    model: options.Model,
    *,
    text: Haystack = "bundled",
    lengths: Annotated[
        list[int], typer.Option("--length", help="Tokens of a document; repeatable.")
    ] = [256, 512, 1024, 2048],  # noqa: B006 - typer copies it
    depths: Annotated[
        list[float], typer.Option("--depth", help="Position of the needle, 0 to 1; repeatable.")
    ] = [0.0, 0.25, 0.5, 0.75, 1.0],  # noqa: B006 - typer copies it
    facts: Annotated[int, typer.Option(help="Facts per document, one of them queried.")] = 4,
    documents: Annotated[int, typer.Option(help="Documents per setting.")] = 16,
    wording: Words = "plain",
    how: Opening,
    output: ResultFile = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Heat map to write, .png or .svg; `rap report` shows it if only its ending "
            "differs from the result's."
        ),
    ] = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Needle in a haystack: one fact at every depth of documents of every length."""
    if figure is not None and figure.suffix not in FIGURES:
        raise RapError(f"cannot draw {figure}: a heat map ends in {' or '.join(FIGURES)}")
    check_depths(depths)
    check_grid(documents, lengths, [facts])
    opened = open_checkpoint(
        model, how.device, how.device_map, [output, figure], how.quantize, bos=how.bos
    )
    cells = needle_grid(
        opened.model,
        opened.tokenizer,
        np.asarray(evaluation_tokens(text, opened.tokenizer)),
        lengths=lengths,
        depths=depths,
        num_facts=facts,
        num_documents=documents,
        seed=how.seed,
        bos=opened.bos,
        wording=wording,
    )
    title = f"Needles found by {label(opened)}, one of {facts} facts"
    table, made = needle_table(title, cells), provenance(seed=how.seed, documents=documents)
    grid = {
        "text": text,
        "bos": opened.bos,
        "facts": facts,
        "wording": wording,
        "needle": [asdict(cell) for cell in cells],
    }
    deliver(opened, grid, table, made, output, as_json)
    if figure is not None:
        with whole_file(figure) as partial:
            heat_map(cells, title).savefig(partial, format=figure.suffix[1:], dpi=160)
        console.print(f"wrote {figure}")
