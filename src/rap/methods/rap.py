"""RoPE-Aligned Pruning: whole RoPE pairs of K (or folded slots), channels or a subspace of V."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..calibration.statistics import Statistics
from ..model.errors import RapError
from ..model.rope import AttentionShape
from ..planning.budgets import Budget, LayerBudget
from ..planning.folding import FoldedHead, fold_head
from ..planning.knapsack import allocate_by_error
from ..planning.losses import (
    DIRECTIONS,
    Metric,
    Moments,
    Orders,
    free_moments,
    key_moments,
    one_width,
    split_step,
)
from ..planning.plan import LayerPlan
from ..planning.scores import SCORES, LayerScores, Named, score_layers
from ..planning.shared import shared_frequencies, shared_pairs, shared_slots
from ..planning.subspace import weighted_subspace
from .base import PairPruning
from .dense import DenseLayers
from .values import in_subspace, layer_errors, layer_losses, layer_values


@dataclass(frozen=True, kw_only=True)
class Rap(PairPruning):
    """RAP, from the paper's cut to the better ones at the same cost.

    score: importance of pairs and channels, one of rap.planning.scores.SCORES.
    keys: `pairs` keeps dense pairs (the paper), `fold` compresses groups of slow pairs together,
        and channels that never rotate to their best subspace, in every layer whose keys are not
        normalised before they rotate; those keep pairs.
    values: `channels` keeps dense channels (the paper), `subspace` the best directions, except in
        layers whose output is gated channel by channel; those keep channels.
    metric: what folds, subspaces and error budgets keep small: the expected `loss` (gradients of
        the loss say what reads keys and values), or squared error of logits and `output`, which
        needs no gradients and so less memory.
    budget: beside `adaptive` and `uniform`, `error` spends where it removes most expected error;
        `auto` is `error`, or `uniform` where the profile wants one width. With `key_share` "pooled"
        K and V of a layer may differ in width: better at the same cache, but engines pad them.
    context: distance in tokens over which folded pairs may drift; None is all the model was made
        for. A shorter one folds more, which perplexity rewards and recall pays for (docs/log.md).
    profile: `per-head` lets every head choose its pairs, `stock` gives all heads and layers one
        width and one list of slot frequencies, which `rap export stock` needs.
    """

    name: ClassVar[str] = "rap"
    summary: ClassVar[str] = (
        "whole RoPE pairs of keys and queries (RoPE-Aligned Pruning) or slots folded of several, "
        "and channels or directions of values"
    )

    budget: Budget = "auto"
    score: str = "fisher"
    metric: Metric = "loss"
    keys: Literal["pairs", "fold"] = "fold"
    values: Literal["channels", "subspace"] = "subspace"
    context: int | None = None
    profile: Literal["per-head", "stock"] = "per-head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget == "auto":
            spent = "error" if self.profile != "stock" and self._spends_by_error() else "uniform"
            object.__setattr__(self, "budget", spent)
        if self.score not in SCORES:
            raise RapError(f"unknown score {self.score!r}: use one of {', '.join(sorted(SCORES))}")
        if self.budget == "error" and not self._spends_by_error():
            raise RapError(
                "budget 'error' gives K and V one width (key_share 0.5), or lets them compete by "
                f"metric 'loss' (pooled): key_share cannot be {self.key_share} here"
            )
        if self.profile == "stock" and (self.budget != "uniform" or self.key_share != 0.5):
            raise RapError(
                "profile 'stock' needs one width for all: budget 'uniform', key_share 0.5"
            )

    @classmethod
    def paper(cls, **settings: Any) -> "Rap":
        """The paper's recipe: root-Fisher scores, adaptive budgets, dense pairs and channels."""
        return cls(**{"budget": "adaptive", "keys": "pairs", "values": "channels"} | settings)

    def _spends_by_error(self) -> bool:
        """Whether budget `error` knows this share: only losses of K and V compare."""
        return self.key_share == 0.5 or (self.key_share == "pooled" and self.metric == "loss")

    @property
    def needs(self) -> frozenset[str]:
        """What the score, the folding and the subspace ask of calibration."""
        needs = SCORES[self._ranking].needs
        by_error = self.budget == "error"
        if self.keys == "fold" or by_error:
            needs |= {"pairs"}
        if self.values == "subspace" or by_error:
            needs |= {"values"}
        if self.metric == "loss" and needs & {"pairs", "values"}:
            needs |= {"gradients"}
        return needs | ({"energy"} if by_error else frozenset())

    @property
    def _ranking(self) -> str:
        """The score in use: folded keys, value subspaces and equal widths need no gradients."""
        chosen = self.keys == "pairs" or self.values == "channels" or self.budget == "adaptive"
        return self.score if chosen else "energy"

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Scores by the chosen rule, or by energy where they rank no more than free channels."""
        return score_layers(self._ranking, statistics, weights, shapes, self.seed)

    def budgets(
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """By score or alike (base), or by the error of every width."""
        if self.budget != "error":
            return super().budgets(scores, statistics, dense)
        present = [index for index, shape in enumerate(dense.shapes) if shape is not None]
        orders = self.orders(scores, dense)
        curves = [self._curves(index, statistics, dense, orders[index]) for index in present]
        flat = [curve for both in curves for curve in both]
        unit = max(1, self.alignment(dense.shapes) // 2)
        sizes = [len(curve) - 1 for curve in flat]
        shapes = [shape for shape in dense.shapes if shape is not None]
        heads = [s.num_kv_heads for s, both in zip(shapes, curves, strict=True) for _ in both]
        spent = iter(allocate_by_error(flat, self.retain, sizes, heads=heads, unit=unit))
        kept = {i: [next(spent) for _ in both] for i, both in zip(present, curves, strict=True)}
        return [
            _hybrid_budget(shape, kept[index][0], kept[index][-1]) if shape is not None else None
            for index, shape in enumerate(dense.shapes)
        ]

    def orders(self, scores: Sequence[LayerScores | None], dense: DenseLayers) -> list[Orders]:
        """What every layer keeps as it is, for it is not mixed, in the order of its scores."""
        folds, turns = self.keys == "fold", self.values == "subspace"
        mixed = zip(scores, dense.mixes_keys, dense.mixes_values, strict=True)
        return [
            DIRECTIONS if layer is None else Orders.of(layer, keys and folds, values and turns)
            for layer, keys, values in mixed
        ]

    def _curves(
        self, index: int, statistics: Statistics, dense: DenseLayers, orders: Orders
    ) -> list[list[float]]:
        """What every width of a layer costs, in units of `metric`: one curve, or of K and of V."""
        context = self.context or dense.context
        if self.metric == "output":
            return [layer_errors(index, statistics, dense, context, orders)]
        parts = layer_losses(index, statistics, dense, context, orders)
        return list(parts) if self.key_share == "pooled" else [one_width(*parts)]

    def cut_layers(
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> list[LayerPlan | None]:
        """Plain selection, with keys folded and values in a subspace where asked."""
        plain = super().cut_layers(scores, statistics, dense)
        keys = self._keys(plain, scores, statistics, dense)
        cut: list[LayerPlan | None] = []
        for index, layer in enumerate(plain):
            if layer is None:
                cut.append(None)
                continue
            made = LayerPlan(**{**layer.tensors(), **keys[index]})
            if self.values == "subspace" and dense.mixes_values[index]:
                made = in_subspace(made, layer_values(index, statistics, dense, self.metric))
            cut.append(made)
        return cut

    def _keys(
        self,
        plain: Sequence[LayerPlan | None],
        scores: Sequence[LayerScores | None],
        statistics: Statistics,
        dense: DenseLayers,
    ) -> list[dict[str, Tensor]]:
        """What replaces the plainly chosen pairs of every layer, as fields of its LayerPlan."""
        if self.profile == "stock":
            shared_frequencies(dense.frequencies)
        if self.keys == "fold":
            moments = [
                key_moments(statistics.layers[index] or {}, self.metric)
                if layer is not None and layer.num_pairs and dense.mixes_keys[index]
                else None
                for index, layer in enumerate(plain)
            ]
            widths = [layer.num_pairs if layer is not None else 0 for layer in plain]
            context = self.context or dense.context
            if self.profile == "stock":
                return _fold_alike(moments, widths, dense, context, self.metric)
            folded = _fold_all(moments, widths, dense, context, self.metric)
            for index, layer in enumerate(plain):
                if layer is not None and layer.num_free and dense.mixes_keys[index]:
                    free = free_moments(statistics.layers[index] or {}, self.metric)
                    folded[index] |= _free(free, layer.num_free)
            return folded
        return _shared(plain, scores) if self.profile == "stock" else [{} for _ in plain]


def _fold_all(
    moments: Sequence[Moments | None],
    widths: Sequence[int],
    dense: DenseLayers,
    context: int,
    metric: Metric,
) -> list[dict[str, Tensor]]:
    turned = metric == "loss"  # gradients of keys
    folded: list[dict[str, Tensor]] = []
    for layer, width, own in zip(moments, widths, dense.frequencies, strict=True):
        if layer is None or own is None:
            folded.append({})
            continue
        heads = [
            fold_head(read, key, own, width, context, turned=turned)
            for key, read in zip(*layer, strict=True)
        ]
        folded.append(_folded(heads))
    return folded


def _free(moments: Moments, width: int) -> dict[str, Tensor]:
    """Channels that never rotate, for which any real map is free: the best subspace of them.

    All of them stay plain, so that full width is exact.
    """
    heads, dim = moments[0].shape[:2]
    if not 0 < width < dim:
        return {}
    factors = weighted_subspace(*moments, width)
    return {
        "free_GN": torch.arange(width, dtype=torch.int32).expand(heads, -1).contiguous(),
        "key_free_mix_GNF": factors.down.contiguous(),
        "query_free_mix_GNF": factors.up.mT.contiguous(),
    }


def _fold_alike(
    moments: Sequence[Moments | None],
    widths: Sequence[int],
    dense: DenseLayers,
    context: int,
    metric: Metric,
) -> list[dict[str, Tensor]]:
    """One list of slots: heads' losses compare as they are, their errors only as shares."""
    present = [(read, key) for key, read in (layer for layer in moments if layer is not None)]
    frequencies = shared_frequencies(dense.frequencies)
    loss = metric == "loss"  # gradients of keys
    slots = shared_slots(present, frequencies, max(widths), context, relative=not loss, turned=loss)
    heads = iter(slots)
    return [_folded(next(heads)) if layer is not None else {} for layer in moments]


