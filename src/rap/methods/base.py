"""What every method is: a dataclass of hyper-parameters that plans, and applies its plan."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from ..calibration.statistics import Statistics
from ..model.errors import RapError, UnsupportedModelError
from ..model.layers import attention_layers, base_model_type, check_dense, windowed_layers
from ..model.norms import NORM_PER_HEAD
from ..model.rope import AttentionShape
from ..planning.budgets import Budget, KeyShare, LayerBudget, check_settings, kv_budgets, select
from ..planning.kv_sharing import divide
from ..planning.norms import NORM_ROWS, with_denominators
from ..planning.plan import PairPlan, Plan
from ..planning.scores import LayerScores, Named, equal_scores, score_layers
from ..runtime.settings import Count, Share, check_fields
from ..runtime.sources import LayerSource, LoadedLayers
from ..surgery.apply import apply
from .dense import DenseLayers, dense_layers

# Kernels of attention and matrix products lose their fast paths at widths that are no multiple of
# 8 channels; heads narrower than this keep any number of pairs, or little would be left to choose.
ALIGNED_WIDTH = 8
ALIGN_FROM_HEAD_DIM = 64

Ships = Literal["code", "package", "stock"]
Layers = Literal["full", "all"]


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to spend the budget `retain`, the fraction of the dense KV cache that is kept.

    A method says of itself, as class variables: its `name`; its `family`, a word for what it takes
    away, which comparisons group by; in one line what it keeps (`summary`); what its model
    reconstructs from the cache at every step (`reconstructs`: keys, keys and values, or nothing);
    what loading its checkpoint takes (`ships`): the `code` that is beside it, this `package`, or,
    of a plain one of the family (`stock`), neither; and the values of settings, by name, that the
    whole model is evaluated for (`tried`).

    layers: `full` leaves layers with a sliding window dense where other layers have full attention,
        whose cache `retain` is then a fraction of: it alone grows with the context. `all` prunes
        every layer.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    summary: ClassVar[str]
    reconstructs: ClassVar[str] = ""
    ships: ClassVar[Ships] = "code"
    tried: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    retain: Share = 0.7
    seed: int = 0
    layers: Layers = "full"

    def __post_init__(self) -> None:
        check_fields(self)

    def spared(self, config: PreTrainedConfig) -> frozenset[int]:
        """Layers of a model with this config that stay dense, by `layers`."""
        return windowed_layers(config) if self.layers == "full" else frozenset()

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """The statistics that calibration must collect for this method."""

    @property
    def tries(self) -> str:
        """The setting that the whole model is evaluated for, such as `budget 'search'`.

        Empty if there is none. It takes the model in memory, and WINDOWS among the `needs`.
        """
        found = ((name, getattr(self, name)) for name in self.tried)
        return next((f"{name} {x!r}" for name, x in found if x in self.tried[name]), "")

    def needs_for(self, model: PreTrainedModel) -> frozenset[str]:
        """`needs`, and the energies that replace the dense head where queries are normalized."""
        normalised = any(layer.norm is not None for layer in attention_layers(model))
        return self.needs | ({"energy"} if normalised else frozenset())

    def plan(self, model: PreTrainedModel, statistics: Statistics) -> Plan:
        """Decide what every layer of the dense `model` keeps; the model is not changed."""
        return self.plan_from(LoadedLayers(model), statistics)

    @abstractmethod
    def plan_from(self, source: LayerSource, statistics: Statistics) -> Plan:
        """As `plan`, for a model whose weights need not be in memory."""

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:  # noqa: B027 - optional
        """Raise RapError for a budget that layers of these shapes cannot keep, if that shows.

        Asked before anything is measured, where `plan` would only say so afterwards.
        """

    def check_model(self, model: PreTrainedModel) -> None:
        """As `check_shapes`, which it asks: RapError for what a dense model's config rules out.

        UnsupportedModelError for a model of which no layer has attention to prune.
        """
        spared = self.spared(model.config)
        shapes = [None if x.index in spared else x.shape for x in attention_layers(model)]
        if not any(shapes):
            raise UnsupportedModelError("no layer of this model has attention to prune")
        self.check_shapes(shapes)

    def apply(self, model: PreTrainedModel, plan: Plan) -> Any:
        """The smaller model, new; `model` is left untouched."""
        return apply(model, plan)

    def check(self, source: LayerSource, statistics: Statistics) -> str:
        """The dense model's fingerprint; RapError unless the statistics are whole and of it."""
        check_dense(source.model)
        statistics.require(self.needs, self.name)
        fingerprint = source.fingerprint
        if statistics.fingerprint != fingerprint:
            raise RapError(
                f"the statistics are of other weights ({statistics.fingerprint[:12] or 'unknown'}) "
                f"than this model's ({fingerprint[:12]}): calibrate this model"
            )
        return fingerprint

    def describe(self) -> dict[str, Any]:
        """The record of the run: the method's name and every hyper-parameter.

        Without `layers` unless it is `all`: records of models without windows have none.
        """
        settings = {k: x for k, x in asdict(self).items() if (k, x) != ("layers", "full")}
        return {"name": self.name, **settings}


