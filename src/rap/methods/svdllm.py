"""SVD-LLM and its v2 on keys and values: whitened low-rank products over all heads of a layer.

https://arxiv.org/abs/2403.07378, for W_k and W_v alone and at a rank that caches `retain` of the
channels (the original's rank counts parameters and spans every linear). Both factors stay online:
keys and values are reconstructed at every step.

V2, https://arxiv.org/abs/2503.12340, has ranks that follow what each truncation is bound to lose,
at the same cache as all methods here. No code of the original was released, so the allocation is
our reading of its description: among weights of one type, the share that a matrix loses goes with
1 / log(its least loss at `retain`). Its second part, whitening by an eigendecomposition, is how
every method whitens here (`planning.subspace`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..calibration.statistics import Statistics
from ..model.kinds.base import WeightsPlan
from ..model.rope import AttentionShape
from ..planning.budgets import allocate
from ..planning.subspace import whitened_factors
from ..runtime.settings import Count
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, latent_layer, nearest_rank


@dataclass(frozen=True, kw_only=True)
class SvdLlm(Replacing):
    """Truncation-aware SVD of W_k and of W_v, every layer at the same rank.

    multiple: ranks are multiples of this many directions.
    """

    name: ClassVar[str] = "svdllm"
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "one latent of all heads of a layer for keys, and one for values"
    reconstructs: ClassVar[str] = "keys and values"
    whole_keys: ClassVar[bool] = True

    multiple: Count = 1

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method; a step of ranks is no more than a layer has."""
        super().check_shapes(shapes)
        for shape in shapes:
            if shape is not None:
                nearest_rank(self.retain, shape.num_kv_heads * shape.head_dim, self.multiple)

    @property
    def needs(self) -> frozenset[str]:
        """The second moment of what the projections read."""
        return frozenset({"inputs"})

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[WeightsPlan]:
        """A latent of all KV heads for keys and one for values, nothing folded."""
        ranks = self.ranks(layers, statistics)
        return (_layer(layer, *kept) for layer, kept in zip(layers, ranks, strict=True))

    def ranks(
        self, layers: Sequence[DenseLayer], statistics: Statistics
    ) -> Sequence[tuple[int, int]]:
        """The ranks of every layer's keys and values."""
        nearest = [nearest_rank(self.retain, joint_rows(layer), self.multiple) for layer in layers]
        return [(rank, rank) for rank in nearest]


def joint_rows(layer: DenseLayer) -> int:
    """Rows of W_k, and of W_v: the channels of all KV heads."""
    return layer.shape.num_kv_heads * layer.shape.head_dim


def _layer(layer: DenseLayer, key_rank: int, value_rank: int) -> WeightsPlan:
    keys, values = (
        whitened_factors(layer.weight(projection), layer.statistics["input_moment"], rank)
        for projection, rank in (("k", key_rank), ("v", value_rank))
    )
    return latent_layer(layer, keys, values)


@dataclass(frozen=True, kw_only=True)
class SvdLlm2(SvdLlm):
    """SVD-LLM with separate ranks for each W_k and each W_v; each type keeps `retain` in all."""

    name: ClassVar[str] = "svdllm2"
    summary: ClassVar[str] = "as svdllm, with ranks of their own for every layer's keys and values"

    def ranks(
        self, layers: Sequence[DenseLayer], statistics: Statistics
    ) -> Sequence[tuple[int, int]]:
        """By the loss of each matrix over all calibration tokens, as the log depends on its unit.

        `allocate` caps ranks, keeps one at least, and spends what that leaves to the last one.
        """
        tokens = statistics.num_windows * statistics.window
        sizes, kept = [joint_rows(layer) for layer in layers], []
        for projection in "kv":
            losses = [tokens * self._truncation_loss(layer, projection) for layer in layers]
            shares = kept_shares(losses, self.retain)
            kept.append(allocate(shares, self.retain, sizes, unit=self.multiple))
        return list(zip(*kept, strict=True))

    def _truncation_loss(self, layer: DenseLayer, projection: str) -> float:
        """The least E ||(W - Z) x||^2 of a token at the rank that `retain` asks for."""
        weight = layer.weight(projection)
        rank = nearest_rank(self.retain, len(weight), self.multiple)
        moment = layer.statistics["input_moment"].double()
        squares = torch.linalg.eigvalsh(weight @ moment @ weight.mT)
        return float(squares.clamp_min(0)[: len(weight) - rank].sum())


def kept_shares(losses: Sequence[float], retain: float) -> list[float]:
    """What each matrix of a type keeps, `retain` on average: 1 - (1 - retain) w / mean(w).

    w = 1 / log(loss), where a loss of e or less, which has no such w or a senseless one, counts as
    e: that matrix gives most, no matter how little it loses. A share below zero is zero, so the
    mean may exceed `retain`; `allocate` scales to the budget. Losses or their squares, all alike,
    give the same shares.
    """
    weights = [1 / max(1.0, math.log(max(loss, 1.0))) for loss in losses]
    mean = sum(weights) / len(weights)
    return [max(0.0, 1 - (1 - retain) * weight / mean) for weight in weights]
