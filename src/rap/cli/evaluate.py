"""`rap evaluate`: quality of a dense or pruned checkpoint."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..checkpoint import check_output_file, load, load_tokenizer, whole_file
from ..errors import RapError
from ..evaluation.harness import GROUPS, harness_version, mean_score, run_tasks
from ..evaluation.needle import heat_map, needle_grid, needle_table
from ..evaluation.perplexity import perplexity
from ..evaluation.recall import copy_loss, recall_grid
from ..fingerprint import fingerprint_model
from ..pipeline import evaluation_tokens, resolve_source
from ..provenance import provenance
from ..quantization import KINDS, quantize_weights
from . import options
from .options import console, print_json, print_table, write_result

evaluate_app = typer.Typer(no_args_is_help=True, help="Measure the quality of a checkpoint.")

ResultFile = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")]
Quantize = Annotated[
    str | None, typer.Option(help=f"Quantize the weights first: {', '.join(KINDS)}.")
]
Haystack = Annotated[
    str, typer.Option(help="What the facts are hidden in: 'bundled', a file, or a dataset.")
]
# Texts that models are held against, by the split that nothing is trained on.
HELD_OUT = {
    "wikitext2": "Salesforce/wikitext:wikitext-2-raw-v1:test",
    "c4": "allenai/c4:en:validation",
}
FIGURES = (".png", ".svg")


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.add_typer(evaluate_app, name="evaluate")


@dataclass(frozen=True)
class Opened:
    """A checkpoint to measure, and what every result says of it."""

    model: Any
    tokenizer: Any
    record: dict[str, Any]


def _open(
    model: str,
    device_map: str | None,
    outputs: Sequence[Path | None],
    quantize: str | None = None,
    dtype: str = "auto",
) -> Opened:
    """Load a checkpoint once it is sure that its result can be written.

    The fingerprint is that of the weights as they are stored, before they are quantized.
    """
    for path in outputs:
        if path is not None:
            check_output_file(path, force=True)
    if quantize is not None and quantize not in KINDS:
        raise RapError(f"unknown quantization {quantize!r}: use one of {', '.join(KINDS)}")
    source = resolve_source(model)
    tokenizer = load_tokenizer(source)
    placement: dict[str, Any] = {"device_map": device_map} if device_map else {}
    loaded = load(source, dtype=dtype, **placement)
    record = {"model": model, "fingerprint": fingerprint_model(loaded), "quantize": quantize}
    if quantize is not None:
        quantize_weights(loaded, quantize)
    return Opened(loaded, tokenizer, record)


def _finish(result: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Write a result where that is wanted, and print it if it is printed as JSON."""
    if output is not None:
        write_result(output, result)
    if as_json:
        print_json(result)


