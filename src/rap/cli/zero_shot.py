"""`rap evaluate zero-shot`: benchmark tasks of lm-eval."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.device import AUTO
from ..checkpoint.provenance import provenance
from ..data.bos import bos_token
from ..evaluation.quality.harness import (
    GROUPS,
    check_questions,
    harness_version,
    mean_score,
    mean_stderr,
    run_tasks,
)
from . import options
from .checkpoints import Quantize, ResultFile, deliver, label, open_checkpoint


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
    check_questions(limit, batch_size)
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
