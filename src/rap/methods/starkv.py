"""STAR-KV: keys by a separate product for every head, values by one for all heads.

https://arxiv.org/abs/2606.08382 (code: PriyanshBhatnagar/STAR-KV). Its singular values pass a
threshold that distillation learns, one of every head's keys and one of every layer's values, pushed
up by the same penalty. A plan is made before anything is trained, so here each type has one
threshold for all its heads or layers, the one that spends its budget; what training would add on
top is every method's `--recover`.

Shapes: G KV heads, D head dim, E model dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..calibration.statistics import Statistics
from ..model.kinds.base import WeightsPlan
from ..planning.subspace import WeightFactors, whitened_factors
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, latent_layer


@dataclass(frozen=True, kw_only=True)
class StarKv(Replacing):
    """Truncated SVDs, at ranks that a common threshold of singular values leaves.

    gap: how much more of the values than of the keys is kept, as shares of each: keys keep `retain`
        less half of it, values that half more; less where `retain` leaves no room for it. The
        original's code removes 0.2 more of the keys.
    whiten: decompose by what the projections read, which the original does not.
    """

    name: ClassVar[str] = "starkv"
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "a latent of every head for keys, one of all heads for values"
    reconstructs: ClassVar[str] = "keys and values"
    whole_keys: ClassVar[bool] = True

    gap: Annotated[float, Field(ge=0, lt=1)] = 0.2
    whiten: bool = False

    @classmethod
    def plus(cls, **settings: Any) -> "StarKv":
        """With the whitening that the other low-rank methods have."""
        return cls(**{"whiten": True, **settings})

    @property
    def needs(self) -> frozenset[str]:
        """The second moment of what the projections read, if that is to count."""
        return frozenset({"inputs"} if self.whiten else set())

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[WeightsPlan]:
        """A latent of every head for keys, and one of all heads for values, nothing folded."""
        keys, values = self.ranks(layers)
        return (self._layer(layer, keys[i], values[i][0]) for i, layer in enumerate(layers))

    def ranks(self, layers: Sequence[DenseLayer]) -> tuple[list[list[int]], list[list[int]]]:
        """Of every layer's keys one rank a head, of its values one."""
        half = min(self.gap, 2 * (1 - self.retain), self.retain) / 2
        kept = []
        for projection, share in (("k", self.retain - half), ("v", self.retain + half)):
            squares = [
                [self._squares(block, layer) for block in _blocks(layer, projection)]
                for layer in layers
            ]
            kept.append(above_threshold(squares, share))
        return kept[0], kept[1]

    def _squares(self, block: Tensor, layer: DenseLayer) -> Tensor:
        """Squared singular values of a block of rows, as it is decomposed, largest first."""
        moment = self._moment(layer)
        moved = block if moment is None else block @ moment.double()
        return torch.linalg.eigvalsh(moved @ block.mT).clamp_min(0).flip(0)

    def _moment(self, layer: DenseLayer) -> Tensor | None:
        return layer.statistics["input_moment"] if self.whiten else None

    def _layer(self, layer: DenseLayer, key_ranks: list[int], value_rank: int) -> WeightsPlan:
        moment = self._moment(layer)
        heads = [
            whitened_factors(block, moment, rank)
            for block, rank in zip(_blocks(layer, "k"), key_ranks, strict=True)
        ]
        # One latent of all heads whose upper factor is zero between them: ranks may differ.
        keys = WeightFactors(
            torch.block_diag(*(head.up for head in heads)), torch.cat([head.down for head in heads])
        )
        values = whitened_factors(layer.weight("v"), moment, value_rank)
        return latent_layer(layer, keys, values)


def _blocks(layer: DenseLayer, projection: str) -> Sequence[Tensor]:
    """The weights that are decomposed by themselves: W_k [D, E] of every head, all of W_v."""
    weight = layer.weight(projection)
    return weight.chunk(layer.shape.num_kv_heads) if projection == "k" else [weight]


def above_threshold(squares: Sequence[Sequence[Tensor]], retain: float) -> list[list[int]]:
    """How many values of each spectrum [n], descending, lie above one threshold: `retain` of all.

    One of each at least. Among equal values the first spectrum's come first.

    >>> above_threshold([[torch.tensor([9.0, 1.0])], [torch.tensor([5.0, 4.0])]], 0.75)
    [[1], [2]]
    """
    flat = [spectrum for layer in squares for spectrum in layer]
    owner = torch.cat([torch.full((len(x) - 1,), i) for i, x in enumerate(flat)])
    budget = round(retain * sum(map(len, flat))) - len(flat)
    order = torch.cat([x[1:] for x in flat]).argsort(descending=True, stable=True)
    more = torch.bincount(owner[order[: max(0, budget)]], minlength=len(flat)).tolist()
    counts = iter(1 + count for count in more)
    return [[next(counts) for _ in layer] for layer in squares]
