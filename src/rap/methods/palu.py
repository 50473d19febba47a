"""PaLU: whitened low-rank products of groups of KV heads, values folded into the output.

https://arxiv.org/abs/2407.21118. Its code caches reconstructed keys and values; here the latents
are what is cached. Fisher gradients are of the model's own loss (its code shifts labels twice), and
`planning.budgets.allocate` shares out the ranks: in proportion to the score, none above what a
group has, all of the budget spent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..calibration.statistics import Statistics
from ..model.errors import RapError
from ..model.kinds.base import WeightsPlan
from ..model.kinds.latent import LatentEntry
from ..model.rope import AttentionShape
from ..planning.budgets import allocate
from ..planning.subspace import WeightFactors, whitened_factors
from ..runtime.settings import Count
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, every_channel, linear, nearest_rank


@dataclass(frozen=True, kw_only=True)
class Palu(Replacing):
    """Group-head low-rank decomposition with latents in the cache.

    group_size: KV heads that share a latent, at most all of them: 1 decomposes head by head (the
        cost that the RAP paper quotes), 4 is the original's default. The output projection reads
        the latent of a whole group for every query head, so it grows with the group.
    ranks: `fisher` shares one budget between all projections by their mean root-Fisher (its
        `fisher_uniform`), `uniform` gives all the same.
    multiple: ranks are multiples of this many directions (32 in the original).
    """

    name: ClassVar[str] = "palu"
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "one latent of every group of KV heads for keys, and one for values"
    reconstructs: ClassVar[str] = "keys"
    whole_keys: ClassVar[bool] = True

    group_size: Count = 4
    ranks: Literal["fisher", "uniform"] = "fisher"
    multiple: Count = 1

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method; groups of heads must be whole, and have a rank each."""
        super().check_shapes(shapes)
        sizes = [
            self._group(index, shape.num_kv_heads) * shape.head_dim
            for index, shape in enumerate(shapes)
            if shape is not None
        ]
        self._shared([1.0] * 2 * len(sizes), sizes)

    @property
    def needs(self) -> frozenset[str]:
        """The second moment of what the projections read, and gradients for Fisher ranks."""
        return frozenset({"inputs"} | ({"fisher"} if self.ranks == "fisher" else set()))

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[WeightsPlan]:
        """A latent of every group for keys, and one for values that the output reads."""
        ranks = self._ranks(layers)
        return (self._layer(layer, *ranks[i]) for i, layer in enumerate(layers))

    def _ranks(self, layers: Sequence[DenseLayer]) -> list[tuple[int, int]]:
        sizes, scores = [self._heads(layer) * layer.shape.head_dim for layer in layers], []
        if self.ranks == "fisher":
            scores = [
                float(layer.statistics[f"root_fisher_{r}"].mean()) for r in "kv" for layer in layers
            ]
        return self._shared(scores, sizes)

    def _shared(self, scores: Sequence[float], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Ranks of keys and of values for groups of these sizes, by the scores of all of them."""
        if self.ranks == "uniform":
            nearest = [nearest_rank(self.retain, size, self.multiple) for size in sizes]
            return [(rank, rank) for rank in nearest]
        kept = allocate(scores, self.retain, [*sizes, *sizes], unit=self.multiple)
        return list(zip(kept[: len(sizes)], kept[len(sizes) :], strict=True))

    def _heads(self, layer: DenseLayer) -> int:
        """Of a group."""
        return self._group(layer.index, layer.shape.num_kv_heads)

    def _group(self, index: int, heads: int) -> int:
        size = min(self.group_size, heads)
        if heads % size:
            raise RapError(
                f"group_size {size} does not divide the {heads} KV heads of layer {index}"
            )
        return size

    def _layer(self, layer: DenseLayer, key_rank: int, value_rank: int) -> WeightsPlan:
        size = self._heads(layer)
        groups = layer.shape.num_kv_heads // size
        ranks = {"k": key_rank, "v": value_rank}
        factors = {
            projection: [
                whitened_factors(rows, layer.statistics["input_moment"], ranks[projection])
                for rows in layer.weight(projection).chunk(groups)
            ]
            for projection in "kv"
        }
        tensors = every_channel(layer) | layer.dense("q")
        for projection in "kv":
            tensors |= layer.linear(
                projection, torch.cat([part.down for part in factors[projection]])
            )
        bias = layer.bias("k")
        biases = [None] * groups if bias is None else bias.chunk(groups)
        for group, part in enumerate(factors["k"]):
            tensors |= linear(f"k_up.{group}", part.up, biases[group])
        tensors |= layer.linear("o", *_folded(layer, factors["v"]))
        entry = LatentEntry(groups=groups, fold=True, keys=key_rank, values=value_rank)
        return WeightsPlan(entry, tensors)


def _folded(layer: DenseLayer, factors: Sequence[WeightFactors]) -> tuple[Tensor, Tensor | None]:
    """W_o times the values' upper factor of every head [E, H r], and the biases it then adds."""
    shape, weight, bias = layer.shape, layer.weight("o"), layer.bias("o")
    up_GDR = torch.cat([part.up.unflatten(0, (-1, shape.head_dim)) for part in factors])
    up_HDR = up_GDR.repeat_interleave(shape.group_size, 0)
    columns_EHD = weight.unflatten(1, (shape.num_heads, shape.head_dim))
    folded = torch.einsum("ehd,hdr->ehr", columns_EHD, up_HDR).flatten(1)
    value = layer.bias("v")
    if value is not None:
        # Attention's weights add up to one, so what it adds to every value it adds to the output.
        rows = value.unflatten(0, (-1, shape.head_dim)).repeat_interleave(shape.group_size, 0)
        added = weight @ rows.flatten()
        bias = added if bias is None else bias + added
    return folded, bias
