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
    attention_layers,
    attention_spec,
    base_model_type,
    layer_frequencies,
    projections,
    rotary_factor,
    rotary_module,
)
from ..model.rope import AttentionShape
from ..planning.budgets import nearest_width
from ..planning.plan import Plan
from ..planning.scores import Named
from ..planning.subspace import WeightFactors
from ..runtime.sources import LayerSource
from .base import Method, Ships
from .dense import ReadLayers


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """One layer as such a method sees it: its sizes, and the linears by projection.

    Rows of q and k are in canonical order, unless the layer is `normed`: then as its norms take
    them. `read` gives the weights of its linears. `statistics`
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
    normed: bool = False

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
        if projection not in "qk" or self.normed:
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


def every_channel(layer: DenseLayer) -> dict[str, Tensor]:
    """The buffers of a layer whose keys are whole; with norms, the order of channels."""
    shape = layer.shape
    buffers = {"frequency_index": every_pair(shape)}
    if layer.normed:
        order = shape.geometry.canonical_order().to(torch.int32)
        buffers["kept_channels"] = order.expand(shape.num_kv_heads, -1).clone()
    return buffers


def latent_layer(layer: DenseLayer, keys: WeightFactors, values: WeightFactors) -> WeightsPlan:
    """A latent of all heads for keys and one for values, by these factors of W_k and of W_v."""
    tensors = every_channel(layer) | layer.dense("q", "o")
    for projection, factors in (("k", keys), ("v", values)):
        tensors |= layer.linear(projection, factors.down)
        tensors |= linear(f"{projection}_up.0", factors.up, layer.bias(projection))
    ranks = {"keys": len(keys.down), "values": len(values.down)}
    return WeightsPlan(LatentEntry(groups=1, fold=False, **ranks), tensors)


def nearest_rank(retain: float, size: int, multiple: int = 1) -> int:
    """The multiple nearest to retain * size, half up, or all of `size`; at least one of it.

    Raises RapError for a multiple that `size` holds none of.
    """
    if multiple > size:
        raise RapError(f"multiple {multiple} is more than the {size} that there are: give less")
    return max(multiple, nearest_width(retain * size, size, multiple))


@dataclass(frozen=True, kw_only=True)
class Replacing(Method):
    """A method that defines, layer by layer, the attention that replaces the dense attention.

    `whole_keys` says that the family's own norm and rotation see whole keys: reconstructed, not yet
    projected, or of heads that stay.
    """

    ships: ClassVar[Ships] = "package"
    whole_keys: ClassVar[bool] = False

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
        self._check_plain(model)

    def plan_from(self, source: LayerSource, statistics: Statistics) -> Plan:
        """Replace every layer with attention."""
        fingerprint, model = self.check(source, statistics), source.model
        self._check_plain(model)
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

    def _check_plain(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedModelError unless attention is what the baselines were written for.

        That is separate q, k, v and o, without gates, sinks, clipped states or norms of values, and
        unless keys are whole, without QK-norm or layers that rotate at frequencies of their own.
        """
        spec, cut = attention_spec(model.config), not self.whole_keys
        normed = any(layer.norm is not None for layer in attention_layers(model))
        several = not hasattr(rotary_module(model), "inv_freq")
        missing = [
            (spec.fused is not None, "one linear for q, k and v"),
            (spec.gate is not None, "a gate on its output"),
            (normed and cut, "norms of queries and keys"),
            (spec.value_norm is not None, "norms of values"),
            (any(name == "s_aux" for name, _ in spec.arguments), "attention sinks"),
            (getattr(model.config, "clip_qkv", None) is not None, "clipped queries and keys"),
            (several and cut, "several sets of rotary frequencies"),
            (spec.by_axis, "positions of several axes"),
        ]
        reasons = [reason for present, reason in missing if present]
        if reasons:
            raise UnsupportedModelError(
                f"method {self.name} is not made for attention with {' and '.join(reasons)}: use "
                "method rap"
            )


def as_stored(layer: DenseLayer, new: LayerPlan) -> LayerPlan:
    """The new attention in the precision of the dense weights."""
    if not isinstance(new, WeightsPlan):
        return new
    dtype = layer.linears["k"].weight.dtype
    weights = {n: x.to(dtype) if x.is_floating_point() else x for n, x in new.weights.items()}
    return replace(new, weights=weights)


def _layers(
    source: LayerSource, statistics: Statistics, spared: frozenset[int]
) -> list[DenseLayer]:
    model: Any = source.model
    names = attention_spec(model.config).projection_names()
    linears, rotary = ReadLayers(source, projections), rotary_module(model)
    return [
        DenseLayer(
            index=layer.index,
            shape=layer.shape,
            names=names,
            read=partial(linears.__getitem__, layer.index),
            statistics=statistics.layers[layer.index] or {},
            frequencies=layer_frequencies(model, layer),
            rotary_factor=rotary_factor(rotary, layer.module),
            normed=layer.norm is not None,
        )
        for layer in attention_layers(model)
        if layer.shape is not None and layer.index not in spared
    ]
