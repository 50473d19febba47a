"""`rap evaluate`: quality of a dense or pruned checkpoint.

Perplexity, fidelity (how near a pruned checkpoint stays to its dense model), zero-shot (benchmark
tasks of lm-eval) and cache (the cost of quantizing or evicting the cache further) are here; the
other commands of the group have a module each.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..checkpoint.card import interval_text
from ..checkpoint.device import AUTO
from ..checkpoint.provenance import provenance
from ..data.bos import bos_token
from ..data.held_out import evaluation_tokens
from ..evaluation.cache.compressed import (
    CacheCompression,
    check_pieces,
    compressed_perplexity,
    compressed_recall,
)
from ..evaluation.cache.presses import PRESSES, parse_press
from ..evaluation.cache.quantized_cache import CACHE_KINDS
from ..evaluation.quality.fidelity import Fidelity, fidelity
from ..evaluation.quality.harness import (
    GROUPS,
    check_questions,
    harness_version,
    mean_score,
    mean_stderr,
    run_tasks,
)
from ..evaluation.quality.intervals import exponential
from ..evaluation.quality.perplexity import check_sizes, evaluation_window, perplexity
from ..evaluation.retrieval.documents import check_grid
from ..model.errors import RapError
from . import options
from .checkpoints import (
    Dense,
    Opened,
    Quantize,
    ResultFile,
    Words,
    deliver,
    known_fingerprint,
    label,
    open_checkpoint,
    open_dense,
)
from .generation import generation_command
from .groups import LoadingOptions, grouped
from .options import print_table
from .retrieval import retrieval_command

evaluate_app = typer.Typer(no_args_is_help=True, help="Measure the quality of a checkpoint.")


Text = Annotated[
    str,
    typer.Option(
        help="'bundled' test novels, 'wikitext2', 'c4', a .txt or .jsonl file, or a dataset ID."
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Tokens per evaluation window [2048, or the model's maximum].")
]
MaxWindows = Annotated[int | None, typer.Option(help="Number of evaluation windows [all].")]


def perplexity_command(
    model: options.Model,
    text: Text = "bundled",
    window: Window = None,
    max_windows: MaxWindows = None,
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
    tokens = evaluation_tokens(text, opened.tokenizer, evaluation_window(opened.model, window))
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


def fidelity_command(
    pruned: Annotated[
        str, typer.Argument(help="Pruned checkpoint, or any model with the same vocabulary.")
    ],
    dense: Dense,
    text: Text = "bundled",
    window: Window = None,
    max_windows: MaxWindows = None,
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    bos: options.Bos = "auto",
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """KL of PRUNED to its dense model, top-1 agreement, and perplexities.

    Both run in float32 over contiguous non-overlapping windows, as for perplexity. Intervals are
    bootstrap intervals over windows; that of the ratio of perplexities is over pairs of windows.
    """
    check_sizes(window, max_windows)
    opened = open_checkpoint(pruned, device, device_map, [output], dtype="float32", bos=bos)
    original = open_dense(dense, device, device_map)
    measured = fidelity(
        opened.model,
        original,
        evaluation_tokens(text, opened.tokenizer, evaluation_window(opened.model, window)),
        window=window,
        max_windows=max_windows,
        bos=opened.bos,
        progress=not as_json,
    )
    made = provenance(max_windows=max_windows)
    table = _table(f"{label(opened)} compared with {dense}", measured, text)
    figures = {
        "dense": dense,
        "dense_fingerprint": known_fingerprint(original),
        "text": text,
        "bos": opened.bos,
        **asdict(measured),
    }
    deliver(opened, figures, table, made, output, as_json)
    if not as_json:
        print_table(
            "By position in the window",
            ["tokens before", "KL", "same most likely token"],
            [
                [f"{p.start + 1:,}-{p.stop:,}", f"{p.kl:.4g}", f"{p.top1:.2%}"]
                for p in measured.positions
            ],
        )


def _table(title: str, measured: Fidelity, text: str) -> dict[str, Any]:
    rows = [
        ["KL(dense || pruned), nats/token", interval_text(vars(measured.kl), ".4g")],
        ["99th percentile over tokens", f"{measured.kl_p99:.4g}"],
        ["same most likely token", interval_text(vars(measured.top1), ".2%")],
        ["perplexity", f"{measured.perplexity.value:.4f}"],
        ["perplexity of dense", f"{measured.dense_perplexity.value:.4f}"],
        ["perplexity, multiple of dense", interval_text(vars(measured.perplexity_ratio), ".4f")],
    ]
    windows = f"{measured.num_windows} windows of {measured.window:,} tokens of {text}"
    header = ["", "value (95% interval)"]
    return {"title": f"{title}: {windows}", "header": header, "rows": rows}


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
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Benchmark tasks by lm-eval (pip install lm-eval)."""
    check_questions(limit, batch_size, task_folder)
    opened = open_checkpoint(model, device, device_map, [output], quantize, dtype)
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
    rows = [
        [s.task, s.metric, str(s.num_examples), f"{s.value:.4f}", _error(s.stderr)] for s in scores
    ]
    mean, error = mean_score(scores), mean_stderr(scores)
    table: dict[str, Any] = {
        "title": f"Tasks of lm-eval, {label(opened)}",
        "header": ["task", "metric", "questions", "score", "standard error"],
        "rows": [*rows, ["mean", "", "", f"{mean:.4f}", _error(error)]],
    }
    made = provenance(tasks=named, limit=limit, batch_size=batch_size, seed=seed)
    figures = {
        "tasks": [asdict(score) for score in scores],
        "mean": mean,
        "mean_stderr": error,
        "lm_eval": harness_version(),
        # lm-eval leaves it to the tokenizer.
        "bos": bos_token("auto", opened.tokenizer),
    }
    deliver(opened, figures, table, made, output, as_json)


