"""TransMLA: all KV heads as one latent, of which one head's worth keeps its rotation.

https://arxiv.org/abs/2502.07864. Of the pairs of all heads at near frequencies the leading real
principal components rotate (RoRoPE, FreqFold) and every head shares them. The rest of the keys
loses its rotation and shares a latent with the values, by a PCA in which both weigh the same.
Three things differ from the original. Biases stay outside both PCAs and are exact. The energy of
the values is taken over all channels. Reconstruction stays online; the original can absorb it into
W_q and W_o, which changes no output.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..calibration.registry import WINDOWS
from ..calibration.statistics import Statistics
from ..model.errors import RapError, UnsupportedModelError
from ..model.kinds.base import LayerPlan, WeightsPlan
from ..model.kinds.mla import MlaEntry
from ..model.rope import AttentionShape
from ..planning.subspace import whitened_factors
from ..runtime.settings import Count
from ..runtime.sources import LayerSource
from .replacing import DenseLayer, Replacing, as_stored, linear
from .trials import Trials

ROTATED = 64  # channels that rotate in DeepSeek's models, for which the original converts


@dataclass(frozen=True, kw_only=True)
class TransMla(Replacing):
    """One rotated key for all heads, and a plain joint PCA of all other keys and the values.

    rotated: channels that rotate (None: 64, or as many as a head has); at most those of all heads.
    freqfold: near frequencies that share components; `auto` doubles it while calibration windows
        are read better with the rest of the rotation gone and nothing else.
    """

    name: ClassVar[str] = "transmla"
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "one rotated key for all heads, a joint latent of the rest and values"
    reconstructs: ClassVar[str] = "keys and values"
    tried: ClassVar[Mapping[str, tuple[str, ...]]] = {"freqfold": ("auto",)}

    rotated: int | None = None
    freqfold: Count | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotated is not None and (self.rotated < 2 or self.rotated % 2):
            raise RapError(f"{self.rotated} channels are not RoPE pairs; use an even `rotated`")

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method; pairs divide into what rotates, and into folds.

        Raises UnsupportedModelError for a layer that does not rotate or does not divide.
        """
        super().check_shapes(shapes)
        for index, shape in enumerate(shapes):
            if shape is None:
                continue
            pairs, slots = shape.geometry.num_pairs, self._slots(shape)
            fold = _least(shape, slots) if self.freqfold == "auto" else self.freqfold
            even = slots > 0 and (pairs % slots == 0 or slots % pairs == 0)
            if not even or pairs % fold or fold % _least(shape, slots):
                raise UnsupportedModelError(
                    f"layer {index}: {pairs} pairs of a head do not divide into {slots} slots and "
                    f"folds of {fold}: set `rotated` and `freqfold`, or use another method"
                )
            self._rank(index, shape, whole=False)

    @property
    def needs(self) -> frozenset[str]:
        """The inputs' second moment, and windows to choose the fold on."""
        chosen = {WINDOWS} if self.tries else set()
        return frozenset({"inputs"} | chosen)

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[LayerPlan]:
        """Principal components at every fold of frequencies, then those of the rest."""
        fold = self.freqfold
        if isinstance(fold, str):
            fold = self._best(layers, Trials(source.whole(self.tries), statistics))
        return (self._layer(layer, fold) for layer in layers)

    def _best(self, layers: Sequence[DenseLayer], trials: Trials) -> int:
        """The fold at which windows are read best with a latent that loses nothing."""

        def perplexity(fold: int) -> float:
            made = {i.index: as_stored(i, self._layer(i, fold, whole=True)) for i in layers}
            return trials.perplexity(made)

        pairs = math.gcd(*(layer.shape.geometry.num_pairs for layer in layers))
        fold = max(_least(layer.shape, self._slots(layer.shape)) for layer in layers)
        best = perplexity(fold)
        while pairs % (2 * fold) == 0:
            value = perplexity(2 * fold)
            if value >= best:
                break
            best, fold = value, 2 * fold
        return fold

    def _slots(self, shape: AttentionShape) -> int:
        """M: pairs that rotate, at most those there are."""
        pairs = shape.geometry.num_pairs
        if self.rotated is None:
            return min(ROTATED // 2, pairs)
        return min(self.rotated // 2, shape.num_kv_heads * pairs)

    def _rank(self, index: int, shape: AttentionShape, *, whole: bool) -> int:
        """What the slots leave of the budget for the latent, or what loses nothing."""
        elements, slots = 2 * shape.num_kv_heads * shape.head_dim, 2 * self._slots(shape)
        kept = elements if whole else round(self.retain * elements)
        rank = min(kept - slots, elements - slots)
        if rank < 1:
            raise RapError(
                f"layer {index}: {slots} rotated channels leave nothing of retain "
                f"{self.retain} for the latent: set a smaller `rotated`, or a larger retain"
            )
        return rank

    def _layer(self, layer: DenseLayer, fold: int, *, whole: bool = False) -> WeightsPlan:
        shape, slots = layer.shape, self._slots(layer.shape)
        moment, key = layer.statistics["input_moment"].double(), layer.weight("k")
        frequency_M, turn = _components(key @ moment @ key.mT, shape, slots, fold)
        rotated, still = turn[: 2 * slots], turn[2 * slots :]
        value = layer.weight("v")
        balance = _balance(still @ key, value, moment)
        # A PCA of what is projected: the best factors of the weight under the inputs' moment.
        joint = torch.cat([still @ key / balance, value])
        up, down = whitened_factors(joint, moment, self._rank(layer.index, shape, whole=whole))
        # W_k is turn^T turn W_k: what does not rotate of it comes from the latent.
        key_up, value_up = still.mT @ up[: len(still)] * balance, up[len(still) :]
        tensors: dict[str, Tensor] = {
            "frequency_index": frequency_M.to(torch.int32).expand(shape.num_kv_heads, -1).clone()
        }
        bias = layer.bias("k")
        tensors |= _queries(layer, rotated)
        tensors |= layer.linear("k", rotated @ key, None if bias is None else rotated @ bias)
        tensors |= layer.linear("v", down) | layer.dense("o")
        if bias is not None:
            bias = bias - rotated.mT @ (rotated @ bias)
        tensors |= linear("k_up", key_up, bias)
        tensors |= linear("v_up", value_up, layer.bias("v"))
        return WeightsPlan(MlaEntry(slots, len(down)), tensors)


def _least(shape: AttentionShape, slots: int) -> int:
    """The smallest fold: fewer slots than a head has pairs have one for every so many."""
    return max(1, shape.geometry.num_pairs // max(1, slots))


def _balance(key: Tensor, value: Tensor, moment: Tensor) -> float:
    """The mean length of a channel of the keys over that of the values, 1 if either has none."""
    lengths = [float(((w @ moment) * w).sum(1).clamp(min=0).sqrt().mean()) for w in (key, value)]
    return lengths[0] / lengths[1] if len(key) and min(lengths) > 0 else 1.0


def _components(
    moment: Tensor, shape: AttentionShape, slots: int, fold: int
) -> tuple[Tensor, Tensor]:
    """The pairs [M] at whose frequencies slots rotate, and an orthogonal [G D, G D] of key rows.

    `moment` is of the keys, canonical rows. The first 2M rows are the slots', first halves first;
    the others are the smaller components, and channels that never rotated. Both halves of a pair
    turn by the same real matrix, which alone commutes with the rotation where a fold is 1.
    """
    heads, dim, pairs = shape.num_kv_heads, shape.head_dim, shape.geometry.num_pairs
    kept, step = fold * slots // pairs, max(1, pairs // slots)
    rows = torch.arange(heads * dim).view(heads, dim)
    chosen, left, frequency = [], [], []
    for first in range(0, pairs, fold):
        halves = [rows[:, start : start + fold].flatten() for start in (first, first + pairs)]
        energy = sum(moment[half][:, half] for half in halves)
        vectors = torch.linalg.eigh(energy).eigenvectors.flip(-1).mT
        turned = [_placed(vectors, half, heads * dim) for half in halves]
        chosen.append([part[:kept] for part in turned])
        left += [part[kept:] for part in turned]
        frequency += [first + step * slot % fold for slot in range(kept)]
    halves = [torch.cat([parts[half] for parts in chosen]) for half in (0, 1)]
    still = torch.eye(heads * dim, dtype=moment.dtype)[rows[:, 2 * pairs :].flatten()]
    return torch.tensor(frequency), torch.cat([*halves, *left, still])


def _placed(vectors: Tensor, columns: Tensor, width: int) -> Tensor:
    placed = vectors.new_zeros(len(vectors), width)
    placed[:, columns] = vectors
    return placed


def _queries(layer: DenseLayer, rotated: Tensor) -> dict[str, Any]:
    """Every query head's slots, then its dense channels, which meet keys that do not rotate.

    The family's factor is on cos of queries and of keys, also where the angle is zero: here it is
    squared on the queries, for the keys share their latent with the values.
    """
    shape = layer.shape
    slots_MGD = rotated.unflatten(1, (shape.num_kv_heads, -1))
    slots_HMD = slots_MGD.transpose(0, 1).repeat_interleave(shape.group_size, 0)
    factor_D = torch.ones(shape.head_dim, dtype=torch.float64)
    factor_D[: shape.geometry.rotary_dim] = layer.rotary_factor**2

    def head_rows(rows: Tensor) -> Tensor:
        rows_HD = rows.unflatten(0, (-1, shape.head_dim))
        factor = factor_D.view(-1, *[1] * (rows_HD.ndim - 2))
        mixed = torch.einsum("hmd,hd...->hm...", slots_HMD, rows_HD)
        return torch.cat([mixed, rows_HD * factor], 1).flatten(0, 1)

    bias = layer.bias("q")
    return layer.linear(
        "q", head_rows(layer.weight("q")), None if bias is None else head_rows(bias)
    )
