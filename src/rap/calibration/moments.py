"""Second moments of queries, keys and values: per head, across heads, and behind a norm.

PairMoment is what keys are folded by, before they rotate. JointMoment spans the KV heads of a
layer: what merging heads into one cached head needs. It is collected from activations, not computed
as W M W^T from `InputMoment`: that holds [E, E] where this holds [G P, G P] and [G D, G D], smaller
where queries share heads, and is exact with biases and with values that are normalised. The blocks
of a group of g heads on the diagonal are the moments of that group, for any g.

NormMoment is of what the norm of queries and keys divides by. Where a family has such a norm, maps
of heads combine the normalised ones, before they rotate (rap.model.factored). Their names are those
of `pairs`, `joint` and `gradients` with NORMED in front; layers without a norm have none of them.

Shapes: B batch, T tokens, N tokens of a batch or group, H heads of q or k, G KV heads, D head dim,
P pairs, F channels that never rotate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..model.layers import split_heads
from ..model.norms import mapped_limit, normalise_dense
from ..model.specs import QKNorm
from .backward import GradientMoment
from .observers import (
    ForwardStatistic,
    GradientStatistic,
    ObservedLayer,
    Statistic,
    by_kv_head,
    complex_pairs,
    free_channels,
)


class PairMoment(ForwardStatistic):
    """Second moments E[x x^H] of q (summed over the group) and of k, before they rotate.

    Complex ones of pairs: a pair is its first plus i times its second channel, and a rotation
    multiplies it by a unit number. Real ones of the channels that never rotate.
    """

    need = "pairs"
    names = ("query_moment", "query_free_moment", "key_moment", "key_free_moment")
    projections = ("q", "k")

    def __init__(self, layer: ObservedLayer):
        self.shape, pairs = layer.shape, layer.shape.geometry.num_pairs
        heads, free = layer.shape.num_kv_heads, layer.shape.geometry.num_free
        self.sums = {r: layer.zeros(r, heads, pairs, pairs).to(torch.complex64) for r in "qk"}
        self.free = {projection: layer.zeros(projection, heads, free, free) for projection in "qk"}

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        heads_GND = by_kv_head(split_heads(outputs.float(), self.shape.head_dim), self.shape)
        pairs_GNP = complex_pairs(heads_GND, self.shape)
        self.sums[projection] += pairs_GNP.mT @ pairs_GNP.conj()
        free_GNF = free_channels(heads_GND, self.shape)
        self.free[projection] += free_GNF.mT @ free_GNF

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        moments = {}
        for projection, side in (("q", "query"), ("k", "key")):
            moments[f"{side}_moment"] = torch.view_as_real(self.sums[projection] / num_tokens)
            moments[f"{side}_free_moment"] = self.free[projection] / num_tokens
        return moments


class JointMoment(ForwardStatistic):
    """Second moments of all KV heads together: keys before they rotate, and values as projected.

    Keys as complex pairs E[x x^H] and, apart, their channels that never rotate, as in PairMoment.
    """

    need = "joint"
    names = ("joint_key_moment", "joint_free_moment", "joint_value_moment")
    projections = ("k", "v")

    def __init__(self, layer: ObservedLayer):
        self.shape, geometry = layer.shape, layer.shape.geometry
        heads = layer.shape.num_kv_heads
        pairs, free, dim = (
            heads * n for n in (geometry.num_pairs, geometry.num_free, geometry.head_dim)
        )
        self.pairs = layer.zeros("k", pairs, pairs).to(torch.complex64)
        self.free = layer.zeros("k", free, free)
        self.values = layer.zeros("v", dim, dim)

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        states = outputs.float()
        heads_GND = split_heads(states, self.shape.head_dim).flatten(0, 1).transpose(0, 1)
        if projection == "v":
            self.values += _square(heads_GND)
            return
        self.pairs += _square(complex_pairs(heads_GND, self.shape))
        self.free += _square(free_channels(heads_GND, self.shape))

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {
            "joint_key_moment": torch.view_as_real(self.pairs / num_tokens),
            "joint_free_moment": self.free / num_tokens,
            "joint_value_moment": self.values / num_tokens,
        }


def _square(heads_GNX: Tensor) -> Tensor:
    """Sum over tokens of x x^H [G X, G X], where x is the states of all heads, head by head."""
    rows = heads_GNX.transpose(0, 1).flatten(1)
    return rows.mT @ rows.conj()


def centred(states_BTHD: Tensor, norm: QKNorm | None) -> Tensor:
    """What the norm divides: states minus the mean of their head, where it is a LayerNorm."""
    if norm is None or not norm.centred:
        return states_BTHD
    return states_BTHD - states_BTHD.mean(-1, keepdim=True)


def normalized(states_BTHD: Tensor, layer: ObservedLayer, projection: str) -> Tensor:
    """Queries (q) or keys (k) of a layer behind the family's own norm."""
    assert layer.norm is not None
    module = getattr(layer.module, layer.norm.names["qk".index(projection)])
    return normalise_dense(layer.norm, module, states_BTHD.transpose(1, 2)).transpose(1, 2)


def shares(states_BTHD: Tensor, norm: QKNorm | None) -> Tensor:
    """Squares of what attention sees, up to the norm's weight: over the mean the norm divides by.

    Plain squares without a norm.
    """
    squares = centred(states_BTHD, norm).square()
    if norm is None:
        return squares
    over = (-2, -1) if norm.over == "all" else (-1,)
    mean = squares.mean(over, keepdim=True)
    return squares / mean.clamp_min(torch.finfo(squares.dtype).tiny)


class NormMoment(ForwardStatistic):
    """Second moments [H, D, D] of what every head's norm divides, for queries and for keys."""

    need = "norms"
    names = ("norm_moment_q", "norm_moment_k")
    projections = ("q", "k")

    def __init__(self, layer: ObservedLayer):
        shape = layer.shape
        self.norm, self.head_dim = layer.norm, shape.head_dim
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
        self.sums = {r: layer.zeros(r, n, shape.head_dim, shape.head_dim) for r, n in heads.items()}

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        states_BTHD = centred(outputs.float().unflatten(-1, (-1, self.head_dim)), self.norm)
        states_HND = states_BTHD.flatten(0, 1).transpose(0, 1)
        self.sums[projection] += states_HND.mT @ states_HND

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {
            f"norm_moment_{projection}": total / num_tokens
            for projection, total in self.sums.items()
        }


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

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        if not self.parts:
            return
        states_BTHD = split_heads(outputs, self.layer.shape.head_dim)
        normed = normalized(states_BTHD, self.layer, projection).flatten(-2)
        for part in self.parts[: 2 if projection == "k" else 1]:
            part.update(projection, inputs, normed)

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

    def watched(self, layer: ObservedLayer, projection: str) -> Any:
        """The norm of keys."""
        if self.moment is None or layer.norm is None:
            return None
        return getattr(layer.module, layer.norm.names[1])

    def taken(self, layer: ObservedLayer, projection: str, gradient: Tensor) -> Tensor:
        """[B, T, G D], in any layout of the family's norm."""
        assert layer.norm is not None
        if layer.norm.layout == "BHTD":
            gradient = gradient.transpose(1, 2)
        return gradient.reshape(*gradient.shape[:2], -1)

    def update(self, projection: str, gradient: Tensor) -> None:
        assert self.moment is not None
        self.moment.update(projection, gradient)

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return _named(self, [] if self.moment is None else [self.moment], num_tokens)