def _shared(
    plain: Sequence[LayerPlan | None], scores: Sequence[LayerScores | None]
) -> list[dict[str, Tensor]]:
    """One set of dense pairs for all heads and layers, of the width that was planned."""
    voted = [layer.pairs_GP for layer in scores if layer is not None]
    width = next(layer.num_pairs for layer in plain if layer is not None)
    pairs = torch.tensor(shared_pairs(voted, width), dtype=torch.int32)
    return [
        {"frequency_GM": pairs.expand(layer.frequency_GM.shape[0], -1).contiguous()}
        if layer is not None
        else {}
        for layer in plain
    ]


def _folded(heads: Sequence[FoldedHead]) -> dict[str, Tensor]:
    mixes = {
        "key_mix_GMP2": torch.stack([head.key_mix for head in heads]),
        "query_mix_GMP2": torch.stack([head.query_mix for head in heads]),
    }
    return {
        "frequency_GM": torch.stack([head.frequency for head in heads]).to(torch.int32),
        **{name: torch.view_as_real(mix).contiguous() for name, mix in mixes.items()},
    }


def _hybrid_budget(shape: AttentionShape, key_steps: int, value_steps: int) -> LayerBudget:
    pairs, free = split_step(shape, key_steps)
    return LayerBudget(pairs=pairs, free=free, values=2 * value_steps)
