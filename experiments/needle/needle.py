"""Needles in a haystack: the dense bundled model beside pruned ones, depth x length.

    python experiments/needle/needle.py [--documents 16]

Models are cut as `rap compare` cuts them and not trained afterwards. Writes needle.json beside this
file, and needle.png with a heat map of every model.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rap
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.evaluation.retrieval.needle import NeedleCell, heat_maps, needle_grid, needle_table
from rap.methods import parse_method
from rap.studies.compare.grid import Grid
from rap.studies.compare.variants import DENSE
from rap.studies.report.report import markdown_table

LENGTHS, DEPTHS, FACTS = (256, 512, 1024, 2048), (0.0, 0.25, 0.5, 0.75, 1.0), 4
CUTS = (("rap", 0.7), ("rap", 0.5), ("rap:paper", 0.5), ("palu", 0.5))


def opened(grid: Grid) -> DenseContext:
    """The dense model, calibrated as in a comparison."""
    reading = CalibrationText(grid.calibration, grid.num_windows, grid.window, grid.seed, grid.bos)
    return DenseContext.open("bundled", dtype=torch.float32, reading=reading, progress=True)


def models(bench: DenseContext, grid: Grid) -> Any:
    """Name and model, one after the other: dense, then every cut."""
    yield DENSE, bench.model
    methods = {(spec, r): parse_method(spec, r, merge=1, **grid.common) for spec, r in CUTS}
    bench.statistics_for(methods.values())  # one reading for what all cuts need
    for (spec, retain), method in methods.items():
        yield f"{spec} at {retain:g}", method.apply(bench.model, bench.plan(method))


def tables(found: Mapping[str, Sequence[NeedleCell]], documents: int) -> list[dict[str, Any]]:
    """Means over depths, a row a model; then every depth, a table a model."""
    rows = [
        [name, *(f"{_mean(cells, length):.0%}" for length in LENGTHS), f"{_mean(cells):.0%}"]
        for name, cells in found.items()
    ]
    overview = {
        "title": "Needles found, mean over depths",
        "note": (
            f"Bundled model, no recovery: one of {FACTS} numbers hidden in a novel is asked for at "
            f"the end; {documents} documents a cell, {len(DEPTHS)} depths. Found if every token "
            "of the number is the greedy choice."
        ),
        "header": ["model", *(f"{length:,} tokens" for length in LENGTHS), "all"],
        "rows": rows,
    }
    return [overview, *(needle_table(f"By depth: {n}", cells) for n, cells in found.items())]


def _mean(cells: Sequence[NeedleCell], length: int | None = None) -> float:
    return float(np.mean([c.accuracy for c in cells if length in (None, c.length)]))


def main() -> None:
    """Measure, print, write the result and its picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=16)
    documents = parser.parse_args().documents
    grid = Grid(methods=tuple(spec for spec, _ in CUTS), num_windows=64, window=512)
    bench = opened(grid)
    text = np.asarray(bench.held_out("bundled"))
    found, fingerprints = {}, {}
    for name, model in models(bench, grid):
        fingerprints[name] = rap.fingerprint_model(model)
        found[name] = needle_grid(
            model,
            bench.tokenizer,
            text,
            lengths=LENGTHS,
            depths=DEPTHS,
            num_facts=FACTS,
            num_documents=documents,
        )
        print(markdown_table(needle_table(name, found[name])), flush=True)
    shown = tables(found, documents)
    print(markdown_table(shown[0]))
    made = provenance(documents=documents, facts=FACTS, seed=0)
    result = {
        "title": "Needle in a haystack, dense and pruned",
        "tables": shown,
        "command": made["command"],
        "fingerprints": fingerprints,
        "needle": {name: [asdict(cell) for cell in cells] for name, cells in found.items()},
        "provenance": made,
    }
    write_json(Path(__file__).with_suffix(".json"), result)
    heat_maps(found).savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