@evaluate_app.command("perplexity")
def perplexity_command(
    model: options.Model,
    text: Annotated[
        str,
        typer.Option(
            help="'bundled' test novels, 'wikitext2' or 'c4', a .txt or .jsonl file, or a dataset."
        ),
    ] = "bundled",
    window: Annotated[
        int | None, typer.Option(help="Tokens per window; default 2048 or the model's maximum.")
    ] = None,
    max_windows: Annotated[
        int | None, typer.Option(help="Stop after so many windows; default the whole text.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 1,
    quantize: Quantize = None,
    device_map: options.DeviceMap = None,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Perplexity in float32 over contiguous non-overlapping windows."""
    opened = _open(model, device_map, [output], quantize, dtype="float32")
    tokens = evaluation_tokens(HELD_OUT.get(text, text), opened.tokenizer)
    found = perplexity(
        opened.model,
        tokens,
        window=window,
        max_windows=max_windows,
        batch_size=batch_size,
        progress=not as_json,
    )
    made = provenance(batch_size=batch_size, quantize=quantize)
    _finish({**opened.record, "text": text, **asdict(found), "provenance": made}, output, as_json)
    if not as_json:
        print_table(
            f"Perplexity of {_named(opened)}",
            ["text", "windows", "tokens a window", "perplexity"],
            [[text, found.num_windows, found.window, f"{found.value:.4f}"]],
        )


@evaluate_app.command("recall")
def recall_command(
    model: options.Model,
    text: Haystack = "bundled",
    distances: Annotated[
        list[int], typer.Option("--distance", help="Tokens between fact and question; repeatable.")
    ] = [64, 256, 1000],  # noqa: B006 - typer copies it
    facts: Annotated[
        list[int], typer.Option("--facts", help="Facts in a document; repeatable.")
    ] = [1, 4, 16],  # noqa: B006 - typer copies it
    documents: Annotated[int, typer.Option(help="Questions per cell.")] = 32,
    quantize: Quantize = None,
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Recall of a number given earlier, over distance and number of facts, and loss on copies."""
    opened = _open(model, device_map, [output], quantize)
    ids = np.asarray(evaluation_tokens(text, opened.tokenizer))
    cells = recall_grid(
        opened.model,
        opened.tokenizer,
        ids,
        distances=distances,
        facts=facts,
        num_documents=documents,
        seed=seed,
    )
    copied = copy_loss(opened.model, ids, num_documents=documents, seed=seed)
    result = {
        **opened.record,
        "text": text,
        "recall": [asdict(cell) for cell in cells],
        "copy": {**asdict(copied), "gain": copied.gain},
        "provenance": provenance(seed=seed, quantize=quantize),
    }
    _finish(result, output, as_json)
    if as_json:
        return
    by_place = {(cell.distance, cell.num_facts): f"{cell.accuracy:.0%}" for cell in cells}
    print_table(
        f"Recall of {_named(opened)}: share of numbers given back",
        ["distance", *(f"{count} facts" if count > 1 else "1 fact" for count in facts)],
        [[f"{far:,}", *(by_place[far, count] for count in facts)] for far in distances],
    )
    print_table(
        "Loss on a passage, nats per token",
        ["passage", "read again after", "first time", "second time"],
        [[copied.passage, copied.distance, f"{copied.first:.2f}", f"{copied.second:.2f}"]],
    )


@evaluate_app.command("needle")
def needle_command(
    model: options.Model,
    text: Haystack = "bundled",
    lengths: Annotated[
        list[int], typer.Option("--length", help="Tokens of a document; repeatable.")
    ] = [256, 512, 1024, 2048],  # noqa: B006 - typer copies it
    depths: Annotated[
        list[float], typer.Option("--depth", help="Where the needle is, 0 to 1; repeatable.")
    ] = [0.0, 0.25, 0.5, 0.75, 1.0],  # noqa: B006 - typer copies it
    facts: Annotated[int, typer.Option(help="Facts in a document, one of them asked for.")] = 4,
    documents: Annotated[int, typer.Option(help="Documents per cell.")] = 16,
    quantize: Quantize = None,
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
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
    opened = _open(model, device_map, [output, figure], quantize)
    cells = needle_grid(
        opened.model,
        opened.tokenizer,
        np.asarray(evaluation_tokens(text, opened.tokenizer)),
        lengths=lengths,
        depths=depths,
        num_facts=facts,
        num_documents=documents,
        seed=seed,
    )
    title = f"Needles found by {_named(opened)}, one of {facts} facts"
    table, made = needle_table(title, cells), provenance(seed=seed, documents=documents)
    grid = {"text": text, "facts": facts, "needle": [asdict(cell) for cell in cells]}
    shown = {"table": table, "command": made["command"], "provenance": made}
    _finish({**opened.record, **grid, **shown}, output, as_json)
    if figure is not None:
        with whole_file(figure) as partial:
            kind = figure.suffix[1:]
            heat_map(cells, title).savefig(partial, format=kind, dpi=160)
        console.print(f"wrote {figure}")
    if not as_json:
        print_table(title, table["header"], table["rows"])


@evaluate_app.command("zero-shot")
def zero_shot_command(
    model: options.Model,
    tasks: Annotated[
        str, typer.Option(help=f"Comma list of lm-eval tasks; {', '.join(GROUPS)}.")
    ] = "paper-zero-shot",
    limit: Annotated[
        int | None, typer.Option(help="Questions of each task; default all, for LongBench 50.")
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder of your own lm-eval tasks, YAML files.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Questions per forward pass.")] = 1,
    quantize: Quantize = None,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Benchmark tasks by lm-eval (pip install 'rap-kv[eval]')."""
    opened = _open(model, device_map, [output], quantize, dtype)
    named = [name.strip() for name in tasks.split(",") if name.strip()]
    scores = run_tasks(
        opened.model,
        opened.tokenizer,
        named,
        limit=limit,
        folder=task_folder,
        batch_size=batch_size,
        seed=seed,
    )
    result = {
        **opened.record,
        "tasks": [asdict(score) for score in scores],
        "mean": mean_score(scores),
        "lm_eval": harness_version(),
        "provenance": provenance(tasks=named, limit=limit, batch_size=batch_size, seed=seed),
    }
    _finish(result, output, as_json)
    if not as_json:
        rows = [[s.task, s.metric, str(s.num_examples), f"{s.value:.4f}"] for s in scores]
        rows.append(["mean", "", "", f"{mean_score(scores):.4f}"])
        header = ["task", "metric", "questions", "score"]
        print_table(f"Tasks of lm-eval, {_named(opened)}", header, rows)


def _named(opened: Opened) -> str:
    kind = opened.record["quantize"]
    return str(opened.record["model"]) + (f", weights in {kind}" if kind else "")
