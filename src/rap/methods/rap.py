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
from ..planning.budgets import Budget, LayerBudget
from ..planning.knapsack import above_floor
from ..planning.losses import DIRECTIONS, Metric, Orders, one_width
from ..planning.plan import PairPlan, Plan
from ..planning.scores import SCORES, LayerScores, Named, score_layers
from ..planning.shared import shared_frequencies
from ..runtime.settings import Count, NotNegative
from ..runtime.sources import LayerSource
from .base import PairPruning
from .dense import DenseLayers, kept_budgets
from .keys import Queries, behind_norms, factored, folded_keys, opened, shared_dense
from .merged import (
    Merge,
    Merged,
    check_merging,
    default_merge,
    layer_merges,
    merged_budget,
    noted,
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
        where errors of this `key_share` do not compare; `search` begins with `error`, and lets
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
        if self.budget in ("error", "search") and not self._spends_by_error():
            raise RapError(
                f"budget {self.budget!r} gives K and V one width (key_share 0.5), or lets them "
                f"compete by metric 'loss' (pooled): key_share cannot be {self.key_share} here"
            )
        if self.metric != "loss" and not self._reads_metric:
            raise RapError(f"nothing reads metric {self.metric!r} with these settings: omit it")
        if self.keys != "fold" and self.reach == "far":
            object.__setattr__(self, "reach", None)
        if self.keys != "fold" and self._says_how_to_fold:
            raise RapError("context and reach are of folded keys: they need keys 'fold'")
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
        if max(self._merges(self._opened(self.dense(model)))) == 1:
            return replace(self, merge=1)
        return replace(self, budget="uniform") if self.budget == "auto" else self

    def _spends_by_error(self) -> bool:
        """Whether budget `error` knows this share: only losses of K and V compare."""
        return self.key_share == 0.5 or (self.key_share == "pooled" and self.metric == "loss")

    @property
    def _reads_metric(self) -> bool:
        by_error = self.budget in ("error", "search")
        return by_error or self.keys == "fold" or self.values == "subspace"

    @property
    def _reach(self) -> int | None:
        return FAR if self.reach == "far" else self.reach

    @property
    def tries(self) -> str:
        """As of every method."""
        return f"budget {self.budget!r}" if self.budget in ("search", "retrieval") else ""

    @property
    def needs(self) -> frozenset[str]:
        """What the score, the folding and the subspace ask of calibration, of whatever model."""
        needs = SCORES[self._ranking].needs
        by_error = self.budget in ("error", "search", "auto")
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

    def seen(self, dense: DenseLayers, statistics: Statistics) -> tuple[DenseLayers, Statistics]:
        """As of every method; QK-norm and gates limit nothing where maps are to be had."""
        dense = self._opened(dense)
        if not self._maps or not any(dense.maps_keys):
            return dense, statistics
        statistics.require(self._normed, self.name)
        return dense, behind_norms(statistics, dense)

    def _opened(self, dense: DenseLayers) -> DenseLayers:
        if not self._maps:
            return dense
        wanted = [self.queries == "factored" or not limit for limit in dense.mapped_limits]
        return opened(dense, wanted)

    def _merged(self, dense: DenseLayers) -> Merged:
        context = self.context or dense.context
        return Merged(self.metric, context, self._reach, self.shrinkage)

    def _merges(self, dense: DenseLayers) -> list[int]:
        absorbed = self.profile == "stock" or self.queries == "absorbed"
        return layer_merges(self.merge, self.retain, dense, absorbed=absorbed)

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
        unit = max(1, self.alignment(shapes) // 2)
        present = [(s, m) for s, m in zip(shapes, merges, strict=True) if s is not None]
        if self.budget in ("error", "search", "auto"):
            sizes = [merge * shape.head_dim // 2 for shape, merge in present]
            heads = [shape.num_kv_heads // merge for shape, merge in present]
            above_floor(self.retain, sizes, heads, unit)
            return
        for shape, merge in present:
            if merge > 1:
                merged_budget(self.retain, merge, shape, unit)
        alone = [s if m == 1 else None for s, m in zip(shapes, merges, strict=True)]
        if any(alone):
            # Layers begin alike before some are made wider.
            alike = replace(self, budget="uniform") if self.budget == "retrieval" else self
            super(Rap, alike).check_shapes(alone)

    def check_model(self, model: PreTrainedModel) -> None:
        """As of every method; folding and the uniform layout require frequencies they can share."""
        decided = self.decided(model)
        if decided is not self:
            decided.check_model(model)
            return
        super().check_model(model)
        dense = self._opened(self.dense(model))
        self._folds(dense)
        self._check_widths(dense.shapes, self._merges(dense))
        if self.profile == "stock":
            shared_frequencies(dense.frequencies)

    def budgets(
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """By score or alike (base), or by the error of every width."""
        if self.budget == "error":
            kept = self.widths(scores, statistics, dense).by_layer()
            return self._budgets_of(kept, dense)
        merges, unit = self._merges(dense), max(1, self.alignment(dense.shapes) // 2)
        alone = [x if merge == 1 else None for x, merge in zip(scores, merges, strict=True)]
        budgets = super().budgets(alone, statistics, dense)
        return [
            merged_budget(self.retain, merge, shape, unit) if merge > 1 else budget
            for budget, merge, shape in zip(budgets, merges, dense.shapes, strict=True)
        ]

    def _budgets_of(
        self, kept: Mapping[int, tuple[int, ...]], dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """What layers keep at these numbers of steps; None of all others."""
        plain = kept_budgets(kept, dense)
        return [
            merged_budget(self.retain, merge, shape, 1, kept[index][0])
            if merge > 1 and index in kept
            else plain[index]
            for index, (merge, shape) in enumerate(
                zip(self._merges(dense), dense.shapes, strict=True)
            )
        ]

    def plan_from(self, source: LayerSource, statistics: Statistics) -> Plan:
        """As of every pair method; `search` and `retrieval` try widths on the model."""
        decided = self.decided(source.model)
        if decided is not self:
            plan = decided.plan_from(source, statistics)
            record = self.describe() | {"budget": decided.budget}
            limits = self._opened(self.dense(source.model)).merge_limits
            return with_record(plan, record, limits if decided.merge == 1 else ())
        if not self.tries:
            return super().plan_from(source, statistics)
        model = source.whole(self.tries)
        fingerprint, family = self.check(source, statistics), base_model_type(model.config)
        dense, statistics = self.seen(self.dense(source.model, source), statistics)
        scores = self.importance(statistics.layers, dense.weights, dense.shapes)

        def planned(kept: dict[int, tuple[int, ...]]) -> Plan:
            layers = self.divided(scores, self._budgets_of(kept, dense), statistics, dense)
            return self.plan_of(layers, dense, family, fingerprint)

        if self.budget == "retrieval":
            places = [index for index, shape in enumerate(dense.shapes) if shape is not None]
            positions = self._positions(places, dense)
            return planned(Retrieval(self, model, statistics).widths(positions, planned))
        start = self.widths(scores, statistics, dense)
        return planned(Search(self, model, statistics).widths(start, planned))

    def widths(
        self, scores: Sequence[LayerScores | None], statistics: Statistics, dense: DenseLayers
    ) -> Widths:
        """What budget `error` gives every layer, and what it could have."""
        present = [index for index, shape in enumerate(dense.shapes) if shape is not None]
        orders = self.orders(scores, dense)
        curves = [self._curves(index, statistics, dense, orders[index]) for index in present]
        flat = [curve for both in curves for curve in both]
        places = [index for index, both in zip(present, curves, strict=True) for _ in both]
        return self._positions(places, dense).by_errors(self.retain, flat)

    def _positions(self, places: Sequence[int], dense: DenseLayers) -> Positions:
        return Positions.of(places, self._merges(dense), dense, self.alignment(dense.shapes))

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
        context, merge = self.context or dense.context, self._merges(dense)[index]
        if merge > 1:
            return [self._merged(dense).curve(index, merge, statistics, dense)]
        if self.metric == "output":
            return [layer_errors(index, statistics, dense, context, orders)]
        parts = layer_losses(index, statistics, dense, context, orders)
        return list(parts) if self.key_share == "pooled" else [one_width(*parts)]

    def cut_layers(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        statistics: Statistics,
        dense: DenseLayers,
    ) -> list[PairPlan | None]:
        """Plain selection, with keys folded, values in a subspace and heads merged where asked."""
        if self.merge != 1:
            return self._merged_layers(scores, budgets, statistics, dense)
        plain = super().cut_layers(scores, budgets, statistics, dense)
        keys = self._keys(plain, scores, statistics, dense)
        cut: list[PairPlan | None] = []
        for index, layer in enumerate(plain):
            if layer is None:
                cut.append(None)
                continue
            fields: dict[str, Any] = {**layer.tensors(), **keys[index]}
            made = PairPlan(**fields)
            if self.values == "subspace" and dense.mixes_values[index]:
                values = layer_values(index, statistics, dense, self.metric)
                made = in_subspace(made, values, self.shrinkage)
            cut.append(factored(made, index, dense, self._queries))
        return cut

    @property
    def _queries(self) -> Queries:
        """As asked for; plain configs have no place for maps."""
        return "absorbed" if self.profile == "stock" else self.queries

    def _merged_layers(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        statistics: Statistics,
        dense: DenseLayers,
    ) -> list[PairPlan | None]:
        """Layers whose heads are merged, and the others as they are without, with the reason."""
        merges = self._merges(dense)
        apart = [b if merge == 1 else None for b, merge in zip(budgets, merges, strict=True)]
        alone = replace(self, merge=1, budget=self.budget)
        made = [
            layer and noted(layer, dense.merge_limits[index])
            for index, layer in enumerate(alone.cut_layers(scores, apart, statistics, dense))
        ]
        how, slots = self._merged(dense), None
        if self.profile == "stock" and max(merges) > 1:
            widths = [0 if budget is None else budget.pairs for budget in budgets]
            slots = how.shared(merges, widths, statistics, dense)
        for index, (budget, merge) in enumerate(zip(budgets, merges, strict=True)):
            if budget is not None and merge > 1:
                given = None if slots is None else slots[index]
                whole = how.layer(index, merge, budget, statistics, dense, given)
                made[index] = factored(whole, index, dense, self._queries)
        return made

    def _keys(
        self,
        plain: Sequence[PairPlan | None],
        scores: Sequence[LayerScores | None],
        statistics: Statistics,
        dense: DenseLayers,
    ) -> list[dict[str, Tensor]]:
        """What replaces the plainly chosen pairs of every layer, as fields of its PairPlan."""
        if self.profile == "stock":
            shared_frequencies(dense.frequencies)
        if self._folds(dense):
            found = [layer or {} for layer in statistics.layers]
            how = self.context or dense.context, self.metric, self._reach
            return folded_keys(plain, found, dense, *how, alike=self.profile == "stock")
        return shared_dense(plain, scores) if self.profile == "stock" else [{} for _ in plain]

    def _folds(self, dense: DenseLayers) -> bool:
        """Whether keys of this model are folded; RapError where a setting asks for what is not."""
        if self.keys != "fold":
            return False
        mixed = {m for s, m in zip(dense.shapes, dense.mixes_keys, strict=True) if s is not None}
        if mixed == {True, False} and self.profile == "stock":
            only = "needs one way for all layers, and only some of this model's may be folded"
            raise RapError(f"profile 'stock' {only}: use keys 'pairs'")
        if True not in mixed and self._says_how_to_fold:
            raise RapError(
                "context and reach are of folded keys, and this model's cannot be: remove both"
            )
        return True in mixed

    @property
    def _says_how_to_fold(self) -> bool:
        return self.context is not None or self.reach not in (None, "far")
