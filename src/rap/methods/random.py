"""The control of every comparison: pairs and channels kept by chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..allocation import Budget
from ..rope import AttentionShape
from ..scoring import LayerScores, Named, score_layers
from .base import PairPruning


@dataclass(frozen=True, kw_only=True)
class Random(PairPruning):
    """Whole pairs and value channels at random, the same for the same `seed`."""

    name: ClassVar[str] = "random"

    budget: Budget = "uniform"

    @property
    def needs(self) -> frozenset[str]:
        """Nothing: no text is read."""
        return frozenset()

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Uniform noise."""
        return score_layers("random", statistics, weights, shapes, self.seed)
