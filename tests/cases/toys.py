"""What a newcomer writes, whole: a statistic in one class, and a method in one class that asks it.

Registered for a test by `toys.registered`; in the package each would be one line of its registry.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from rap.calibration.observers import ForwardStatistic, ObservedLayer
from rap.calibration.registry import STATISTICS
from rap.methods import METHODS, PairPruning
from rap.model.layers import split_heads
from rap.model.rope import AttentionShape
from rap.planning.scores import LayerScores, Named


class Peaks(ForwardStatistic):
    """The largest absolute value of every channel of k (before rotation) and of v, [G, D]."""

    need = "peaks"
    names = ("peak_k", "peak_v")
    projections = ("k", "v")

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        heads, width = layer.shape.num_kv_heads, layer.shape.head_dim
        self.peaks = {
            projection: layer.zeros(projection, heads, width) for projection in self.projections
        }

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        seen = split_heads(outputs.float(), self.layer.shape.head_dim).abs().amax((0, 1))
        self.peaks[projection] = torch.maximum(self.peaks[projection], seen)

    def compute(self, count: int) -> dict[str, Tensor]:
        return {"peak_k": self.layer.canonical(self.peaks["k"]), "peak_v": self.peaks["v"]}


@dataclass(frozen=True, kw_only=True)
class Loudest(PairPruning):
    """Pairs and value channels by their peaks.

    power: what peaks are raised to before the two of a pair are added.
    """

    name: ClassVar[str] = "loudest"
    family: ClassVar[str] = "peak pruning"
    summary: ClassVar[str] = "the whole pairs and value channels with the largest peaks"

    power: float = 1.0

    @classmethod
    def square(cls, **settings: float) -> "Loudest":
        """Peaks as energies."""
        return cls(**{"power": 2.0} | settings)

    @property
    def needs(self) -> frozenset[str]:
        """The peaks."""
        return frozenset({"peaks"})

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Peaks of the two channels of a pair, added."""
        return [
            None if found is None or shape is None else self._score(found, shape)
            for found, shape in zip(statistics, shapes, strict=True)
        ]

    def _score(self, found: Named, shape: AttentionShape) -> LayerScores:
        key_GD, value_GD = found["peak_k"] ** self.power, found["peak_v"] ** self.power
        pairs, rotary = shape.geometry.num_pairs, shape.geometry.rotary_dim
        pairs_GP = key_GD[:, :pairs] + key_GD[:, pairs:rotary]
        return LayerScores(pairs_GP, key_GD[:, rotary:], value_GD)


@contextmanager
def registered() -> Iterator[None]:
    """Both in their registries, for as long as the context lasts."""
    with (
        mock.patch.dict(STATISTICS, {Peaks.need: Peaks}),
        mock.patch.dict(METHODS, {Loudest.name: Loudest}),
    ):
        yield
