"""MatryoshkaKV: keys after rotation, and values, in the leading directions of each head's own PCA.

https://arxiv.org/abs/2410.14731, per KV head (its code repeats keys for every query head, which
saves nothing where heads are grouped). It is an activation-side method: projections stay whole and
every token is multiplied with the bases. Its own training, of the bases alone, is the recovery
`projections`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..calibration.registry import WINDOWS
from ..calibration.statistics import Statistics
from ..model.kinds.base import LayerPlan, WeightsPlan
from ..model.kinds.projected import ProjectedEntry, projected_tensors
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, as_stored, every_channel, nearest_rank
from .trials import Trials

# Of all widths, those that one round of the search lowers (the original's 64 * 24 of 2048).
LOWERED_SHARE = 0.75
# Of a head, what one round lowers them by; the original's training draws widths in such steps.
STEPS_PER_HEAD = 8


@dataclass(frozen=True, kw_only=True)
class Matryoshka(Replacing):
    """PCA of rotated keys and of values, about their means.

    widths: `uniform` keeps as many directions everywhere; `adaptive` searches a width for the keys
        and one for the values of every layer, by how far the last hidden states move. Per layer,
        not per head as in the original, for a cache tensor has one width for all heads.
    """

    name: ClassVar[str] = "matryoshka"
    family: ClassVar[str] = "activation side"
    summary: ClassVar[str] = "rotated keys and values in the leading directions of every head's PCA"
    tried: ClassVar[Mapping[str, tuple[str, ...]]] = {"widths": ("adaptive",)}

    whole_keys: ClassVar[bool] = True

    widths: Literal["uniform", "adaptive"] = "uniform"

    @property
    def needs(self) -> frozenset[str]:
        """Covariances of rotated keys and of values, and windows to try widths on."""
        return frozenset({"rotated"} | ({WINDOWS} if self.tries else set()))

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[LayerPlan]:
        """The leading eigenvectors of every head."""
        if self.widths == "uniform":
            nearest = (nearest_rank(self.retain, layer.shape.head_dim) for layer in layers)
            return (_layer(layer, w, w) for layer, w in zip(layers, nearest, strict=True))
        widths = self._searched(layers, Trials(source.whole(self.tries), statistics))
        keys, values = widths[: len(layers)], widths[len(layers) :]
        return (_layer(*item) for item in zip(layers, keys, values, strict=True))

    def _searched(self, layers: Sequence[DenseLayer], trials: Trials) -> list[int]:
        """The widths of all keys, then those of all values."""
        dims = [layer.shape.head_dim for layer in layers] * 2
        heads = [layer.shape.num_kv_heads for layer in layers] * 2

        # Room for the layers as they are, and for as many that are only tried.
        @lru_cache(maxsize=len(dims))
        def cut(place: int, key: int, value: int) -> LayerPlan:
            return as_stored(layers[place], _layer(layers[place], key, value))

        def change(widths: Sequence[int]) -> float:
            pairs = zip(widths[: len(layers)], widths[len(layers) :], strict=True)
            return trials.change(
                {
                    layers[place].index: cut(place, *pair)
                    for place, pair in enumerate(pairs)
                    if sum(pair) < 2 * dims[place]
                }
            )

        return searched_widths(heads, dims, self.retain, change)


def searched_widths(
    heads: Sequence[int],
    dims: Sequence[int],
    retain: float,
    change: Callable[[Sequence[int]], float],
) -> list[int]:
    """Widths of tensors of so many heads and channels a head, at `retain` of all their elements.

    As the original's cal_adaptive_rate: all start whole; each round measures `change(widths)` with
    one width an eighth of its head lower, for every width in turn, then lowers the cheapest three
    quarters by as much (the original in quarters of a head), until the budget is met to the nearest
    channel. At least one channel stays.
    """
    widths = list(dims)
    excess = (1 - retain) * sum(n * dim for n, dim in zip(heads, dims, strict=True))
    steps = [max(1, dim // STEPS_PER_HEAD) for dim in dims]
    while True:
        errors = {
            i: change([*widths[:i], max(1, width - steps[i]), *widths[i + 1 :]])
            for i, width in enumerate(widths)
            if width > 1 and excess >= heads[i] / 2
        }
        if not errors:
            return widths
        cheapest = sorted(errors, key=lambda i: (errors[i], i))
        for i in cheapest[: max(1, int(LOWERED_SHARE * len(widths)))]:
            lowered = min(steps[i], widths[i] - 1, int(max(0.0, excess) / heads[i] + 0.5))
            widths[i] -= lowered
            excess -= lowered * heads[i]


def _layer(layer: DenseLayer, key_width: int, value_width: int) -> WeightsPlan:
    statistics = layer.statistics
    tensors = every_channel(layer) | layer.dense("q", "k", "v")
    tensors |= projected_tensors(
        _leading(statistics["rotated_key_moment"], key_width),
        _leading(statistics["value_moment_about_mean"], value_width),
        statistics["value_mean"].double(),
        layer.weight("o"),
        layer.bias("o"),
        layer.names["o"],
    )
    return WeightsPlan(ProjectedEntry(key_width, value_width), tensors)


def _leading(covariance_GDD: Tensor, width: int) -> Tensor:
    """Eigenvectors of the largest eigenvalues, float64 [G, D, width]."""
    vectors = torch.linalg.eigh(covariance_GDD.double()).eigenvectors
    return vectors.flip(-1)[..., :width]