def traits(method: Method | type[Method]) -> dict[str, str]:
    """A method's entries about itself in addition to its settings, for reports and model cards."""
    return {
        "family": method.family,
        "summary": method.summary,
        "reconstructs": method.reconstructs,
        "ships": method.ships,
    }


@dataclass(frozen=True, kw_only=True)
class PairPruning(Method):
    """A method that scores pairs and value channels and keeps the best of each head.

    budget: `adaptive` gives layers widths in proportion to their score, `uniform` all the same.
    key_share: K's part of the budget, 0.5 for as many channels of K as of V, or `pooled`.
    align: widths are multiples of this many channels; None is 8 for heads of 64 and wider, else 1.
    qk_norm: where queries and keys are normalised, `exact` keeps all their rows for the norm,
        `constant` cuts them too, with a constant for what the norm then misses, and `rows` keeps
        `norm_rows` rows of every head for the norm alone (rap.model.norms).
    """

    family: ClassVar[str] = "pair pruning"

    budget: Budget = "adaptive"
    key_share: KeyShare = 0.5
    align: int | None = None
    qk_norm: Literal["exact", "constant", "rows"] = "constant"
    norm_rows: Count = NORM_ROWS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.key_share, 1 if self.align is None else self.align)
        if self.norm_rows != NORM_ROWS and self.qk_norm != "rows":
            raise RapError(
                f"norm_rows is of qk_norm 'rows' alone, and this is {self.qk_norm!r}: remove it"
            )

    def needs_for(self, model: PreTrainedModel) -> frozenset[str]:
        """As of every method; mode `rows` needs to know which rows carry the energy."""
        normalised = any(layer.norm is not None for layer in attention_layers(model))
        rows = normalised and self.qk_norm == "rows"
        return super().needs_for(model) | ({"norms"} if rows else frozenset())

    def check(self, source: LayerSource, statistics: Statistics) -> str:
        """As of every method; mode `rows` cannot do without what rows are chosen by."""
        statistics.require(self.needs_for(source.model) & {"norms"}, self.name)
        return super().check(source, statistics)

    @abstractmethod
    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Scores of every layer's pairs and channels, which a pair method must define."""

    def check_model(self, model: PreTrainedModel) -> None:
        """As of every method; UnsupportedModelError for norms by head that would be pruned."""
        super().check_model(model)
        norms = [layer.norm for layer in attention_layers(model) if layer.norm is not None]
        if self.qk_norm != "exact" and any(norm.one_module_per_head for norm in norms):
            raise UnsupportedModelError(NORM_PER_HEAD)

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method: what layers of equal scores could not keep, none can."""
        alike = [None if shape is None else equal_scores(shape) for shape in shapes]
        self._spend(alike, shapes)

    def plan_from(self, source: LayerSource, statistics: Statistics) -> Plan:
        """Score, budget, select (the paper's Budget-Alloc)."""
        fingerprint, dense = self.check(source, statistics), self.dense(source.model, source)
        dense = dense.with_statistics(self.seen(dense, statistics))
        scores = self.scores(dense)
        layers = self.divided(scores, self.budgets(scores, dense), dense)
        return self.plan_of(layers, dense, base_model_type(source.model.config), fingerprint)

    def dense(self, model: PreTrainedModel, source: LayerSource | None = None) -> DenseLayers:
        """The dense layers, without those that are `spared`."""
        return dense_layers(model, source, self.spared(model.config))

    def seen(self, dense: DenseLayers, statistics: Statistics) -> Statistics:
        """The statistics of these layers as the method plans on them."""
        return statistics

    def scores(self, dense: DenseLayers) -> list[LayerScores | None]:
        """The `importance` of layers with statistics."""
        statistics = [None if x is None else x.statistics for x in dense.layers]
        return self.importance(statistics, dense.weights, dense.shapes)

    def plan_of(
        self,
        layers: tuple[PairPlan | None, ...],
        dense: DenseLayers,
        model_type: str,
        fingerprint: str,
    ) -> Plan:
        """These layers as a Plan of this method for the dense weights of that fingerprint."""
        return Plan(
            layers=layers,
            shapes=tuple(dense.every_shape),
            spared=dense.spared,
            model_type=model_type,
            retain=self.retain,
            dense_fingerprint=fingerprint,
            method=self.describe(),
            qk_norm=self.qk_norm,
        )

    def divided(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        dense: DenseLayers,
    ) -> tuple[PairPlan | None, ...]:
        """The plan of every decoder layer at given budgets (None: left dense), as `Plan` has it."""
        rows = self.norm_rows if self.qk_norm == "rows" else 0
        cut = self.cut_layers(scores, budgets, dense)
        for layer in dense.present:
            if (kept := cut[layer.index]) is not None:
                cut[layer.index] = with_denominators(kept, layer.shape, layer.statistics, rows)
        return divide(cut, dense.every_shape)

    def budgets(
        self, scores: Sequence[LayerScores | None], dense: DenseLayers
    ) -> list[LayerBudget | None]:
        """How much every layer keeps of K and of V."""
        return self._spend(scores, dense.shapes)

    def _spend(
        self, scores: Sequence[LayerScores | None], shapes: Sequence[AttentionShape | None]
    ) -> list[LayerBudget | None]:
        return kv_budgets(
            scores,
            self.retain,
            budget=self.budget,
            key_share=self.key_share,
            align=self.alignment(shapes),
        )

    def cut_layers(
        self,
        scores: Sequence[LayerScores | None],
        budgets: Sequence[LayerBudget | None],
        dense: DenseLayers,
    ) -> list[PairPlan | None]:
        """The plan of every layer: the best pairs and channels within its budget."""
        chosen = select(scores, budgets)
        return [PairPlan.of_indices(*kept) if kept is not None else None for kept in chosen]

    def alignment(self, shapes: Sequence[AttentionShape | None]) -> int:
        """The channel count that widths are multiples of, `align` or its default."""
        return aligned(self.align, shapes)


@dataclass(frozen=True, kw_only=True)
class Control(PairPruning):
    """A method to compare others with: it reads no text, and every layer keeps alike.

    Pairs and value channels by the score of rap.planning.scores.SCORES that has the method's name.
    """

    budget: Budget = "uniform"

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def importance(
        self,
        statistics: Sequence[Named | None],
        weights: Sequence[Named | None],
        shapes: Sequence[AttentionShape | None],
    ) -> list[LayerScores | None]:
        """Of the weights alone, or of none."""
        return score_layers(self.name, statistics, weights, shapes, self.seed)


def aligned(align: int | None, shapes: Sequence[AttentionShape | None]) -> int:
    """The channel count that widths are multiples of: `align`, or the default for these heads."""
    if align is not None:
        return align
    narrowest = min((shape.head_dim for shape in shapes if shape is not None), default=0)
    return ALIGNED_WIDTH if narrowest >= ALIGN_FROM_HEAD_DIM else 1
