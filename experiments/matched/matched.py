"""Low-rank methods at the attention parameters of `rap` at 0.7, on the bundled model.

    python experiments/matched/matched.py [--recover none fast] [-o runs/matched]

At the same cache they have more parameters. This finds the retain ratio at which each has as
many, by formula for Llama-3-8B and by counts on models cut here, and measures those cells as
`rap compare` does, beside the cells of `rap` in experiments/compare. Repeated, it measures what is
missing. Writes matched.json beside this file.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cost"))

from formulas import Sizes, dense, low_rank, sizes_of

from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.evaluation.cost.footprint import footprint
from rap.methods import parse_method
from rap.studies.compare.capability import NEAR, REFERENCE, matched, parameters
from rap.studies.compare.grid import Grid
from rap.studies.compare.measurement import Measures
from rap.studies.compare.run import Bench, compare
from rap.studies.compare.tables import MATCHED_QUALITY
from rap.studies.compare.variants import DENSE
from rap.studies.report.report import markdown_table

# How each is written in a grid, and its groups of KV heads (0: all together), and whether values
# are folded into the output.
METHODS = {
    "palu:group_size=1": (1, True),
    "palu": (4, True),
    "svdllm": (0, False),
}
STEPS = 100  # ratios are tried in hundredths
# As the cells of experiments/compare were measured.
READ: dict[str, Any] = {
    "num_windows": 64,
    "window": 512,
    "measures": Measures(text="bundled", window=512, num_windows=48),
}
COMPARED = Path(__file__).parents[1] / "compare" / "compare.json"


def by_formula(sizes: Sizes, group_size: int, fold: bool, target: float) -> tuple[float, float]:
    """The retain ratio, in ranks of whole directions, whose weights come nearest; and them."""
    groups = 1 if not group_size else max(1, sizes.num_kv_heads // group_size)
    full, whole = sizes.num_kv_heads * sizes.head_dim // groups, dense(sizes).weights
    shares = {
        rank / full: low_rank(sizes, groups, rank, rank, fold=fold).weights / whole
        for rank in range(1, full + 1)
    }
    retain = min(shares, key=lambda ratio: abs(shares[ratio] - target))
    return retain, shares[retain]


class Counts:
    """Attention parameters of cut models, each planned and built once."""

    def __init__(self, output: Path) -> None:
        self.grid = Grid(methods=tuple(METHODS), **READ)
        # Its statistics are those that the cells are cut by, collected once for both.
        bench = Bench("bundled", None, "float32", {}, self.grid, output, False, True)
        self.model, self.statistics = bench.dense.model, bench.statistics()
        self.whole = footprint(self.model).attention_parameters
        self.known: dict[tuple[str, int], float] = {}

    def share(self, spec: str, step: int) -> float:
        """Of the model cut at step / STEPS, as a part of dense."""
        if (spec, step) not in self.known:
            method = parse_method(spec, step / STEPS, **self.grid.common)
            small = method.apply(self.model, method.plan(self.model, self.statistics))
            found = footprint(small).attention_parameters / self.whole
            self.known[spec, step] = found
        return self.known[spec, step]

    def nearest(self, spec: str, target: float) -> tuple[float, float]:
        """The ratio whose parameters come nearest, which grow with it; and them."""
        low, high = 2, STEPS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.share(spec, middle) < target else (low, middle)
        best = min((low, high), key=lambda step: abs(self.share(spec, step) - target))
        return best / STEPS, self.share(spec, best)


def solved(counts: Counts, target: float) -> list[dict[str, Any]]:
    """For every method where it matches, on Llama-3-8B's sizes and on the bundled model."""
    found = []
    for spec, (group_size, fold) in METHODS.items():
        formula = by_formula(sizes_of("Llama-3-8B"), group_size, fold, target)
        counted = counts.nearest(spec, target)
        found.append({"method": spec, "llama": formula, "bundled": counted})
        print(spec, formula, counted, flush=True)
    return found


def solution_table(found: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """A row a method: the ratio that matches, or that none does."""

    def cells(retain: float, share: float) -> list[str]:
        reached = abs(share - target) <= NEAR
        return [f"{retain:.2f}" if reached else f"none (nearest {retain:.3f})", f"{share:.1%}"]

    return {
        "title": f"At which retain ratio attention has the parameters of {REFERENCE[0]} at "
        f"{REFERENCE[1]:g}",
        "note": (
            f"{target:.1%} of dense. Llama-3-8B by formula, equal ranks in all layers; the bundled "
            "model (2 KV heads) counted on models cut at every hundredth, PaLU with its Fisher "
            "ranks, which give values more than keys. none: not to within "
            f"{NEAR:.0%} of dense at any rank."
        ),
        "header": ["method", "Llama-3-8B", "parameters", "bundled", "parameters"],
        "rows": [[one["method"], *cells(*one["llama"]), *cells(*one["bundled"])] for one in found],
    }


def reference_cells(recoveries: list[str]) -> list[dict[str, Any]]:
    """The dense cell and those of the reference, as the comparison measured them."""
    cells = json.loads(COMPARED.read_text(encoding="utf-8"))["cells"]
    return [
        cell
        for cell in cells
        if cell["method"] == DENSE
        or ((cell["method"], cell["retain"]) == REFERENCE and cell["recover"] in recoveries)
    ]


def measured(
    found: list[dict[str, Any]], recoveries: list[str], output: Path
) -> Iterator[list[dict[str, Any]]]:
    """The records of every method at its ratio: all so far, after each new one."""
    cells: list[dict[str, Any]] = []
    for recover in recoveries:
        for one in found:
            result = compare(
                methods=[one["method"]],
                retain=[one["bundled"][0]],
                recover=[recover],
                output=output,
                say=print,
                **READ,
            )
            cells += [cell for cell in result["cells"] if cell["method"] != DENSE]
            yield cells


def main() -> None:
    """Solve, measure, print, and write what there is after every cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recover", nargs="+", default=["none", "fast"])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs") / "matched")
    arguments = parser.parse_args()
    whole, *reference = reference_cells(arguments.recover)
    target = parameters(reference[0], whole)
    found = solved(Counts(arguments.output), target)
    made = provenance(recover=arguments.recover)
    for cells in measured(found, arguments.recover, arguments.output):
        records = [*reference, *cells]
        table = matched("bundled", whole, records, MATCHED_QUALITY)
        shown = [table, solution_table(found, target)]
        result = {
            "title": "Matched attention compute: bundled",
            "tables": shown,
            "command": made["command"],
            "cells": [whole, *records],
            "solved": found,
            "provenance": made,
        }
        write_json(Path(__file__).with_suffix(".json"), result)
    print("\n\n".join(markdown_table(one) for one in shown))


if __name__ == "__main__":
    main()