def _error(stderr: float | None) -> str:
    return "" if stderr is None else f"{stderr:.4f}"


CACHE_LOADING = LoadingOptions(dtype="float32")
HEADER = ["cache", "perplexity", "recall", "after the prefix", "at the end", "of exact"]


Bits = Annotated[
    str | None,
    typer.Option(help=f"Quantize the cache (transformers): {', '.join(CACHE_KINDS)}."),
]
Evict = Annotated[
    str | None,
    typer.Option(help=f"Evict tokens (kvpress), as in knorm:0.5: {', '.join(PRESSES)}."),
]
CacheWindow = Annotated[int, typer.Option(help="Tokens per window.")]
Prefix = Annotated[int, typer.Option(help="Tokens per window before the cache is compressed.")]
Piece = Annotated[int, typer.Option(help="Tokens per forward pass afterwards; 1 equals decoding.")]
Distance = Annotated[int, typer.Option(help="Recall: tokens between a fact and its question.")]
Documents = Annotated[int, typer.Option(help="Recall: number of questions, 0 for none.")]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is read with a compressed cache: windows of text, and questions."""

    window: CacheWindow = 512
    prefix: Prefix = 256
    piece: Piece = 32
    max_windows: MaxWindows = None
    distance: Distance = 256
    documents: Documents = 16
    wording: Words = "plain"

    def check(self) -> None:
        """RapError for windows or questions that there cannot be."""
        check_pieces(self.window, self.prefix, self.piece)
        check_sizes(self.window, self.max_windows)
        if self.documents:
            check_grid(self.documents, [self.distance])


@grouped
def cache_command(
    model: options.Model,
    *,
    bits: Bits = None,
    press: Evict = None,
    text: Text = "bundled",
    asked: Asked,
    quantize: Quantize = None,
    load: LoadingOptions = CACHE_LOADING,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Quality and bytes with the cache compressed after a prefix, in bits, in tokens, or in both.

    A prefix is read, its cache is compressed, and the continuation is read with that cache. The
    first row is the same measure with the cache as it is. Needs pip install hqq or
    optimum-quanto; for presses: pip install --no-deps kvpress cachetools fire termcolor.
    """
    if bits is None and press is None:
        raise RapError("no cache compression is given; use --bits hqq4, --press knorm:0.5, or both")
    compression = CacheCompression(bits, parse_press(press) if press else None)
    compression.check()
    asked.check()
    opened = open_checkpoint(
        model, load.device, load.device_map, [output], quantize, load.dtype, load.bos
    )
    ids = evaluation_tokens(text, opened.tokenizer, asked.window)
    exact, compressed = (
        _measured(opened, ids, one, asked, load.seed) for one in (CacheCompression(), compression)
    )
    title = f"{label(opened)}: {asked.prefix} tokens read, then the cache compressed"
    rows = [_row(row, exact) for row in (exact, compressed)]
    made = provenance(seed=load.seed, quantize=quantize, dtype=load.dtype)
    figures = {
        "text": text,
        "bits": bits,
        "press": press,
        "wording": asked.wording,
        "exact": exact,
        "compressed": compressed,
    }
    table = {"title": title, "header": HEADER, "rows": rows}
    deliver(opened, figures, table, made, output, as_json)


def _measured(
    opened: Opened, ids: Any, compression: CacheCompression, asked: Asked, seed: int
) -> dict[str, Any]:
    """Perplexity, bytes and, if questions are asked, recall, as JSON-able data."""
    quality = compressed_perplexity(
        opened.model,
        ids,
        compression,
        window=asked.window,
        prefix=asked.prefix,
        piece=asked.piece,
        max_windows=asked.max_windows,
        bos=opened.bos,
        dtype=None,
    )
    recall = compressed_recall(
        opened.model,
        opened.tokenizer,
        np.asarray(ids),
        compression,
        distances=[asked.distance] if asked.documents else [],
        num_documents=asked.documents,
        seed=seed,
        bos=opened.bos,
        wording=asked.wording,
    )
    cells = [asdict(cell) for cell in recall]
    return {"compression": str(compression), **asdict(quality), "recall": cells}


def _row(row: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    """Bytes are per token read."""
    recall = ", ".join(f"{cell['accuracy']:.0%}" for cell in row["recall"])
    share = row["kv_bytes_per_token"] / exact["kv_bytes_per_token"]
    return [
        row["compression"],
        f"{row['perplexity']:.4f}",
        recall or "-",
        f"{row['prefix_bytes_per_token']:,.0f} B",
        f"{row['kv_bytes_per_token']:,.0f} B",
        f"{share:.0%}",
    ]


evaluate_app.command("perplexity")(perplexity_command)
evaluate_app.command("fidelity")(fidelity_command)
evaluate_app.command("cache")(cache_command)
evaluate_app.command("retrieval")(retrieval_command)
evaluate_app.command("zero-shot")(zero_shot_command)
evaluate_app.command("generation")(generation_command)
