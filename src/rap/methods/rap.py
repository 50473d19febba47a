"""RoPE-Aligned Pruning: keep or drop whole RoPE pairs of K, and channels of V."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import RapError
from ..rope import AttentionShape
from ..scoring import SCORES, LayerScores, Named, score_layers
from .base import PairPruning


@dataclass(frozen=True, kw_only=True)
class Rap(PairPruning):
    """The paper's method (algorithm `rap`), with `score` one of rap.scoring.SCORES."""

    name: ClassVar[str] = "rap"

    score: str = "fisher"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score not in SCORES:
            raise RapError(f"unknown score {self.score!r}: use one of {', '.join(sorted(SCORES))}")

    @property
    def needs(self) -> frozenset[str]:
        """What the score asks of calibration."""
        return SCORES[self.score].needs

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Importance by the chosen score."""
        return score_layers(self.score, statistics, weights, shapes, self.seed)
