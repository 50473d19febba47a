"""Methods that give every layer another kind of attention, instead of pairs of the one it has."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.statistics import Statistics
from ..model.errors import RapError, UnsupportedModelError
from ..model.kinds.base import LayerPlan, WeightsPlan
from ..model.kinds.latent import LatentEntry
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    base_model_type,
    projections,
    rotary_module,
)
from ..model.rope import AttentionShape
from ..model.specs import AttentionSpec
from ..planning.plan import Plan
from ..planning.scores import Named
from ..planning.subspace import WeightFactors
from ..runtime.sources import LayerSource
from .base import Method, Ships
from .dense import dense_layers


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """One layer as such a method sees it: its sizes, and the linears by projection.

    Rows of q and k are in canonical order. `read` gives the weights of its linears. `statistics`
    are those of the layer, `frequencies` [P], `rotary_factor` is what the family multiplies cos and
    sin by (YaRN's attention factor).
    """

    index: int
    shape: AttentionShape
    names: dict[str, str]
    read: Callable[[], dict[str, Any]]
    statistics: Named
    frequencies: Tensor
    rotary_factor: float = 1.0

    @property
    def linears(self) -> dict[str, Any]:
        """Linears by projection, read when they are asked for."""
        return self.read()

    def weight(self, projection: str) -> Tensor:
        """A projection [out, in], float64 on the CPU."""
        return self._ordered(projection, self.linears[projection].weight.detach().double().cpu())

    def bias(self, projection: str) -> Tensor | None:
        """Its bias, float64 on the CPU."""
        bias = self.linears[projection].bias
        return None if bias is None else self._ordered(projection, bias.detach().double().cpu())

    def dense(self, *projections: str) -> dict[str, Tensor]:
        """Projections as they are, as tensors of a state dict."""
        tensors: dict[str, Tensor] = {}
        for projection in projections:
            tensors |= self.linear(projection, self.weight(projection), self.bias(projection))
        return tensors

    def linear(
        self, projection: str, weight: Tensor, bias: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Tensors of the linear that has the name of a projection's projection."""
        return linear(self.names[projection], weight, bias)

    def _ordered(self, projection: str, tensor: Tensor) -> Tensor:
        if projection not in "qk":
            return tensor
        rows = tensor.unflatten(0, (-1, self.shape.head_dim))
        return rows[:, self.shape.geometry.canonical_order()].flatten(0, 1)


def linear(name: str, weight: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
    """A linear layer's tensors by their names in a state dict."""
    tensors = {f"{name}.weight": weight}
    return tensors if bias is None else {**tensors, f"{name}.bias": bias}


def every_pair(shape: AttentionShape) -> Tensor:
    """The frequency index [G, P] of heads that keep all their pairs."""
    pairs = torch.arange(shape.geometry.num_pairs, dtype=torch.int32)
    return pairs.expand(shape.num_kv_heads, -1).clone()


def latent_layer(layer: DenseLayer, keys: WeightFactors, values: WeightFactors) -> WeightsPlan:
    """A latent of all heads for keys and one for values, by these factors of W_k and of W_v."""
    tensors: dict[str, Tensor] = {"frequency_index": every_pair(layer.shape)}
    tensors |= layer.dense("q", "o")
    for projection, factors in (("k", keys), ("v", values)):
        tensors |= layer.linear(projection, factors.down)
        tensors |= linear(f"{projection}_up.0", factors.up, layer.bias(projection))
    ranks = {"keys": len(keys.down), "values": len(values.down)}
    return WeightsPlan(LatentEntry(groups=1, fold=False, **ranks), tensors)


def nearest_rank(retain: float, size: int, multiple: int = 1) -> int:
    """The multiple nearest to retain * size, half up, at least one of it and at most `size`.

    Raises RapError for a multiple that `size` holds none of.
    """
    if multiple > size:
        raise RapError(f"multiple {multiple} is more than the {size} that there are: give less")
    steps = max(1, int(retain * size / multiple + 0.5))
    return min(size, steps * multiple)


@dataclass(frozen=True, kw_only=True)
class Replacing(Method):
    """A method that defines, layer by layer, the attention that replaces the dense attention."""

    ships: ClassVar[Ships] = "package"

    @abstractmethod
    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> Iterable[LayerPlan]:
        """The new attention of each of these layers, best one at a time: they come in float64.

        `statistics` say what was calibrated on; each layer has its own part of them.
        """

    def check_model(self, model: PreTrainedModel) -> None:
        """As of every method; attention must be what the baselines were written for."""
        super().check_model(model)
        check_plain(model, attention_layers(model), self.name)

    def plan_from(self, source: LayerSource, statistics: Statistics) -> Plan:
        """Replace every layer with attention."""
        fingerprint, model = self.check(source, statistics), source.model
        check_plain(model, attention_layers(model), self.name)
        spared = self.spared(model.config)
        layers = _layers(source, statistics, spared)
        made = {
            layer.index: as_stored(layer, new)
            for layer, new in zip(layers, self.replaced(layers, source, statistics), strict=True)
        }
        shapes = tuple(layer.shape for layer in attention_layers(model))
        return Plan(
            layers=tuple(made.get(index) for index in range(len(shapes))),
            shapes=shapes,
            spared=tuple(sorted(spared)),
            model_type=base_model_type(model.config),
            retain=self.retain,
            dense_fingerprint=fingerprint,
            method=self.describe(),
        )


def as_stored(layer: DenseLayer, new: LayerPlan) -> LayerPlan:
    """The new attention in the precision of the dense weights."""
    if not isinstance(new, WeightsPlan):
        return new
    dtype = layer.linears["k"].weight.dtype
    weights = {n: x.to(dtype) if x.is_floating_point() else x for n, x in new.weights.items()}
    return replace(new, weights=weights)


def check_plain(model: PreTrainedModel, layers: Sequence[AttentionLayer], what: str) -> None:
    """Raise UnsupportedModelError unless attention is what the baselines were written for.

    That is separate q, k, v and o, without norms of queries and keys, gates, sinks, clipped
    states, or layers that rotate at frequencies of their own.
    """
    spec = attention_spec(model.config)
    missing = [
        (spec.fused is not None, "one linear for q, k and v"),
        (spec.gate is not None, "a gate on its output"),
        (any(layer.norm is not None for layer in layers), "norms of queries and keys"),
        (any(name == "s_aux" for name, _ in spec.arguments), "attention sinks"),
        (getattr(model.config, "clip_qkv", None) is not None, "clipped queries and keys"),
        (not hasattr(rotary_module(model), "inv_freq"), "several sets of rotary frequencies"),
        (spec.by_axis, "positions of several axes"),
    ]
    reasons = [reason for present, reason in missing if present]
    if reasons:
        raise UnsupportedModelError(
            f"method {what} is not made for attention with {' and '.join(reasons)}: use method rap"
        )


def _layers(
    source: LayerSource, statistics: Statistics, spared: frozenset[int]
) -> list[DenseLayer]:
    model: Any = source.model
    dense, spec = dense_layers(model, source), attention_spec(model.config)
    names, reader = spec.projection_names(), _Reader(source, spec)
    factor, layers = float(rotary_module(model).attention_scaling), []  # type: ignore[arg-type]
    for layer, frequencies in zip(attention_layers(model), dense.frequencies, strict=True):
        if layer.shape is None or layer.index in spared:
            continue
        assert frequencies is not None
        statistic = statistics.layers[layer.index] or {}
        read = partial(reader.linears, layer)
        sizes = (layer.index, layer.shape, names)
        layers.append(DenseLayer(*sizes, read, statistic, frequencies, factor))
    return layers


class _Reader:
    """Hands out the linears of a layer's attention; those of the layer asked for last are kept."""

    def __init__(self, source: LayerSource, spec: AttentionSpec):
        self.source, self.spec = source, spec
        self.kept: tuple[int, dict[str, Any]] | None = None

    def linears(self, layer: AttentionLayer) -> dict[str, Any]:
        if self.kept is None or self.kept[0] != layer.index:
            live = replace(layer, module=self.source.attention(layer.index))
            self.kept = layer.index, projections(live, self.spec)
        return self.kept[1]
