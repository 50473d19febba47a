"""SVD-LLM on keys and values: one whitened low-rank product over all heads of a layer.

https://arxiv.org/abs/2403.07378, for W_k and W_v alone and at a rank that caches `retain` of the
channels (the original's rank counts parameters and spans every linear). Both factors stay online:
keys and values are reconstructed at every step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..calibration.statistics import Statistics
from ..model.kinds.base import WeightsPlan
from ..planning.subspace import whitened_factors
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, latent_layer, nearest_rank
from .settings import Count


@dataclass(frozen=True, kw_only=True)
class SvdLlm(Replacing):
    """Truncation-aware SVD of W_k and of W_v, every layer at the same rank.

    multiple: ranks are multiples of this many directions.
    """

    name: ClassVar[str] = "svdllm"
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "one latent of all heads of a layer for keys, and one for values"
    reconstructs: ClassVar[str] = "keys and values"

    multiple: Count = 1

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
        whitened_factors(layer.weight(role), layer.statistics["input_moment"], rank)
        for role, rank in (("k", key_rank), ("v", value_rank))
    )
    return latent_layer(layer, keys, values)
