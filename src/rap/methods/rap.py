"""RoPE-Aligned Pruning: whole RoPE pairs of K (or folded slots), channels or a subspace of V.

Of every KV head, or of heads merged into one (merged.py), which is the default where it can be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..calibration.registry import WINDOWS
from ..calibration.statistics import Statistics
from ..model.errors import RapError
from ..model.layers import attention_layers, base_model_type
from ..model.rope import AttentionShape
from ..planning.budgets import BY_ERROR, Budget, LayerBudget, layer_budget, num_wide, widened
from ..planning.folding import FoldedHead
from ..planning.knapsack import above_floor
from ..planning.losses import DIRECTIONS, Metric, Orders, one_width
from ..planning.merging import merged_steps
from ..planning.plan import PairPlan, Plan
from ..planning.scores import SCORES, LayerScores, Named, score_layers
from ..planning.shared import shared_frequencies
from ..runtime.settings import Count, NotNegative
from ..runtime.sources import LayerSource
from .base import PairPruning
from .dense import DenseLayers, PrunableLayer
from .keys import (
    Queries,
    behind_norms,
    factored,
    folded_alike,
    folded_apart,
    opened,
    shared_dense,
)
from .merged import (
    Merge,
    Merged,
    check_merging,
    default_merge,
    merged_budget,
    noted,
    shape_merge,
    with_record,
)
from .trials import Positions, Retrieval, Search, Widths
from .values import in_subspace, layer_errors, layer_losses, layer_values

# Tokens, for models that are to find what stands far back (docs/how-to/calibration-data.md).
FAR = 1024


@dataclass(frozen=True, kw_only=True)
class Rap(PairPruning):
    """RAP, from the published method to the better ones at the same cost.

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
        `auto` is `error`, or `uniform` where heads are merged, where the profile wants one width or
        where errors of this `key_share` do not compare; `tempered` is half of the way from equal
        widths to those of `error`; `search` begins with `error`, and lets
        layers trade widths by what the model loses once it is cut; `retrieval` makes a tenth of the
        layers wider, those without which copying fails, and the others alike narrower. With
        `key_share` "pooled" K and V of a layer may differ in width: better at the same cache, but
        engines pad them.
    context: distance in tokens over which folded pairs may drift; None is all the model was made
        for. A shorter one folds more, which perplexity rewards and recall pays for (docs/log.md).
    reach: distance in tokens up to which a way of folding is held against what it replaces; None
        is the root of the context, `far` FAR where keys are folded. A longer one looks at what
        stands far back (docs/log.md).
    shrinkage: how far a subspace looks beyond the calibration text (losses.value_subspace).
    merge: KV heads that become one cached head: a number that divides them, `all`, or `auto`, the
        most that keep W_q and W_o within 2.25 times the dense size (1.5 where the profile or
        `queries` has them absorbed) and a head within 256 channels. None is `auto`, or 1 where
        another setting is of separate heads (merged.default_merge). Needs keys `fold` and values
        `subspace`; layers that cannot be merged stay as they are, and where `auto` merges in no
        layer all is as with 1.
    queries: `absorbed`, W_q and W_o take in what merged or folded heads are multiplied by;
        `factored`, they stay dense and every head has a map of its own, which also merges and folds
        keys behind QK-norm; `auto`, of merged heads the smaller of the two, else absorbed.
    profile: `per-head` lets every head choose its pairs, `stock` gives all heads and layers one
        width and one list of slot frequencies, which `rap export stock` needs.
    """

    name: ClassVar[str] = "rap"
    tried: ClassVar[Mapping[str, tuple[str, ...]]] = {"budget": ("search", "retrieval")}
    summary: ClassVar[str] = (
        "whole RoPE pairs of keys and queries (RoPE-Aligned Pruning) or folded slots, and channels "
        "or directions of values, of merged or separate KV heads"
    )

    budget: Budget = "auto"
    score: str = "fisher"
    metric: Metric = "loss"
    keys: Literal["pairs", "fold"] = "fold"
    values: Literal["channels", "subspace"] = "subspace"
    context: Count | None = None
    reach: Count | Literal["far"] | None = None
    shrinkage: NotNegative = 0.0
    profile: Literal["per-head", "stock"] = "per-head"
    merge: Merge = None
    queries: Queries = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge is None:
            object.__setattr__(self, "merge", default_merge(self))
        # What `auto` merges, and so what `auto` spends by, the model decides (`decided`).
        if self.budget == "auto" and (self.merge != "auto" or self.profile == "stock"):
            # Merged and recovered, equal widths end better than widths by loss (docs/log.md).
            alike = self.profile == "stock" or self.merge != 1
            spent = "error" if not alike and self._spends_by_error() else "uniform"
            object.__setattr__(self, "budget", spent)
        if self.score not in SCORES:
            raise RapError(f"unknown score {self.score!r}: use one of {', '.join(sorted(SCORES))}")
        if self.score not in ("fisher", self._ranking):
            raise RapError("folded keys, subspaces and these widths read no score: remove it")
        if self.budget == "retrieval" and self.key_share != 0.5:
            raise RapError("budget 'retrieval' gives K and V one width: it needs key_share 0.5")
        if self.budget in BY_ERROR and not self._spends_by_error():
            raise RapError(
                f"budget {self.budget!r} gives K and V one width (key_share 0.5), or lets them "
                f"compete by metric 'loss' (pooled): key_share cannot be {self.key_share} here"
            )
        if self.metric != "loss" and not self._reads_metric:
            raise RapError(f"nothing reads metric {self.metric!r} with these settings: omit it")
        if self.keys != "fold" and self.reach == "far":
            object.__setattr__(self, "reach", None)
        if self.keys != "fold" and self._says_how_to_fold:
            raise RapError("context and reach require folded keys: use keys 'fold', or remove both")
        if self.shrinkage and self.values != "subspace":
            raise RapError("shrinkage is of a value subspace: it needs values 'subspace'")
        check_merging(self)
        if self.queries == "factored" and (self.keys != "fold" or self.profile == "stock"):
            raise RapError("queries 'factored' needs keys 'fold' and profile 'per-head'")
        if self.profile == "stock" and (self.budget != "uniform" or self.key_share != 0.5):
            raise RapError(
                "profile 'stock' needs one width for all: budget 'uniform', key_share 0.5"
            )

    @classmethod
    def paper(cls, **settings: Any) -> "Rap":
        """The paper's recipe: root-Fisher scores, adaptive budgets, single pairs and channels."""
        published: dict[str, Any] = {"budget": "adaptive", "keys": "pairs", "values": "channels"}
        return cls(**published | {"merge": 1, "align": 2} | settings)

    @classmethod
    def general(cls, **settings: Any) -> "Rap":
        """For a model used on many domains, with `general:` calibration data."""
        recommended: dict[str, Any] = {"shrinkage": 1, "reach": "far"}
        return cls(**recommended | settings)

    def describe(self) -> dict[str, Any]:
        """As of every method, but no reach, shrinkage, or merge of 1: older records have none."""
        unset = {"reach": None, "shrinkage": 0.0, "merge": 1, "queries": "auto"}
        return {key: x for key, x in super().describe().items() if (key, x) not in unset.items()}

    def spared(self, config: PreTrainedConfig) -> frozenset[int]:
        """As of every method; a plain layout has one width for all layers."""
        return frozenset() if self.profile == "stock" else super().spared(config)

    def decided(self, model: PreTrainedModel) -> "Rap":
        """The same, with what `auto` leaves to the model decided; itself where nothing is left.

        Where no layer is merged this is the method with merge 1, and reads no more than that does.
        """
        if self.merge != "auto":
            return self
        if max(self.dense(model).merges) == 1:
            return replace(self, merge=1)
        return replace(self, budget="uniform") if self.budget == "auto" else self

    def _spends_by_error(self) -> bool:
        """Whether budget `error` knows this share: only losses of K and V compare."""
        return self.key_share == 0.5 or (self.key_share == "pooled" and self.metric == "loss")

    @property
    def _reads_metric(self) -> bool:
        return self.budget in BY_ERROR or self.keys == "fold" or self.values == "subspace"

    @property
    def _reach(self) -> int | None:
        return FAR if self.reach == "far" else self.reach

    @property
    def needs(self) -> frozenset[str]:
        """What the score, the folding and the subspace ask of calibration, of whatever model."""
        needs = SCORES[self._ranking].needs
        by_error = self.budget in (*BY_ERROR, "auto")
        needs |= {"pairs"} if self.keys == "fold" or by_error else set()
        needs |= {"values"} if self.values == "subspace" or by_error else set()
        if self.metric == "loss" and needs & {"pairs", "values"}:
            needs |= {"gradients"}
        if self.tries:
            needs |= {WINDOWS}
        if self.merge != 1:
            needs |= {"pairs", "values", "joint", "averages"}
            needs |= {"gradients"} if self.metric == "loss" else set()
        return needs | ({"energy"} if by_error else frozenset())

    @property
    def _maps(self) -> bool:
        """Whether layers may have maps of every head, so that QK-norm and gates limit nothing."""
        merges = self.merge != 1 and self.queries == "auto" and self.profile != "stock"
        return merges or self.queries == "factored"

    def needs_for(self, model: PreTrainedModel) -> frozenset[str]:
        """As of every pair method; and moments behind norms that maps may follow."""
        decided = self.decided(model)
        if decided is not self:
            return decided.needs_for(model)
        normalised = any(layer.norm is not None for layer in attention_layers(model))
        return super().needs_for(model) | (self._normed if normalised else frozenset())

    @property
    def _normed(self) -> frozenset[str]:
        if not self._maps:
            return frozenset()
        return frozenset({"normed"} | ({"normed_gradients"} if self.metric == "loss" else set()))

    def dense(self, model: PreTrainedModel, source: LayerSource | None = None) -> DenseLayers:
        """As of every method; QK-norm and gates limit nothing where maps are to be had."""
        dense = super().dense(model, source)
        unit = self._unit(dense.shapes)
        return replace(
            dense, layers=[layer and self._opened(layer, unit) for layer in dense.layers]
        )

    def _unit(self, shapes: Sequence[AttentionShape | None]) -> int:
        """Steps of two channels that widths are multiples of."""
        return max(1, self.alignment(shapes) // 2)

    def _opened(self, layer: PrunableLayer, unit: int) -> PrunableLayer:
        if self._maps:
            layer = opened(layer, always=self.queries == "factored")
        if layer.merge_limit:
            return layer
        absorbed = self.profile == "stock" or self.queries == "absorbed"
        merge = shape_merge(self.merge, layer.shape, self.retain, absorbed=absorbed, unit=unit)
        return replace(layer, merge=merge)

    def seen(self, dense: DenseLayers, statistics: Statistics) -> Statistics:
        """As of every method; those behind QK-norm where maps are to be had."""
        if not self._maps or not any(layer.maps_keys for layer in dense.present):
            return statistics
        statistics.require(self._normed, self.name)
        return behind_norms(statistics, dense)

    def _merged(self, dense: DenseLayers) -> Merged:
        context = self.context or dense.context
        return Merged(self.metric, context, self._reach, self.shrinkage)

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

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of pair pruning, where heads stay apart: what is merged depends on the model."""
        if self.merge == 1:
            self._check_widths(shapes, [1] * len(shapes))

    def _check_widths(self, shapes: Sequence[AttentionShape | None], merges: Sequence[int]) -> None:
        """By error every head keeps a step at least; a merged one has the pairs of all its heads.

        Raises RapError for less.
        """
        unit = self._unit(shapes)
        present = [(s, m) for s, m in zip(shapes, merges, strict=True) if s is not None]
        whole = [merge * shape.head_dim // 2 for shape, merge in present]
        sizes = [merged_steps(shape.head_dim, merge) for shape, merge in present]
        heads = [shape.num_kv_heads // merge for shape, merge in present]
        if self.budget in (*BY_ERROR, "auto"):
            above_floor(self.retain, sizes, heads, unit, dense=whole)
            return
        for shape, merge in present:
            if merge > 1:
                merged_budget(self.retain, merge, shape, unit)
        alone = [s if m == 1 else None for s, m in zip(shapes, merges, strict=True)]
        if any(alone):
            # Layers begin alike before some are made wider.
            alike = replace(self, budget="uniform") if self.budget == "retrieval" else self
            super(Rap, alike).check_shapes(alone)
        if self.budget == "retrieval":
            wide = range(num_wide(len(present)))
            widened(self.retain, wide, sizes, heads=heads, whole=whole, unit=unit)

    def check_model(self, model: PreTrainedModel) -> None:
        """As of every method; folding and the uniform layout require frequencies they can share."""
        decided = self.decided(model)
        if decided is not self:
            decided.check_model(model)
            return
        super().check_model(model)
        dense = self.dense(model)
        self._folds(dense)
        self._check_widths(dense.shapes, dense.merges)
        if self.profile == "stock":
            shared_frequencies(dense.frequencies)

    def budgets(
        self, scores: Sequence[LayerScores | None], dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """By score or alike (base), or by the error of every width."""
        if self.budget in ("error", "tempered"):
            return self._budgets_of(self.widths(scores, dense).by_layer(), dense)
        alone = [x if merge == 1 else None for x, merge in zip(scores, dense.merges, strict=True)]
        budgets, unit = super().budgets(alone, dense), self._unit(dense.shapes)
        for layer in dense.present:
            if layer.merge > 1:
                budgets[layer.index] = merged_budget(self.retain, layer.merge, layer.shape, unit)
        return budgets

    def _budgets_of(
        self, kept: Mapping[int, tuple[int, ...]], dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """What layers keep at these numbers of steps, of K and of V or one; None of all others."""
        budgets: list[LayerBudget | None] = [None] * len(dense.layers)
        for layer in dense.present:
            merge, shape, steps = layer.merge, layer.shape, kept.get(layer.index)
            if steps is not None and merge > 1:
                budgets[layer.index] = merged_budget(self.retain, merge, shape, 1, steps[0])
            elif steps is not None:
                pairs, size = shape.geometry.num_pairs, shape.head_dim // 2
                budgets[layer.index] = layer_budget(pairs, size, steps[0], steps[-1])
        return budgets

    def plan_from(self, source: LayerSource, statistics: Statistics) -> Plan:
        """As of every pair method; `search` and `retrieval` try widths on the model."""
        decided = self.decided(source.model)
        if decided is not self:
            plan = decided.plan_from(source, statistics)
            record = self.describe() | {"budget": decided.budget}
            apart = self.dense(source.model) if decided.merge == 1 else None
            return with_record(plan, record, apart)
        if not self.tries:
            return super().plan_from(source, statistics)
        model = source.whole(self.tries)
        fingerprint, family = self.check(source, statistics), base_model_type(model.config)
        dense = self.dense(source.model, source)
        statistics = self.seen(dense, statistics)
        dense = dense.with_statistics(statistics)
        scores = self.scores(dense)

        def planned(kept: dict[int, tuple[int, ...]]) -> Plan:
            layers = self.divided(scores, self._budgets_of(kept, dense), dense)
            return self.plan_of(layers, dense, family, fingerprint)

        if self.budget == "retrieval":
            positions = Positions.of(dense.present, self.alignment(dense.shapes))
            return planned(Retrieval(self, model, statistics).widths(positions, planned))
        start = self.widths(scores, dense)
        return planned(Search(self, model, statistics).widths(start, planned))

    def widths(self, scores: Sequence[LayerScores | None], dense: DenseLayers) -> Widths:
        """What errors by width give every layer, and what it could have."""
        curves = [
            (layer, curve)
            for layer in dense.present
            for curve in self._curves(layer, scores[layer.index], dense)
        ]
        layers, errors = [layer for layer, _ in curves], [curve for _, curve in curves]
        positions = Positions.of(layers, self.alignment(dense.shapes))
        return positions.by_errors(self.retain, errors, half=self.budget == "tempered")

    def orders(self, layer: PrunableLayer, scores: LayerScores | None) -> Orders:
        """What a layer keeps as it is, for it is not mixed, in the order of its scores."""
        if scores is None:
            return DIRECTIONS
        folds, turns = self.keys == "fold", self.values == "subspace"
        return Orders.of(scores, layer.mixes_keys and folds, layer.mixes_values and turns)

    def _curves(
        self, layer: PrunableLayer, scores: LayerScores | None, dense: DenseLayers
    ) -> list[list[float]]:
        """What every width of a layer costs, in units of `metric`: one curve, or of K and of V."""
        if layer.merge > 1:
            return [self._merged(dense).curve(layer)]
        context, orders = self.context or dense.context, self.orders(layer, scores)
        if self.metric == "output":
            return [layer_errors(layer, context, orders)]
        parts = layer_losses(layer, context, orders)
        return list(parts) if self.key_share == "pooled" else [one_width(*parts)]

    def cut_layers(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        dense: DenseLayers,
    ) -> list[PairPlan | None]:
        """Plain selection, with keys folded, values in a subspace and heads merged where asked."""
        if self.merge != 1:
            return self._merged_layers(scores, budgets, dense)
        cut = super().cut_layers(scores, budgets, dense)
        keys = self._keys(cut, scores, dense)
        for layer in dense.present:
            if (plain := cut[layer.index]) is None:
                continue
            fields: dict[str, Any] = {**plain.tensors(), **keys[layer.index]}
            made = PairPlan(**fields)
            if self.values == "subspace" and layer.mixes_values:
                made = in_subspace(made, layer_values(layer, self.metric), self.shrinkage)
            cut[layer.index] = factored(made, layer, self._queries)
        return cut

    @property
    def _queries(self) -> Queries:
        """As asked for; plain configs have no place for maps."""
        return "absorbed" if self.profile == "stock" else self.queries

    def _merged_layers(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        dense: DenseLayers,
    ) -> list[PairPlan | None]:
        """Layers whose heads are merged, and the others as they are without, with the reason."""
        apart = [b if n == 1 else None for b, n in zip(budgets, dense.merges, strict=True)]
        made = replace(self, merge=1, budget=self.budget).cut_layers(scores, apart, dense)
        how, slots = self._merged(dense), dict[int, list[FoldedHead]]()
        if self.profile == "stock" and max(dense.merges) > 1:
            slots = how.shared(dense, max(budget.pairs if budget else 0 for budget in budgets))
        for layer in dense.present:
            index, budget = layer.index, budgets[layer.index]
            if layer.merge == 1:
                made[index] = (plain := made[index]) and noted(plain, layer.merge_limit)
            elif budget is not None:
                whole = how.layer(layer, budget, slots.get(index))
                made[index] = factored(whole, layer, self._queries)
        return made

    def _keys(
        self,
        plain: Sequence[PairPlan | None],
        scores: Sequence[LayerScores | None],
        dense: DenseLayers,
    ) -> list[dict[str, Tensor]]:
        """What replaces the plainly chosen pairs of every layer, as fields of its PairPlan."""
        alike = self.profile == "stock"
        if alike:
            shared_frequencies(dense.frequencies)
        if not self._folds(dense):
            return shared_dense(plain, scores) if alike else [{} for _ in plain]
        how = self.context or dense.context, self.metric, self._reach
        if alike:
            return folded_alike(plain, dense, *how)
        return [
            folded_apart(kept, layer, *how) if kept and layer and layer.mixes_keys else {}
            for kept, layer in zip(plain, dense.layers, strict=True)
        ]

    def _folds(self, dense: DenseLayers) -> bool:
        """Whether keys of this model are folded; RapError where a setting asks for what is not."""
        if self.keys != "fold":
            return False
        mixed = {layer.mixes_keys for layer in dense.present}
        if mixed == {True, False} and self.profile == "stock":
            only = "needs one way for all layers, and only some of this model's may be folded"
            raise RapError(f"profile 'stock' {only}: use keys 'pairs'")
        if True not in mixed and self._says_how_to_fold:
            raise RapError(
                "context and reach require folded keys, which this model cannot have: remove both"
            )
        return True in mixed

    @property
    def _says_how_to_fold(self) -> bool:
        return self.context is not None or self.reach not in (None, "far")
