"""Zero-shot accuracy of SmolLM2-135M-Instruct, dense and cut to 0.7 and 0.5 of its cache.

    python experiments/smollm2-zero-shot/run.py --task-folder TASKS --statistics FOLDER
        [--checkpoint NAME=DIRECTORY ...] [--limit 500]

Calibration reads wikitext2-valid-tokenized.txt in the current folder; its statistics are kept in
FOLDER. TASKS holds lm-eval tasks named local_arc_easy and so on. Every task of a model is a file in
cells/ beside this file; a finished one is not run again, so the command can be killed and repeated.
zero-shot.json there has the rows of every model that is finished. Checkpoints are further rows.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load
from rap.checkpoint.provenance import provenance
from rap.checkpoint.source import resolve_source
from rap.evaluation.quality.harness import (
    TaskScore,
    harness_version,
    mean_score,
    mean_stderr,
    run_tasks,
)
from rap.methods import Method, parse_method
from rap.model.fingerprint import fingerprint_model
from rap.studies.report.report import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import relative, weights_of

SOURCE = "smollm2"
READING = CalibrationText("wikitext2-valid-tokenized.txt", num_windows=24, window=1024)
TASKS = {
    "local_arc_easy": "ARC-Easy",
    "local_arc_challenge": "ARC-Challenge",
    "local_piqa": "PIQA",
    "local_openbookqa": "OpenBookQA",
    "local_winogrande": "WinoGrande",
    "local_hellaswag": "HellaSwag",
}
CUTS = [(text, retain) for retain in (0.7, 0.5) for text in ("rap", "palu", "rap:paper")]
BATCH_SIZE = 4  # rows of short questions; a CPU reads a few at once as fast as one
HERE = Path(__file__).parent
# Whole, whichever part ran last.
COMMAND = (
    "python experiments/smollm2-zero-shot/run.py --task-folder tasks --statistics statistics "
    "--checkpoint 'rap 0.5 fit=fitted/rap-0.5' --checkpoint 'rap 0.7 fit=fitted/rap-0.7' "
    "--checkpoint 'rap 0.5 fit+full=distilled/rap-0.5' "
    "--checkpoint 'rap 0.7 fit+full=distilled/rap-0.7' "
    "--checkpoint 'rap 0.7 fit, mixed text=fitted/mixed-0.7' "
    "--checkpoint 'palu 0.7 fit=fitted/palu-0.7' --checkpoint 'palu 0.5 fit=fitted/palu-0.5' "
    "--checkpoint 'rap:paper 0.7 fit=fitted/rap-paper-0.7' "
    "--checkpoint 'rap:paper 0.5 fit=fitted/rap-paper-0.5' "
    "--checkpoint 'rap:shrinkage=1 0.7 fit=fitted/shrinkage-0.7' "
    "--checkpoint 'rap:shrinkage=1 0.5 fit=fitted/shrinkage-0.5' "
    "--checkpoint 'rap:shrinkage=1:reach=1024 0.7 fit, general text=fitted/general-0.7' "
    "--checkpoint 'rap:paper 0.7 fit+full=distilled/rap-paper-0.7' "
    "--checkpoint 'rap:paper 0.5 fit+full=distilled/rap-paper-0.5' "
    "--checkpoint 'palu 0.7 fit+full=distilled/palu-0.7' "
    "--checkpoint 'palu 0.5 fit+full=distilled/palu-0.5' "
    "--checkpoint 'rap:merge=all:profile=stock 0.5 fit=fitted/merged-plain-0.5'"
)


@dataclass(frozen=True)
class Subject:
    """A model to measure: the dense one, one that `method` makes of it, or a checkpoint."""

    name: str
    method: Method | None = None
    directory: Path | None = None

    def key(self, bench: DenseContext) -> dict[str, Any]:
        """What a finished cell must agree in."""
        key: dict[str, Any] = {"model": self.name, "dense_fingerprint": bench.fingerprint}
        if self.method is not None:
            key["method"] = self.method.describe()
            key["calibration"] = READING.describe(bench.bos)
        if self.directory is not None:
            key["checkpoint"] = self.directory.as_posix()
            key["fingerprint"] = weights_of(self.directory)
        return key

    def make(self, bench: DenseContext) -> tuple[Any, dict[str, Any]]:
        """The model, and what its cells say of it."""
        if self.directory is not None:
            model = load(resolve_source(self.directory), dtype="float32")
            return model, {"fingerprint": fingerprint_model(model)}
        if self.method is None:
            return bench.model, {"kept_fraction": 1.0}
        plan = bench.plan(self.method)
        model = self.method.apply(bench.model, plan)
        return model, {"kept_fraction": plan.kept_fraction}


def subjects(checkpoints: Sequence[tuple[str, Path]]) -> list[Subject]:
    """All rows, in the order of measurement."""
    cuts = [
        Subject(f"{text} {retain:g}", parse_method(text, retain=retain, merge=1))
        for text, retain in CUTS
    ]
    extra = [Subject(name, directory=directory) for name, directory in checkpoints]
    return [Subject("dense"), *cuts, *extra]


def cell_path(subject: Subject, task: str) -> Path:
    """Where a cell is stored."""
    folder = subject.name.replace(" ", "-").replace(":", "-")
    return HERE / "cells" / folder / f"{task}.json"


def finished(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The stored cell, if it is there and of the same model and questions.

    Cells of earlier releases have no calibration in their key, and the fingerprint beside it.
    """
    if not path.is_file():
        return None
    cell: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = {name: cell[name] for name in ("fingerprint",) if name in cell} | cell["key"]
    # Through JSON, in which a tuple is a list.
    wanted = json.loads(json.dumps(key))
    later = {"fingerprint", "calibration"} - known.keys()
    same = {name: known.get(name) for name in wanted if name not in later}
    return cell if same == {n: x for n, x in wanted.items() if n not in later} else None


