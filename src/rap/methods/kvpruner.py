"""KVPruner: single channels of keys and values, chosen without regard to which rotate together.

https://arxiv.org/abs/2409.11057 as the RAP paper ran it: RAP's scores, budgets and recovery, with
the channel as the unit instead of the pair, so that the difference is the unit alone.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.registry import WINDOWS
from ..calibration.statistics import Statistics
from ..model.cache_layout import Entry, PairEntry
from ..model.errors import RapError, UnsupportedModelError
from ..model.kinds.base import LayerPlan, WeightsPlan
from ..model.kinds.single_channels import IndexedEntry, ReindexedEntry
from ..model.layers import rotary_module, text_config
from ..model.rope import AttentionShape, HeadGeometry, read_frequencies
from ..planning.budgets import Budget, KeyShare, LayerBudget, check_settings, kv_budgets
from ..planning.scores import equal_scores, score_layers
from ..runtime.sources import LayerSource
from .base import aligned
from .replacing import DenseLayer, Replacing
from .trials import Trials

_NOT_NARROWER = (
    "layer {}: kept channels cannot be taken for a narrower head where only some rotate, use "
    "kvpruner-indexed"
)


@dataclass(frozen=True, kw_only=True)
class _Channels(Replacing):
    """What both KVPruners share: the best channels of every KV head within a budget.

    budget: `uniform` gives all layers the same, `adaptive` shares by their root-Fisher (the RAP
        paper), `sensitivity` by what a cut of each layer alone to `retain` adds to the perplexity
        of calibration windows: our reading of the original's Phase A, whose formula is not public.
    key_share, align: as of pair pruning; `sensitivity` knows layers only, so it cannot be pooled.
    """

    family: ClassVar[str] = "channel pruning"
    tried: ClassVar[Mapping[str, tuple[str, ...]]] = {"budget": ("sensitivity",)}

    budget: Literal["uniform", "adaptive", "sensitivity"] = "uniform"
    key_share: KeyShare = 0.5
    align: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.key_share, 1 if self.align is None else self.align)
        if self.budget == "sensitivity" and self.key_share == "pooled":
            raise RapError("budget sensitivity has no scores of K and V to pool: give key_share")

    @classmethod
    def paper(cls, **settings: Any) -> Any:
        """The RAP paper's budgets: layers in proportion to their Fisher score, to single pairs."""
        published: dict[str, Any] = {"budget": "adaptive", "align": 2}
        return cls(**published | settings)

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method: what layers of equal scores could not keep, none can."""
        super().check_shapes(shapes)
        budget: Budget = "uniform" if self.budget == "sensitivity" else self.budget
        alike = [None if shape is None else equal_scores(shape) for shape in shapes]
        kv_budgets(alike, self.retain, budget=budget, **self._shares(shapes))

    def _shares(self, shapes: Sequence[AttentionShape | None]) -> dict[str, Any]:
        return {"key_share": self.key_share, "align": aligned(self.align, shapes)}

    @property
    def needs(self) -> frozenset[str]:
        """Gradients of W_k and W_v, and windows to try cuts on."""
        return frozenset({"fisher"} | ({WINDOWS} if self.tries else set()))

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterator[WeightsPlan]:
        """As many channels as RAP's budget has, the best by root-Fisher."""
        by_layer = [layer.statistics for layer in layers]
        shapes = [layer.shape for layer in layers]
        scores = score_layers("fisher", by_layer, [None] * len(layers), shapes)
        settings = self._shares(shapes)
        if self.budget != "sensitivity":
            budgets = kv_budgets(scores, self.retain, budget=self.budget, **settings)
        else:
            alike = kv_budgets(scores, self.retain, budget="uniform", **settings)
            trials = Trials(source.whole(self.tries), statistics)
            cuts = zip(layers, self._cuts(layers, source.model, alike), strict=True)
            ranks = sensitivities(trials, ((i.index, cut) for i, cut in cuts))
            budgets = kv_budgets(scores, self.retain, ranks=ranks, **settings)
        return self._cuts(layers, source.model, budgets)

    def _cuts(
        self,
        layers: Sequence[DenseLayer],
        model: PreTrainedModel,
        budgets: Sequence[LayerBudget | None],
    ) -> Iterator[WeightsPlan]:
        for layer, budget in zip(layers, budgets, strict=True):
            assert budget is not None
            keys = _best(layer.statistics["root_fisher_k"], 2 * budget.pairs + budget.free)
            values = _best(layer.statistics["root_fisher_v"], budget.values)
            yield self._layer(layer, model, keys, values)

    def _layer(
        self, layer: DenseLayer, model: PreTrainedModel, keys_GW: Tensor, values_GC: Tensor
    ) -> WeightsPlan:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class KvPruner(_Channels):
    """Kept channels move together and rotate as a narrower head: what a plain pruner leaves.

    rotation: `narrow` gives them the frequencies of a head of that width, as setting `head_dim`
        would; `first` the first ones of the dense head, which makes a plain rap checkpoint.
    """

    name: ClassVar[str] = "kvpruner"
    summary: ClassVar[str] = "single channels of keys, rotated as a narrower head, and of values"

    rotation: Literal["narrow", "first"] = "narrow"

    def check_shapes(self, shapes: Sequence[AttentionShape | None]) -> None:
        """As of every method; all channels of a head rotate.

        Raises UnsupportedModelError for a layer of which only some do, or none.
        """
        super().check_shapes(shapes)
        for index, shape in enumerate(shapes):
            if shape is not None and (shape.geometry.num_free or not shape.geometry.num_pairs):
                raise UnsupportedModelError(_NOT_NARROWER.format(index))

    def _layer(
        self, layer: DenseLayer, model: PreTrainedModel, keys_GW: Tensor, values_GC: Tensor
    ) -> WeightsPlan:
        geometry, width = layer.shape.geometry, keys_GW.shape[1]
        if geometry.num_free or not geometry.num_pairs or width % 2:
            raise UnsupportedModelError(_NOT_NARROWER.format(layer.index))
        # Channels stay in the dense order and pair up as that of a head of their number would.
        order = geometry.canonical_order()
        dense = order[keys_GW].sort(1).values
        packed = dense[:, HeadGeometry(width, width, geometry.pairing).canonical_order()]
        canonical = order.argsort()[packed]
        pairs = torch.arange(width // 2, dtype=torch.int32)
        tensors = {"frequency_index": pairs.expand(len(keys_GW), -1).clone()}
        tensors |= _cut(layer, canonical, values_GC)
        sizes = (width // 2, 0, values_GC.shape[1])
        entry: Entry = PairEntry(*sizes)
        if self.rotation == "narrow":
            entry = ReindexedEntry(*sizes, **narrow_rotation(model, width))
        return WeightsPlan(entry, tensors)


@dataclass(frozen=True, kw_only=True)
class IndexedKvPruner(_Channels):
    """Every kept channel at its own frequency; the part of a missing partner is zero."""

    name: ClassVar[str] = "kvpruner-indexed"
    summary: ClassVar[str] = "single channels of keys at their own frequencies, and of values"

    def _layer(
        self, layer: DenseLayer, model: PreTrainedModel, keys_GW: Tensor, values_GC: Tensor
    ) -> WeightsPlan:
        pairs = layer.shape.geometry.num_pairs
        rotating = keys_GW < 2 * pairs
        tensors = {
            "kept_channels": keys_GW.to(torch.int32),
            "frequency_index": (keys_GW % max(1, pairs) * rotating).to(torch.int32),
        }
        tensors |= _cut(layer, keys_GW, values_GC)
        return WeightsPlan(IndexedEntry(keys_GW.shape[1], values_GC.shape[1]), tensors)


def sensitivities(trials: Trials, cuts: Iterable[tuple[int, LayerPlan]]) -> list[float]:
    """What pruning each of these alone adds to the perplexity: 0 where it adds nothing.

    All alike, were they all 0.
    """
    dense = trials.perplexity({})
    added = [max(0.0, trials.perplexity({index: cut}) - dense) for index, cut in cuts]
    return added if any(added) else [1.0] * len(added)


def narrow_rotation(model: PreTrainedModel, width: int) -> dict[str, Any]:
    """Frequencies and scaling of the model's rotary module, built for heads of another width.

    Raises UnsupportedModelError for frequencies that are listed pair by pair.
    """
    config = copy.deepcopy(text_config(model.config))
    if {"short_factor", "long_factor"} & config.rope_parameters.keys():
        raise UnsupportedModelError(
            f"rope_type {config.rope_parameters['rope_type']!r} lists a factor for every pair, and "
            "none for a narrower head: use kvpruner with rotation=first, or kvpruner-indexed"
        )
    config.head_dim = width
    rotary: Any = type(rotary_module(model))
    narrow = rotary(config)
    frequencies = read_frequencies(narrow).tolist()
    return {"frequencies": frequencies, "scaling": float(narrow.attention_scaling)}


def _best(score_GD: Tensor, count: int) -> Tensor:
    """Indices [G, count] of the largest scores of every head, ascending, lower ones on a tie."""
    order = score_GD.argsort(dim=1, descending=True, stable=True)
    return order[:, :count].sort(dim=1).values


def _cut(layer: DenseLayer, keys_GW: Tensor, values_GC: Tensor) -> dict[str, Tensor]:
    """Kept rows of q, k and v (q and k by canonical channel), and kept columns of o."""
    kept = {"q": keys_GW, "k": keys_GW, "v": values_GC}
    tensors: dict[str, Tensor] = {}
    for projection, channels in kept.items():
        bias = layer.bias(projection)
        cut = None if bias is None else _rows(bias, channels, layer.shape.head_dim)
        rows = _rows(layer.weight(projection), channels, layer.shape.head_dim)
        tensors |= layer.linear(projection, rows, cut)
    columns = _rows(layer.weight("o").mT, values_GC, layer.shape.head_dim).mT
    return tensors | layer.linear("o", columns.contiguous(), layer.bias("o"))


def _rows(tensor: Tensor, kept_GW: Tensor, head_dim: int) -> Tensor:
    rows = tensor.unflatten(0, (-1, head_dim))
    kept_HW = kept_GW.repeat_interleave(len(rows) // len(kept_GW), 0)
    return rows[torch.arange(len(rows))[:, None], kept_HW].flatten(0, 1)
