"""EliteKV: the pairs whose rotation matters most stay, everything else is one joint latent.

https://arxiv.org/abs/2503.01586. Pairs are chosen greedily per KV head, by the mean absolute
distance of partly rotated logits from the dense ones, on logits sampled during calibration instead
of one pass of the model per pair. The rest of the keys loses its rotation for good, so the method
was made for training afterwards. Reconstruction stays online here; the original can absorb it into
W_q and W_o, which changes no output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..calibration.registry import WINDOWS
from ..calibration.statistics import Statistics
from ..model.errors import RapError, UnsupportedModelError
from ..model.kinds.base import LayerPlan, WeightsPlan
from ..model.kinds.elite import EliteEntry
from ..model.rope import AttentionShape
from ..planning.losses import as_complex
from ..planning.subspace import whitened_factors
from ..runtime.settings import Count
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, as_stored, linear
from .trials import Trials


@dataclass(frozen=True, kw_only=True)
class EliteKv(Replacing):
    """r rotated pairs in every head, and a plain joint SVD of all other keys and the values.

    pairs: r (None: an eighth of the head dim; `sweep`: the r of which calibration windows have the
        lowest perplexity at this cache, in steps of a sixteenth of the head dim).
    whiten: weigh the SVD by what the projections read and balance keys with values, which the
        original does not; closer by far before training.
    """

    name: ClassVar[str] = "elitekv"
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "a few rotated pairs, and a joint latent of other keys and values"
    reconstructs: ClassVar[str] = "keys and values"
    tried: ClassVar[Mapping[str, tuple[str, ...]]] = {"pairs": ("sweep",)}

    pairs: Count | Literal["sweep"] | None = None
    whiten: bool = False

    @classmethod
    def plus(cls, **settings: Any) -> Any:
        """The method at its best: whitened, balanced, and with r by a sweep."""
        best: dict[str, Any] = {"pairs": "sweep", "whiten": True}
        return cls(**best | settings)

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method; every layer rotates, and elite pairs leave something.

        Raises UnsupportedModelError for one that does not rotate.
        """
        super().check_shapes(shapes)
        for index, shape in enumerate(shapes):
            if shape is not None and not shape.geometry.num_pairs:
                raise UnsupportedModelError(
                    f"layer {index} does not rotate its keys, and elitekv keeps pairs that do: use "
                    "another method"
                )
            if shape is not None:
                self._room(index, shape, 1 if isinstance(self.pairs, str) else self.pairs)

    @property
    def needs(self) -> frozenset[str]:
        """Sampled logits, the inputs' second moment to whiten by, and windows to sweep on."""
        swept = {WINDOWS} if self.tries else set()
        return frozenset({"logits"} | ({"inputs"} if self.whiten else set()) | swept)

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[LayerPlan]:
        """Elite pairs by greedy search, then the best latent that the rest of the budget holds."""
        count = self.pairs
        if isinstance(count, str):
            count = self._swept(layers, Trials(source.whole(self.tries), statistics))
        return (self._layer(layer, count) for layer in layers)

    def _swept(self, layers: Sequence[DenseLayer], trials: Trials) -> int:
        """The number of pairs, one for all layers, that the model reads best with."""
        step = max(1, min(layer.shape.head_dim for layer in layers) // 16)
        most = max(layer.shape.geometry.num_pairs for layer in layers)
        # At least one, for the error that says why none is possible.
        able = [
            count
            for count in range(step, most + 1, step)
            if all(min(_left(x.shape, count, self.retain), _most(x, count)) > 0 for x in layers)
        ] or [1]

        def perplexity(count: int) -> float:
            cuts = {i.index: as_stored(i, self._layer(i, count)) for i in layers}
            return trials.perplexity(cuts)

        return min(able, key=perplexity)

    def _sizes(self, layer: DenseLayer, count: int | None) -> tuple[int, int]:
        """Elite pairs of a head, and the rank that the rest of the budget leaves."""
        elite, left = self._room(layer.index, layer.shape, count)
        return elite, min(left, _most(layer, elite))

    def _room(self, index: int, shape: AttentionShape, count: int | None) -> tuple[int, int]:
        """Elite pairs of a head, and the channels that they leave of the budget.

        Raises RapError if that is nothing.
        """
        elite = min(count or max(1, shape.head_dim // 8), shape.geometry.num_pairs)
        left = _left(shape, elite, self.retain)
        if left < 1 or elite < 1:
            raise RapError(
                f"layer {index}: {elite} elite pairs leave nothing of retain {self.retain} "
                "for the latent: set fewer `pairs`, or a larger retain"
            )
        return elite, left

    def _layer(self, layer: DenseLayer, count: int | None) -> WeightsPlan:
        elite, rank = self._sizes(layer, count)
        chosen_GR = elite_pairs(layer, elite)
        order_GD = _order(chosen_GR, layer.shape)
        query, key = (_reordered(layer, projection, order_GD) for projection in "qk")
        query = _with_rotary_factor(layer, query, order_GD, 2 * elite)
        # [first 2r channels of every head | the others], of the weight and of the bias.
        first, rest = zip(*(_split(part, len(chosen_GR), 2 * elite) for part in key), strict=True)
        key_up, value_up, down = self._joint(layer, rest[0], rank)
        tensors: dict[str, Tensor] = {"frequency_index": chosen_GR.to(torch.int32)}
        tensors |= layer.linear("q", *query) | layer.linear("k", *first) | layer.dense("o")
        tensors |= layer.linear("v", down) | linear("v_up", value_up, layer.bias("v"))
        if len(key_up):
            tensors |= linear("k_up", key_up, rest[1])
        return WeightsPlan(EliteEntry(elite, rank), tensors)

    def _joint(self, layer: DenseLayer, rest: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Upper factors of the other keys and of values, and the lower one they share."""
        value = layer.weight("v")
        moment, scale = None, 1.0
        if self.whiten:
            moment = layer.statistics["input_moment"].double()
            energy = [float(((w @ moment) * w).sum()) for w in (rest, value)]
            scale = (energy[1] / energy[0]) ** 0.5 if min(energy) > 0 else 1.0
        up, down = whitened_factors(torch.cat([rest * scale, value]), moment, rank)
        return up[: len(rest)] / scale, up[len(rest) :], down


def _left(shape: AttentionShape, elite: int, retain: float) -> int:
    """Channels that so many elite pairs of every head leave of the budget."""
    heads = shape.num_kv_heads
    return round(2 * retain * heads * shape.head_dim) - 2 * elite * heads


def _most(layer: DenseLayer, elite: int) -> int:
    """The largest rank that a latent beside so many elite pairs has a use for."""
    rows = layer.shape.num_kv_heads * (2 * layer.shape.head_dim - 2 * elite)
    return min(rows, layer.linears["v"].weight.shape[1])


def elite_pairs(layer: DenseLayer, count: int) -> Tensor:
    """The `count` pairs [G, count], ascending, that are worth rotating most in every KV head.

    Starting from none, each round adds the pair that brings the sampled logits nearest to the dense
    ones, in the mean of |difference| over samples and the head's queries.
    """
    products_HNP = as_complex(layer.statistics["logit_products"])
    angle_NP = layer.statistics["logit_distances"].double()[:, None] * layer.frequencies
    turned = products_HNP * torch.polar(torch.ones_like(angle_NP), angle_NP)
    lost_HNP = products_HNP.real - turned.real
    lost_GSP = lost_HNP.unflatten(0, (layer.shape.num_kv_heads, -1)).flatten(1, 2)
    head = torch.arange(len(lost_GSP))
    residual_GS, chosen = lost_GSP.sum(-1), []
    open_GP = torch.ones(lost_GSP.shape[::2], dtype=torch.bool)
    for _ in range(count):
        distance_GP = (residual_GS[..., None] - lost_GSP).abs().mean(1)
        best_G = distance_GP.masked_fill(~open_GP, torch.inf).argmin(1)
        residual_GS = residual_GS - lost_GSP[head, :, best_G]
        open_GP[head, best_G] = False
        chosen.append(best_G)
    return torch.stack(chosen, 1).sort(1).values


def _order(chosen_GR: Tensor, shape: AttentionShape) -> Tensor:
    """Canonical channels [G, D]: first halves of chosen pairs, their second halves, all others."""
    elite_GW = torch.cat([chosen_GR, chosen_GR + shape.geometry.num_pairs], 1)
    taken = torch.zeros(len(chosen_GR), shape.head_dim, dtype=torch.bool)
    taken.scatter_(1, elite_GW, True)
    others = torch.arange(shape.head_dim).expand_as(taken)[~taken].view(len(taken), -1)
    return torch.cat([elite_GW, others], 1)


def _reordered(
    layer: DenseLayer, projection: str, order_GD: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of q or k with every head's rows in another order."""
    heads = len(layer.weight(projection)) // layer.shape.head_dim
    order = order_GD.repeat_interleave(heads // len(order_GD), 0)
    rows = (order + torch.arange(heads)[:, None] * layer.shape.head_dim).flatten()
    bias = layer.bias(projection)
    return layer.weight(projection)[rows], None if bias is None else bias[rows]


def _with_rotary_factor(
    layer: DenseLayer, query: tuple[Tensor, Tensor | None], order_GD: Tensor, cut: int
) -> tuple[Tensor, Tensor | None]:
    """Reordered weight and bias of q, with what cos and sin give the dense logits of still pairs.

    The family's factor is on cos of queries and of keys, also where the angle is zero: here it is
    squared on the queries, for the keys share their latent with the values.
    """
    stilled_GD = order_GD < layer.shape.geometry.rotary_dim
    stilled_GD[:, :cut] = False
    squared = torch.tensor(layer.rotary_factor, dtype=torch.float64) ** 2
    factor_GD = torch.where(stilled_GD, squared, 1.0)
    weight, bias = query
    factor = factor_GD.repeat_interleave(layer.shape.group_size, 0).flatten()
    return weight * factor[:, None], None if bias is None else bias * factor


def _split(rows: Tensor | None, heads: int, cut: int) -> tuple[Any, Any]:
    """The first `cut` rows of every head, and the others."""
    if rows is None:
        return None, None
    groups = rows.unflatten(0, (heads, -1))
    return groups[:, :cut].flatten(0, 1), groups[:, cut:].flatten(0, 1)
