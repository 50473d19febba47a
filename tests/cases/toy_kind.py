"""A kind of attention in one file and one row: key channels of every head turned by a basis.

Keys and queries are rotated by RoPE as in the dense head, then the first `keys` coordinates in an
orthogonal basis of each head are kept; values keep their first `values` channels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rap.calibration.statistics import Statistics
from rap.methods.replacing import DenseLayer, Replacing, every_pair, nearest_rank
from rap.model.attention import RapAttention
from rap.model.cache_layout import CacheLayout, Entry, PairEntry
from rap.model.kinds.base import Kind, WeightsPlan
from rap.model.rope import AttentionShape, Tables
from rap.model.specs import AttentionSpec
from rap.runtime.sources import LayerSource

SENTENCES = {
    "vllm": "toys turn keys after their rotation, which no engine has a place for",
    "plain": "no plain config describes a toy",
}


@dataclass(frozen=True)
class ToyEntry(Entry):
    """Kept coordinates of keys, and kept channels of values."""

    kind: ClassVar[str] = "toy"

    keys: int
    values: int

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """Head by head."""
        return CacheLayout(shape.num_kv_heads, self.keys, self.values)


class ToyAttention(RapAttention):
    """Attention whose cache sees `keys` coordinates of rotated keys."""

    fusable = False
    basis: Tensor

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: ToyEntry,
    ):
        geometry = dense_shape.geometry
        pairs = PairEntry(geometry.num_pairs, geometry.num_free, entry.values)
        super().__init__(dense, spec, dense_shape, pairs)
        like = getattr(self, spec.projections[0]).weight
        shape = (dense_shape.num_kv_heads, dense_shape.head_dim, entry.keys)
        self.basis = nn.Parameter(like.new_zeros(shape))

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Rotated, then turned."""
        q, k = super().position(q, k, tables)
        repeat = q.shape[1] // len(self.basis)
        return q @ self.basis.repeat_interleave(repeat, 0), k @ self.basis


@dataclass(frozen=True, kw_only=True)
class Toy(Replacing):
    """The leading directions of W_k's rows, whatever is read."""

    name: ClassVar[str] = "toy"
    family: ClassVar[str] = "toys"
    summary: ClassVar[str] = "a basis of every head"

    @property
    def needs(self) -> frozenset[str]:
        """The second moment of the inputs."""
        return frozenset({"inputs"})

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[WeightsPlan]:
        """As of every such method."""
        return (self._layer(layer) for layer in layers)

    def _layer(self, layer: DenseLayer) -> WeightsPlan:
        shape, moment = layer.shape, layer.statistics["input_moment"].double()
        kept = nearest_rank(self.retain, shape.head_dim)
        rows_GDE = layer.weight("k").unflatten(0, (shape.num_kv_heads, -1))
        # Of each head's keys before their rotation: a toy need not be good.
        vectors = torch.linalg.eigh(rows_GDE @ moment @ rows_GDE.mT).eigenvectors
        weights: dict[str, Any] = {
            "frequency_index": every_pair(shape),
            "basis": vectors.flip(-1)[..., :kept].contiguous(),
        }
        weights |= layer.dense("q", "k")
        values = layer.weight("v").unflatten(0, (shape.num_kv_heads, -1))[:, :kept].flatten(0, 1)
        columns = layer.weight("o").unflatten(1, (shape.num_heads, -1))[..., :kept].flatten(1)
        weights |= layer.linear("v", values) | layer.linear("o", columns)
        return WeightsPlan(ToyEntry(kept, kept), weights)


KIND = Kind(ToyEntry, ToyAttention, unsupported=SENTENCES)
