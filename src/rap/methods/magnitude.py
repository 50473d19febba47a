"""The simplest pruning: pairs and channels with the smallest weights go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..allocation import Budget
from ..rope import AttentionShape
from ..scoring import LayerScores, Named, score_layers
from .base import PairPruning


@dataclass(frozen=True, kw_only=True)
class Magnitude(PairPruning):
    """Whole pairs and value channels by the L2 norm of their rows of W_k and W_v."""

    name: ClassVar[str] = "magnitude"

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
        """Row norms, summed over a pair."""
        return score_layers("magnitude", statistics, weights, shapes)
