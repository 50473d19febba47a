"""`rap compress` with a few layers wider than the others, at the same cache.

    python experiments/smollm2-wide-layers/run.py FIRST LAST SHARE compress MODEL -o OUT ...

Layers FIRST to LAST keep SHARE of their cache, and all others an equal part of what is left of
`--retain`. What follows SHARE is a command of `rap`, whose method has merged heads.
"""

import sys
from collections.abc import Sequence
from typing import Any

from rap.cli import main as rap_main
from rap.methods.dense import DenseLayers
from rap.methods.rap import Rap
from rap.planning.budgets import LayerBudget


def steps(retain: float, sizes: Sequence[int], wide: Sequence[int], share: float) -> list[int]:
    """Steps of two channels of every layer of `sizes` steps; the first of the others round up."""
    kept = [round(share * size) if index in wide else 0 for index, size in enumerate(sizes)]
    others = [index for index in range(len(sizes)) if index not in wide]
    left = round(retain * sum(sizes)) - sum(kept)
    for place, index in enumerate(others):
        kept[index] = left // len(others) + (place < left % len(others))
    return kept


def budgets_with(first: int, last: int, share: float) -> Any:
    """What takes the place of `Rap.budgets`, for merged heads."""

    def budgets(self: Rap, scores: Any, dense: DenseLayers) -> Any:
        sizes = [
            merge * shape.head_dim // 2
            for merge, shape in zip(dense.merges, dense.shapes, strict=True)
            if shape is not None
        ]
        found = steps(self.retain, sizes, range(first, last + 1), share)
        kept: list[LayerBudget | None] = self._budgets_of(
            {index: (count, count) for index, count in enumerate(found)}, dense
        )
        return kept

    return budgets


def main() -> None:
    """Take the place of the method's budgets, and run the command."""
    chosen = budgets_with(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    Rap.budgets = chosen  # type: ignore[method-assign]
    sys.argv[:4] = ["rap"]
    rap_main()


if __name__ == "__main__":
    main()