def cell_key(bench: DenseContext, subject: Subject, task: str, limit: int) -> dict[str, Any]:
    """What a finished cell of a model and a task must agree in."""
    return {**subject.key(bench), "task": task, "limit": limit}


def is_finished(bench: DenseContext, subject: Subject, limit: int) -> bool:
    """Whether all tasks of a model are stored."""
    keys = {task: cell_key(bench, subject, task, limit) for task in TASKS}
    return all(finished(cell_path(subject, task), key) for task, key in keys.items())


def measure(
    bench: DenseContext, subject: Subject, folder: Path, limit: int
) -> Iterator[dict[str, Any]]:
    """A cell a task: stored ones, and the missing ones as soon as each is finished."""
    made: tuple[Any, dict[str, Any]] | None = None
    for task, title in TASKS.items():
        path = cell_path(subject, task)
        key = cell_key(bench, subject, task, limit)
        cell = finished(path, key)
        if cell is None:
            made = made or subject.make(bench)
            started, busy = time.monotonic(), time.process_time()
            (score,) = run_tasks(
                made[0],
                bench.tokenizer,
                [task],
                limit=limit,
                folder=folder,
                batch_size=BATCH_SIZE,
            )
            cell = {
                "key": key,
                **made[1],
                "score": asdict(score),
                "seconds": round(time.monotonic() - started, 1),
                "cpu_seconds": round(time.process_time() - busy, 1),
                "lm_eval": harness_version(),
                "command": COMMAND,
                "provenance": provenance(limit=limit, batch_size=BATCH_SIZE),
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, cell)
        shown = f"{cell['score']['value']:.3f} ({cell['cpu_seconds']:.0f} s of CPU)"
        print(f"{subject.name}, {title}: {shown}", flush=True)
        yield cell


def row(subject: Subject, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A model with all its tasks."""
    scores = [TaskScore(**cell["score"]) for cell in cells]
    shared = {name: cells[0][name] for name in ("kept_fraction", "fingerprint") if name in cells[0]}
    method = {} if subject.method is None else {"method": subject.method.describe()}
    return {
        "name": subject.name,
        **method,
        **shared,
        "tasks": [asdict(score) for score in scores],
        "mean": mean_score(scores),
        "mean_stderr": mean_stderr(scores),
        "seconds": round(sum(cell["seconds"] for cell in cells), 1),
    }


def table(rows: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A row a model, as `rap report` reads it."""
    shown = [
        [
            one["name"],
            *(f"{score['value']:.1%}" for score in one["tasks"]),
            f"{one['mean']:.1%} +- {one['mean_stderr']:.1%}",
        ]
        for one in rows
    ]
    return {
        "title": "Zero-shot accuracy of SmolLM2-135M-Instruct, without recovery and distilled",
        "note": (
            f"The first {limit} questions of each task, no examples shown; accuracy by "
            "log-likelihood a character, on WinoGrande plain. The mean with its standard error, "
            "which is of the questions drawn: all rows answer the same."
        ),
        "header": ["model", *TASKS.values(), "mean"],
        "rows": shown,
    }


def named(text: str) -> tuple[str, Path]:
    """NAME=DIRECTORY."""
    name, equals, directory = text.rpartition("=")  # settings of methods have one too
    if not (name and equals and directory):
        raise argparse.ArgumentTypeError(f"{text}: write NAME=DIRECTORY")
    return name, relative(directory)


def main() -> None:
    """Measure what is missing; write the rows after every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task-folder", type=relative, required=True)
    parser.add_argument("--statistics", type=relative, required=True)
    parser.add_argument("--checkpoint", type=named, action="append", default=[])
    parser.add_argument("--limit", type=int, default=500)
    arguments = parser.parse_args()
    limit: int = arguments.limit
    bench = DenseContext.open(
        SOURCE, dtype=torch.float32, reading=READING, kept_in=arguments.statistics, progress=True
    )
    chosen = subjects(arguments.checkpoint)
    # Whatever the missing cuts need is read at once, if it is not there.
    cuts = [one for one in chosen if one.method is not None and not is_finished(bench, one, limit)]
    if cuts:
        bench.statistics_for([one.method for one in cuts if one.method is not None])
    rows: list[dict[str, Any]] = []
    for subject in chosen:
        cells = list(measure(bench, subject, arguments.task_folder, limit))
        rows.append(row(subject, cells))
        result = {
            "model": SOURCE,
            "fingerprint": bench.fingerprint,
            "calibration": READING.describe(bench.bos),
            "rows": rows,
            "table": table(rows, limit),
            "lm_eval": harness_version(),
            "command": COMMAND,
            "provenance": provenance(limit=limit, batch_size=BATCH_SIZE),
        }
        write_json(HERE / "zero-shot.json", result)
    print(markdown_table(table(rows, limit)))


if __name__ == "__main__":
    main()
