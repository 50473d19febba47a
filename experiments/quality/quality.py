"""Perplexity of the bundled model, cut without training: pairs, single channels, random pairs.

    python experiments/quality/quality.py [--windows 48] [--output FILE]

Every cut is measured on the same windows of 512 tokens of the test novels, in float32. The paper's
recipe is root-Fisher scores, adaptive budgets, whole pairs of K and channels of V. Single channels
keep as many key channels as the pairs beside them, by the same scores: `index-aware` lets each
rotate as in the dense model, `re-indexed` is what a plain structured pruner leaves. Writes
quality.json beside this file.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from channels import best_channels, index_aware, reindexed

import rap
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.methods import Rap
from rap.studies.report.report import markdown_table

RETAINS = (0.9, 0.8, 0.7, 0.6, 0.5)
WINDOW = 512  # the length that the bundled model was trained at
CALIBRATION_WINDOWS = 32
SEEDS = (0, 1, 2)


def cuts(bench: DenseContext, retain: float) -> Iterator[tuple[str, Any, Any]]:
    """(name, model, method) of everything that is compared at one retain ratio."""
    adaptive = Rap.paper(retain=retain, align=1)
    # One width that a stock model can have: an even number of channels in every head.
    uniform = Rap.paper(retain=retain, align=1, budget="uniform")
    model, statistics = bench.model, bench.statistics_for([adaptive, uniform])
    plans = {method: bench.plan(method) for method in (adaptive, uniform)}
    yield "pairs", rap.apply(model, plans[adaptive]), adaptive
    yield "pairs, uniform budget", rap.apply(model, plans[uniform]), uniform
    channels = best_channels(plans[adaptive], statistics.layers)
    yield "channels, index-aware", index_aware(model, channels), adaptive
    channels = best_channels(plans[uniform], statistics.layers)
    yield "channels, index-aware, uniform budget", index_aware(model, channels), uniform
    yield "channels, re-indexed, uniform budget", reindexed(model, channels), uniform
    for seed in SEEDS:
        chance = Rap.paper(retain=retain, align=1, score="random", seed=seed)
        yield f"random pairs, seed {seed}", rap.apply(model, bench.plan(chance)), chance
    default = Rap(retain=retain, merge=1)
    yield "default settings", rap.apply(model, bench.plan(default)), default


def measure(num_windows: int) -> dict[str, Any]:
    """Every row of the comparison, dense first."""
    reading = CalibrationText(num_windows=CALIBRATION_WINDOWS, window=WINDOW)
    bench = DenseContext.open("bundled", dtype=torch.float32, reading=reading, progress=True)
    tokens = bench.held_out("bundled")
    bench.statistics_for([Rap.paper(), Rap(merge=1)])  # one reading for what all cuts need

    def value(candidate: Any) -> float:
        found = rap.perplexity(candidate, tokens, window=WINDOW, max_windows=num_windows)
        return found.value

    rows: list[dict[str, Any]] = [{"cut": "dense", "retain": 1.0, "perplexity": value(bench.model)}]
    for retain in RETAINS:
        for name, candidate, method in cuts(bench, retain):
            row = {"cut": name, "retain": retain, "perplexity": value(candidate)}
            rows.append(row | {"method": method.describe()})
            print(f"{retain} {name}: {row['perplexity']:.3f}", flush=True)
    return {"model": "bundled", "fingerprint": bench.fingerprint, "rows": rows}


def table(rows: list[dict[str, Any]], num_windows: int) -> dict[str, Any]:
    """One row per cut, one column per retain ratio, as `rap report` reads it."""
    names = list(dict.fromkeys(row["cut"] for row in rows[1:]))
    found = {(row["cut"], row["retain"]): row["perplexity"] for row in rows}
    figures = [[f"{found[name, retain]:.2f}" for retain in RETAINS] for name in names]
    dense = [f"{rows[0]['perplexity']:.2f}"] * len(RETAINS)
    return {
        "title": "RoPE pairs against single channels, without training",
        "note": (
            f"Perplexity of the bundled model over {num_windows} windows of {WINDOW} tokens of the "
            "test novels. Single channels keep as many key channels as the pairs above them. The "
            "default settings round widths to 8 channels, the others to single pairs."
        ),
        "header": ["cut", *map(str, RETAINS)],
        "rows": [
            ["dense", *dense],
            *([name, *row] for name, row in zip(names, figures, strict=True)),
        ],
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    start = time.perf_counter()
    result = measure(arguments.windows)
    settings = {
        "window": WINDOW,
        "num_windows": arguments.windows,
        "calibration": f"{CALIBRATION_WINDOWS} windows of {WINDOW} tokens from bundled",
        "seed": 0,
    }
    result["seconds"] = round(time.perf_counter() - start, 1)
    result["provenance"] = provenance(**settings)
    result["table"] = table(result["rows"], arguments.windows)
    result["command"] = result["provenance"]["command"]
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
