"""RoPE-Aligned Pruning: whole RoPE pairs of K (or folded slots), channels or a subspace of V."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..allocation import Budget, LayerBudget, allocate_by_error
from ..errors import RapError
from ..folding import FoldedHead, fold_head, spectrum
from ..plan import LayerPlan
from ..profiles import shared_frequencies, shared_pairs, shared_slots
from ..rope import AttentionShape
from ..scoring import SCORES, LayerScores, Named, score_layers
from ..statistics import Statistics
from ..subspace import output_gram, weighted_subspace
from .base import DenseLayers, PairPruning


@dataclass(frozen=True, kw_only=True)
class Rap(PairPruning):
    """RAP, from the paper's cut to the better ones at the same cost.

    score: importance of pairs and channels, one of rap.scoring.SCORES.
    keys: `pairs` keeps dense pairs (the paper), `fold` compresses groups of slow pairs together,
        in every layer whose keys are not normalised before they rotate; those keep pairs.
    values: `channels` keeps dense channels (the paper), `subspace` the best directions, except in
        layers whose output is gated channel by channel; those keep channels.
    budget: beside `adaptive` and `uniform`, `error` spends where it removes most expected error.
    context: distance in tokens over which folded pairs may drift; None is all the model was made
        for. A shorter one folds more, which perplexity rewards and recall pays for (docs/log.md).
    profile: `per-head` lets every head choose its pairs, `stock` gives all heads and layers one
        width and one list of slot frequencies, which `rap export stock` needs.
    """

    name: ClassVar[str] = "rap"

    # With folded keys and a value subspace equal widths beat Fisher's (docs/log.md): adaptive
    # budgets had been making up for channel cuts.
    budget: Budget = "uniform"
    score: str = "fisher"
    keys: Literal["pairs", "fold"] = "fold"
    values: Literal["channels", "subspace"] = "subspace"
    context: int | None = None
    profile: Literal["per-head", "stock"] = "per-head"

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, known in (
            ("score", sorted(SCORES)),
            ("keys", ["fold", "pairs"]),
            ("values", ["channels", "subspace"]),
            ("budget", ["adaptive", "error", "uniform"]),
            ("profile", ["per-head", "stock"]),
        ):
            if getattr(self, setting) not in known:
                raise RapError(
                    f"unknown {setting} {getattr(self, setting)!r}: use one of {', '.join(known)}"
                )
        if self.budget == "error" and self.key_share != 0.5:
            raise RapError("budget 'error' gives K and V one width: key_share must stay 0.5")
        if self.profile == "stock" and (self.budget != "uniform" or self.key_share != 0.5):
            raise RapError(
                "profile 'stock' needs one width for all: budget 'uniform', key_share 0.5"
            )

    @classmethod
    def paper(cls, **settings: Any) -> "Rap":
        """The paper's recipe: root-Fisher scores, adaptive budgets, dense pairs and channels."""
        return cls(**{"budget": "adaptive", "keys": "pairs", "values": "channels"} | settings)

    @property
    def needs(self) -> frozenset[str]:
        """What the score, the folding and the subspace ask of calibration."""
        needs = SCORES[self._ranking].needs
        by_error = self.budget == "error"
        if self.keys == "fold" or by_error:
            needs |= {"pairs"}
        if self.values == "subspace" or by_error:
            needs |= {"values"}
        return needs

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
        context = self.context or dense.context
        present = [index for index, shape in enumerate(dense.shapes) if shape is not None]
        curves, sizes = [], []
        for index in present:
            curves.append(_width_errors(dense, index, statistics.layers[index] or {}, context))
            sizes.append(len(curves[-1]) - 1)
        unit = max(1, self.alignment(dense.shapes) // 2)
        kept = dict(
            zip(present, allocate_by_error(curves, self.retain, sizes, unit=unit), strict=True)
        )
        return [
            _hybrid_budget(shape, kept[index]) if shape is not None else None
            for index, shape in enumerate(dense.shapes)
        ]

    def cut_layers(
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> list[LayerPlan | None]:
        """Plain selection, with keys folded and values in a subspace where asked."""
        plain = super().cut_layers(scores, statistics, dense)
        keys = self._keys(plain, scores, statistics, dense)
        cut: list[LayerPlan | None] = []
        for index, layer in enumerate(plain):
            shape, found = dense.shapes[index], statistics.layers[index]
            if layer is None or shape is None:
                cut.append(None)
                continue
            found = found or {}
            fields = layer.tensors()
            fields |= keys[index]
            if self.values == "subspace" and dense.mixes_values[index]:
                weights = dense.weights[index]
                assert weights is not None
                del fields["channels_GC"]
                fields |= _subspace(found, weights["o"], layer.value_width, shape)
            cut.append(LayerPlan(**fields))
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
                _pair_moments(statistics.layers[index] or {})
                if layer is not None and layer.num_pairs and dense.mixes_keys[index]
                else None
                for index, layer in enumerate(plain)
            ]
            widths = [layer.num_pairs if layer is not None else 0 for layer in plain]
            context = self.context or dense.context
            return _fold_all(moments, widths, dense, context, self.profile == "stock")
        return _shared(plain, scores) if self.profile == "stock" else [{} for _ in plain]


def _fold_all(
    moments: Sequence[tuple[Tensor, Tensor] | None],
    widths: Sequence[int],
    dense: DenseLayers,
    context: int,
    shared: bool,
) -> list[dict[str, Tensor]]:
    if shared:
        present = [pair for pair in moments if pair is not None]
        slots = shared_slots(present, shared_frequencies(dense.frequencies), max(widths), context)
        heads = iter(slots)
        return [_folded(next(heads)) if pair is not None else {} for pair in moments]
    folded: list[dict[str, Tensor]] = []
    for pair, width, own in zip(moments, widths, dense.frequencies, strict=True):
        if pair is None or own is None:
            folded.append({})
            continue
        both = zip(*pair, strict=True)
        folded.append(_folded([fold_head(query, key, own, width, context) for query, key in both]))
    return folded


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


def _subspace(found: Named, w_o: Tensor, width: int, shape: AttentionShape) -> dict[str, Tensor]:
    gram = output_gram(w_o, shape).cpu()
    factors = weighted_subspace(found["value_moment"].double(), gram, width)
    return {"value_down_GCD": factors.down.contiguous(), "value_up_GDC": factors.up.contiguous()}


def _pair_moments(found: Named) -> tuple[Tensor, Tensor]:
    query, key = (
        torch.view_as_complex(found[f"{side}_moment"].double().contiguous())
        for side in ("query", "key")
    )
    return query, key


def _width_errors(dense: DenseLayers, index: int, found: Named, context: int) -> list[float]:
    """Expected relative squared error of a layer at every width, 0 ... D/2 steps of two channels.

    Values: what the subspace loses. Keys: what the logits lose, times the values' energy, for a
    logit error d moves the output by about d times the spread of the values it mixes. Relative to
    the layer's own output: in absolute terms the first layers look cheap, and cutting them is what
    hurts most (docs/log.md).
    """
    shape, weights, own = dense.shapes[index], dense.weights[index], dense.frequencies[index]
    assert shape is not None
    assert weights is not None
    assert own is not None
    gram = output_gram(weights["o"], shape).cpu()
    values = weighted_subspace(found["value_moment"].double(), gram, 1).singular.square().sum(0)
    lost_values = _tails(values)[::2]
    query, key = _pair_moments(found)
    heads = [spectrum(q, k, own, context) for q, k in zip(query, key, strict=True)]
    slots = sum(heads[1:], start=heads[0])
    lost_logits = _tails(slots) / (shape.head_dim * shape.num_heads)
    steps = shape.head_dim // 2
    at = [round(step * shape.geometry.num_pairs / steps) for step in range(steps + 1)]
    lost = [float(lost_values[n] + lost_logits[at[n]] * lost_values[0]) for n in range(steps + 1)]
    return [error / lost[0] for error in lost]


def _tails(descending: Tensor) -> Tensor:
    """Sum of everything from each position on, and a final zero."""
    return torch.cat([descending.flip(0).cumsum(0).flip(0), descending.new_zeros(1)])


def _hybrid_budget(shape: AttentionShape, steps: int) -> LayerBudget:
    pairs, size = shape.geometry.num_pairs, shape.head_dim // 2
    kept = max(1, (2 * pairs * steps + size) // (2 * size)) if pairs else 0
    return LayerBudget(pairs=kept, free=2 * (steps - kept), values=2 * steps)
