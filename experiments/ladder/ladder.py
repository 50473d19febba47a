"""Quality of the bundled model down the ladder of cuts and recoveries, one cell at a time.

    python experiments/ladder/ladder.py [--retain 0.7 0.5] [--columns paper rap]

Every cell is a file in cells/ beside this file; a finished one is not run again, so the command can
be killed and repeated. The table is ladder.json there, which `rap report` turns into a page.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quality"))

from channels import best_channels, index_aware

import rap
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.evaluation.quality.perplexity import perplexity
from rap.evaluation.retrieval.recall import copy_loss, recall_grid
from rap.recovery.closed_form import refit_outputs
from rap.recovery.config import PRESETS
from rap.recovery.distillation import distill
from rap.recovery.fit import fit_layers
from rap.recovery.layer_fit import FitConfig

RETAINS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
WINDOW, EVALUATION_WINDOWS, CALIBRATION_WINDOWS = 512, 48, 64
RECALL_DISTANCES, RECALL_FACTS, RECALL_DOCUMENTS = (256, 1000), (4,), 32
PAPER_STEPS = 24
HERE = Path(__file__).parent
COMMAND = "python experiments/ladder/ladder.py"  # whole, whichever part ran last

# Single pairs and channels everywhere, so that every column has the same cache.
CUTS = {
    "channels": rap.Rap.paper(align=2),  # the paper's plan, its key channels chosen one by one
    "paper": rap.Rap.paper(align=2),
    # The next two weigh squared errors of logits and outputs, every layer alike.
    "pairs": rap.Rap(keys="pairs", metric="output", budget="uniform", align=2),
    "fold": rap.Rap(metric="output", budget="uniform", align=2, merge=1),
    # The default: weighed by gradients of the loss, widths where they save most of it.
    "rap": rap.Rap(align=2, merge=1),
    "stock": rap.Rap(profile="stock", align=2),
}
COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "single channels (index-aware)": ("channels", ()),
    "pairs + channels (paper)": ("paper", ()),
    "pairs + subspace": ("pairs", ()),
    "fold + subspace": ("fold", ()),
    "fold + subspace by loss (default)": ("rap", ()),
    "default, one list for all heads": ("stock", ()),
    "default + refit": ("rap", ("refit",)),
    "paper + KD fast": ("paper", ("fast",)),
    "default + refit + KD fast": ("rap", ("refit", "fast")),
    "default + fit": ("rap", ("fit",)),
    "default, one list for all heads, + fit": ("stock", ("fit",)),
    "default + fit + KD full": ("rap", ("fit", "full")),
    f"default + refit + KD, paper's recipe, {PAPER_STEPS} steps": ("rap", ("refit", "paper")),
}


class Bench:
    """The dense model in its context, and its text to judge on."""

    def __init__(self) -> None:
        reading = CalibrationText(num_windows=CALIBRATION_WINDOWS, window=WINDOW)
        self.dense = DenseContext.open(
            "bundled", dtype=torch.float32, reading=reading, progress=True
        )
        self.tokens = self.dense.held_out("bundled")

    def cell(self, retain: float, cut: str, steps: tuple[str, ...]) -> dict[str, Any]:
        """Cut, recover and measure one model."""
        statistics = self.dense.statistics_for(CUTS.values())  # before the clock starts
        started = time.monotonic()
        method = replace(CUTS[cut], retain=retain)
        plan = self.dense.plan(method)
        if cut == "channels":
            small = index_aware(self.dense.model, best_channels(plan, statistics.layers))
        else:
            small = method.apply(self.dense.model, plan)
        done: dict[str, Any] = {}
        for step in steps:
            small, done[step] = RECOVERIES[step](self, small)
        seconds = time.monotonic() - started
        return {
            "recovery": done,
            "seconds": seconds,
            "method": method.describe(),
            "kept_fraction": plan.kept_fraction,
            **self.measure(small),
        }

    def measure(self, model: Any) -> dict[str, Any]:
        """Perplexity, recall and copying of one model on the test novels."""
        quality = perplexity(model, self.tokens, window=WINDOW, max_windows=EVALUATION_WINDOWS)
        text = np.asarray(self.tokens)
        recall = recall_grid(
            model,
            self.dense.tokenizer,
            text,
            distances=RECALL_DISTANCES,
            facts=RECALL_FACTS,
            num_documents=RECALL_DOCUMENTS,
        )
        copied = copy_loss(model, text, num_documents=16)
        return {
            "perplexity": quality.value,
            "recall": [asdict(cell) for cell in recall],
            "copy_gain": copied.gain,
        }


def refit(bench: Bench, small: Any) -> tuple[Any, Any]:
    """The closed-form refit of every output projection."""
    dense = bench.dense
    return small, [asdict(layer) for layer in refit_outputs(small, dense.model, dense.windows)]


def fit(bench: Bench, small: Any) -> tuple[Any, Any]:
    """The fit of every layer, on the calibration novels."""
    config, dense = FitConfig(), bench.dense
    windows = rap.load_windows(
        "bundled", dense.tokenizer, num_windows=config.num_windows, window=config.window, seed=1
    )
    return small, [asdict(layer) for layer in fit_layers(small, dense.model, windows, config)]


def knowledge(preset: str, **changes: Any) -> Callable[[Bench, Any], tuple[Any, Any]]:
    """Distillation with a preset, on the calibration novels; validation windows are theirs too."""

    def run(bench: Bench, small: Any) -> tuple[Any, Any]:
        config = replace(PRESETS[preset], **changes)
        count = config.num_windows or 4000
        windows = rap.load_windows(
            "bundled", bench.dense.tokenizer, num_windows=count, window=config.window, seed=1
        )
        result = distill(small, bench.dense.model, windows, config, progress=True)
        report = {key: value for key, value in result.report.items() if key != "history"}
        return result.model, report

    return run


RECOVERIES: dict[str, Callable[[Bench, Any], tuple[Any, Any]]] = {
    "refit": refit,
    "fit": fit,
    "full": knowledge("full"),
    "fast": knowledge("fast"),
    "paper": knowledge("paper", steps=PAPER_STEPS, evaluate_every=PAPER_STEPS // 2),
}


def origin(bench: Bench, retain: float = RETAINS[0], name: str = "") -> dict[str, Any]:
    """What a cell's file says of itself; the dense one is written with any other."""
    part = ["--retain", str(retain), "--columns", name or next(iter(COLUMNS))]
    return {
        "dense_fingerprint": bench.dense.fingerprint,
        "command": f"{COMMAND} {shlex.join(part)}",
        "provenance": provenance(),
    }


