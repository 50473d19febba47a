"""Moments of queries and keys behind their norm: what maps of normalised heads are chosen by.

Where a family normalises queries and keys, what is combined are the normalised ones, before they
rotate (rap.model.factored). The names are those of `pairs`, `joint` and `gradients` with NORMED in
front; layers without such a norm have none of them.

Shapes: B batch, T tokens, G KV heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..model.layers import split_heads
from ..model.norms import mapped_limit, normalise_dense
from .backward import GradientMoment
from .joint import JointMoment
from .observers import ForwardStatistic, GradientStatistic, ObservedLayer, Statistic
from .pair_moment import PairMoment

NORMED = "normed_"
_JOINT = ("joint_key_moment", "joint_free_moment")
_GRADIENTS = ("key_gradient", "free_gradient")


def behind_norm(statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same statistics, of keys and queries behind their norm where there are such."""
    seen = {x.removeprefix(NORMED): v for x, v in statistics.items() if x.startswith(NORMED)}
    return {**statistics, **seen}


def _mapped(layer: ObservedLayer) -> bool:
    return layer.norm is not None and not mapped_limit(layer.norm) and layer.shape.source is None


def _named(statistic: Statistic, parts: Sequence[Statistic], count: int) -> dict[str, Tensor]:
    """What parts found, of that what the statistic leaves, by its names."""
    found = {NORMED + name: x for part in parts for name, x in part.compute(count).items()}
    return {name: x for name, x in found.items() if name in statistic.norm_names}


class NormedMoment(ForwardStatistic):
    """As `pairs` of queries and keys, and `joint` of keys, behind their norm."""

    need = "normed"
    names = ()
    norm_names = tuple(NORMED + name for name in (*PairMoment.names, *_JOINT))
    projections = ("q", "k")

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        self.parts: list[ForwardStatistic] = []
        if _mapped(layer):
            self.parts = [PairMoment(layer), JointMoment(layer)]

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        parts = (PairMoment, JointMoment) if _mapped(layer) else ()
        return sum(part.num_bytes(layer, num_windows) for part in parts)

    def update(self, role: str, inputs: Tensor, outputs: Tensor) -> None:
        if not self.parts:
            return
        norm, dim = self.layer.norm, self.layer.shape.head_dim
        assert norm is not None
        module = getattr(self.layer.module, norm.names["qk".index(role)])
        heads_BHTD = split_heads(outputs, dim).transpose(1, 2)
        normed = normalise_dense(norm, module, heads_BHTD).transpose(1, 2).flatten(-2)
        for part in self.parts[: 2 if role == "k" else 1]:
            part.update(role, inputs, normed)

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return _named(self, self.parts, num_tokens)


class NormedGradient(GradientStatistic):
    """As `gradients` of keys, by what their norm gives."""

    need = "normed_gradients"
    names = ()
    norm_names = tuple(NORMED + name for name in _GRADIENTS)
    projections = ("k",)

    def __init__(self, layer: ObservedLayer):
        self.moment = GradientMoment(layer) if _mapped(layer) else None

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        return GradientMoment.num_bytes(layer, num_windows) if _mapped(layer) else 0

    def watched(self, layer: ObservedLayer, role: str) -> Any:
        """The norm of keys."""
        if self.moment is None or layer.norm is None:
            return None
        return getattr(layer.module, layer.norm.names[1])

    def taken(self, layer: ObservedLayer, role: str, gradient: Tensor) -> Tensor:
        """[B, T, G D], however the family lays out what it normalises."""
        assert layer.norm is not None
        if layer.norm.layout == "BHTD":
            gradient = gradient.transpose(1, 2)
        return gradient.reshape(*gradient.shape[:2], -1)

    def update(self, role: str, gradient: Tensor) -> None:
        assert self.moment is not None
        self.moment.update(role, gradient)

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return _named(self, [] if self.moment is None else [self.moment], num_tokens)
