"""How much text does a cut need? The default method after 1, 2, 4, ... windows of calibration.

    python experiments/archive/calibration-windows/calibration_windows.py MODEL
        [--calibration TEXT] [--text TEXT] [--windows 32] [--output FILE]

Every number of windows begins with those of the one before, so each is read once: statistics of
the default method are means over tokens. Cuts are compared with the dense model on the same
windows of held-out text. Writes calibration_windows.json beside this file.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.calibration.run import calibrate
from rap.calibration.statistics import Statistics
from rap.checkpoint.card import interval_text
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.evaluation.quality.fidelity import DenseStates
from rap.methods import Rap
from rap.studies.report.report import markdown_table

RETAINS = (0.7, 0.5)
HELD_OUT_WINDOW = 2048


def joined(before: Statistics | None, more: Statistics) -> Statistics:
    """Statistics of both texts: means, weighted by the windows that they are of."""
    if before is None:
        return more
    total = before.num_windows + more.num_windows
    share = more.num_windows / total
    layers = tuple(
        None
        if one is None or other is None
        # In place of one * (1 - share): a moment keeps the precision of the larger sum.
        else {name: one[name] + (other[name] - one[name]) * share for name in one}
        for one, other in zip(before.layers, more.layers, strict=True)
    )
    return Statistics(layers, total, more.window, more.needs, more.fingerprint)


def measure(source: str, reading: CalibrationText, text: str, held_out: int) -> dict[str, Any]:
    """A row a number of windows and retain ratio."""
    bench = DenseContext.open(source, dtype=torch.float32, reading=reading)
    model, windows = bench.model, bench.windows
    tokens = bench.held_out(text)
    sizes: dict[str, Any] = {"window": HELD_OUT_WINDOW, "max_windows": held_out}
    states = DenseStates(model, tokens, **sizes, bos=bench.bos)
    methods = {retain: Rap(retain=retain, merge=1) for retain in RETAINS}
    needs = frozenset().union(*(method.needs_for(model) for method in methods.values()))
    rows: list[dict[str, Any]] = []
    statistics, start, count = None, 0, 1
    while count <= len(windows):
        statistics = joined(statistics, calibrate(model, windows[start:count], needs))
        for retain, method in methods.items():
            small = method.apply(model, method.plan(model, statistics))
            compared = states.compare(small)
            row = {"windows": count, "retain": retain, **compared.figures()}
            rows.append(row | {"perplexity": compared.perplexity.value})
            print(f"{count} windows, {retain}: {rows[-1]['perplexity']:.3f}", flush=True)
        start, count = count, 2 * count
    dense = compared.dense_perplexity.value
    return {"model": source, "fingerprint": bench.fingerprint, "dense": dense, "rows": rows}


def table(result: dict[str, Any], window: int, held_out: int) -> dict[str, Any]:
    """A row a number of windows, as `rap report` reads it."""
    counts = list(dict.fromkeys(row["windows"] for row in result["rows"]))
    at = {(row["windows"], row["retain"]): row for row in result["rows"]}
    rows = [
        [
            f"{count} x {window:,}",
            *(f"{at[count, retain]['perplexity']:.2f}" for retain in RETAINS),
            *(interval_text(at[count, retain]["kl"], ".3f") for retain in RETAINS),
        ]
        for count in counts
    ]
    return {
        "title": f"Calibration samples, {result['model']}",
        "note": (
            f"The default method, no recovery; perplexity (dense {result['dense']:.2f}) and KL "
            f"to the dense model in nats/token over {held_out} windows of {HELD_OUT_WINDOW:,} "
            "tokens, with 95% bootstrap intervals."
        ),
        "header": [
            "windows",
            *(f"PPL at {retain:g}" for retain in RETAINS),
            *(f"KL at {retain:g}" for retain in RETAINS),
        ],
        "rows": rows,
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--text", default="bundled", help="held-out text")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--held-out-windows", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    start = time.perf_counter()
    reading = CalibrationText(arguments.calibration, arguments.windows, arguments.window)
    held_out = arguments.held_out_windows
    result = measure(arguments.model, reading, arguments.text, held_out)
    result["seconds"] = round(time.perf_counter() - start, 1)
    asked = {name: value for name, value in vars(arguments).items() if name != "output"}
    result["provenance"] = provenance(**asked)
    result["table"] = table(result, arguments.window, held_out)
    result["command"] = result["provenance"]["command"]
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