def settings(cut: str = "", retain: float = 1.0, steps: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a cell is made and measured with, the dense one without a cut."""
    measured = {"window": WINDOW, "windows": EVALUATION_WINDOWS, "facts": list(RECALL_FACTS)}
    recall = {"distances": list(RECALL_DISTANCES), "documents": RECALL_DOCUMENTS}
    found: dict[str, Any] = {"measured": measured | recall}
    if cut:
        found["method"] = replace(CUTS[cut], retain=retain).describe()
        found["calibration"] = CALIBRATION_WINDOWS
        presets = {name: asdict(PRESETS[name]) for name in steps if name in PRESETS}
        found["presets"] = presets | ({"fit": asdict(FitConfig())} if "fit" in steps else {})
    return found


def finished(path: Path, fingerprint: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The stored cell, if it is there, of this dense model, and no setting in it is another.

    Cells of earlier releases say less of their settings, and are taken where nothing contradicts.
    """
    if not path.is_file():
        return None
    cell = json.loads(path.read_text(encoding="utf-8"))
    method = asked.get("method", {})
    known = {**asked, **cell, "method": {**method, **cell.get("method", {})}}
    same = all(known[name] == value for name, value in asked.items())
    return cell if same and cell["dense_fingerprint"] == fingerprint else None


def cell_path(folder: Path, cut: str, steps: tuple[str, ...], retain: float) -> Path:
    """Where a cell is stored."""
    return folder / f"{'-'.join((cut, *steps))}-{retain}.json"


def stored(
    folder: Path, fingerprint: str
) -> tuple[dict[tuple[float, str], dict[str, Any]], dict[str, Any]]:
    """All finished cells of this dense model, by retain and column, and the dense one."""
    dense = finished(folder / "dense.json", fingerprint, settings())
    if dense is None:
        raise rap.RapError(f"{folder} has no cells of this model: run the ladder first")
    cells = {}
    for name, (cut, steps) in COLUMNS.items():
        for retain in RETAINS:
            path = cell_path(folder, cut, steps, retain)
            cell = finished(path, fingerprint, settings(cut, retain, steps))
            if cell is not None:
                cells[retain, name] = cell
    return cells, dense


def collect(
    cells: dict[tuple[float, str], dict[str, Any]], dense: dict[str, Any]
) -> dict[str, Any]:
    """The table of everything there is, as `rap report` reads it."""
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    rows = []
    for retain in sorted({retain for retain, _ in cells}, reverse=True):
        for name, show in SHOWN.items():
            found = [cells.get((retain, column)) for column in columns]
            rows.append([f"{retain} {name}", *(show(cell) if cell else "" for cell in found)])
    top = [[f"dense {name}", *([show(dense)] * len(columns))] for name, show in SHOWN.items()]
    table = {
        "title": "From RAP as published to recovery, on the bundled model",
        "header": ["retain", *columns],
        "rows": top + rows,
        "note": (
            f"Perplexity over {EVALUATION_WINDOWS} windows of {WINDOW} tokens of the test novels; "
            f"recall of one of {RECALL_FACTS[0]} facts at {RECALL_DISTANCES} tokens' distance; "
            "copying is the loss saved, in nats per token, on a passage read a second time 512 "
            "tokens later. Widths in single pairs; no training except in the columns of fit and KD."
        ),
    }
    return {
        "table": table,
        "command": COMMAND,
        "dense": dense,
        "provenance": provenance(),
    }


def _recall(cell: dict[str, Any]) -> str:
    return " / ".join(f"{entry['accuracy']:.0%}" for entry in cell["recall"])


SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "perplexity": lambda cell: f"{cell['perplexity']:.2f}",
    "recall": _recall,
    "copying": lambda cell: f"{cell['copy_gain']:.2f}",
}


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--retain", type=float, nargs="+", default=RETAINS)
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), help="names or prefixes")
    parser.add_argument("--collect", action="store_true", help="table of finished cells, no work")
    arguments = parser.parse_args()
    folder = HERE / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench()
    fingerprint = bench.dense.fingerprint
    if arguments.collect:
        write_json(HERE / "ladder.json", collect(*stored(folder, fingerprint)))
        return
    dense_path = folder / "dense.json"
    dense = finished(dense_path, fingerprint, settings())
    if dense is None:
        dense = {**settings(), **bench.measure(bench.dense.model), **origin(bench)}
        write_json(dense_path, dense)
    chosen = [name for name in COLUMNS if any(name.startswith(c) for c in arguments.columns)]
    for name in chosen:
        for retain in arguments.retain:
            cut, steps = COLUMNS[name]
            path = cell_path(folder, cut, steps, retain)
            cell = finished(path, fingerprint, settings(cut, retain, steps))
            if cell is None:
                cell = settings(cut, retain, steps) | bench.cell(retain, cut, steps)
                write_json(path, {**cell, **origin(bench, retain, name)})
            shown = ", ".join(f"{what} {show(cell)}" for what, show in SHOWN.items())
            print(f"{name} at {retain}: {shown} ({cell['seconds']:.0f} s)", flush=True)
    write_json(HERE / "ladder.json", collect(*stored(folder, fingerprint)))


if __name__ == "__main__":
    main()
