"""RoPE-Aligned Pruning: whole RoPE pairs of K (or folded slots), channels or a subspace of V."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..allocation import LayerBudget, allocate_by_error
from ..errors import RapError
from ..folding import fold_head, spectrum
from ..plan import LayerPlan
from ..rope import AttentionShape
from ..scoring import SCORES, LayerScores, Named, score_layers
from ..statistics import Statistics
from ..subspace import output_gram, weighted_subspace
from .base import DenseLayers, PairPruning


@dataclass(frozen=True, kw_only=True)
class Rap(PairPruning):
    """RAP, from the paper's cut to the better ones at the same cost.

    score: importance of pairs and channels, one of rap.scoring.SCORES.
    keys: `pairs` keeps dense pairs (the paper), `fold` compresses groups of slow pairs together.
    values: `channels` keeps dense channels (the paper), `subspace` the best directions.
    budget: beside `adaptive` and `uniform`, `error` spends where it removes most expected error.
    context: distance in tokens over which folded pairs may drift; None is the calibration window.
    """

    name: ClassVar[str] = "rap"

    score: str = "fisher"
    keys: Literal["pairs", "fold"] = "fold"
    values: Literal["channels", "subspace"] = "subspace"
    context: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, known in (
            ("score", sorted(SCORES)),
            ("keys", ["fold", "pairs"]),
            ("values", ["channels", "subspace"]),
            ("budget", ["adaptive", "error", "uniform"]),
        ):
            if getattr(self, setting) not in known:
                raise RapError(
                    f"unknown {setting} {getattr(self, setting)!r}: use one of {', '.join(known)}"
                )
        if self.budget == "error" and self.key_share != 0.5:
            raise RapError("budget 'error' gives K and V one width: key_share must stay 0.5")

    @property
    def needs(self) -> frozenset[str]:
        """What the score, the folding and the subspace ask of calibration."""
        chosen = self.keys == "pairs" or self.values == "channels" or self.budget == "adaptive"
        needs = SCORES[self.score].needs if chosen else frozenset()
        by_error = self.budget == "error"
        if self.keys == "fold" or by_error:
            needs |= {"pairs"}
        if self.values == "subspace" or by_error:
            needs |= {"values"}
        return needs

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Scores by the chosen rule; without calibration for it, budgets are not score-led."""
        usable = self.score if SCORES[self.score].needs <= self.needs else "magnitude"
        return score_layers(usable, statistics, weights, shapes, self.seed)

    def budgets(
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """By score or alike (base), or by the error of every width."""
        if self.budget != "error":
            return super().budgets(scores, statistics, dense)
        context = self.context or statistics.window
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
        context = self.context or statistics.window
        cut: list[LayerPlan | None] = []
        for index, layer in enumerate(plain):
            shape, found = dense.shapes[index], statistics.layers[index]
            if layer is None or shape is None:
                cut.append(None)
                continue
            found = found or {}
            fields = layer.tensors()
            if self.keys == "fold" and shape.geometry.num_pairs:
                fields |= _folded(found, dense.frequencies, layer.num_pairs, context)
            if self.values == "subspace":
                weights = dense.weights[index]
                assert weights is not None
                del fields["channels_GC"]
                fields |= _subspace(found, weights["o"], layer.value_width, shape)
            cut.append(LayerPlan(**fields))
        return cut


def _folded(found: Named, frequencies: Tensor, num_slots: int, context: int) -> dict[str, Tensor]:
    heads = [
        fold_head(query, key, frequencies, num_slots, context)
        for query, key in zip(*_pair_moments(found), strict=True)
    ]
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
    """Expected squared error of a layer's output at every width, 0 ... D/2 steps of two channels.

    Values: what the subspace loses. Keys: what the logits lose, times the values' energy, for a
    logit error d moves the output by about d times the spread of the values it mixes.
    """
    shape, weights = dense.shapes[index], dense.weights[index]
    assert shape is not None
    assert weights is not None
    gram = output_gram(weights["o"], shape).cpu()
    values = weighted_subspace(found["value_moment"].double(), gram, 1).singular.square().sum(0)
    lost_values = _tails(values)[::2]
    query, key = _pair_moments(found)
    slots = sum(spectrum(q, k, dense.frequencies, context) for q, k in zip(query, key, strict=True))
    lost_logits = _tails(slots) / (shape.head_dim * shape.num_heads)
    steps = shape.head_dim // 2
    at = [round(step * shape.geometry.num_pairs / steps) for step in range(steps + 1)]
    return [float(lost_values[n] + lost_logits[at[n]] * lost_values[0]) for n in range(steps + 1)]


def _tails(descending: Tensor) -> Tensor:
    """Sum of everything from each position on, and a final zero."""
    return torch.cat([descending.flip(0).cumsum(0).flip(0), descending.new_zeros(1)])


def _hybrid_budget(shape: AttentionShape, steps: int) -> LayerBudget:
    pairs, size = shape.geometry.num_pairs, shape.head_dim // 2
    kept = max(1, (2 * pairs * steps + size) // (2 * size)) if pairs else 0
    return LayerBudget(pairs=kept, free=2 * (steps - kept), values=2 * steps)
