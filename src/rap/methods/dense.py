"""Access of a method to the dense model itself, in addition to statistics.

And why the keys or values of a layer may only be selected, not mixed with each other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.statistics import Statistics
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    layer_frequencies,
    logit_scales,
    norm_weights,
    projections,
    text_config,
    trained_length,
)
from ..model.norms import mapped_limit
from ..model.rope import AttentionShape
from ..model.specs import AttentionSpec
from ..planning.kv_sharing import joined
from ..planning.norms import row_sizes
from ..planning.scores import Named
from ..runtime.sources import LayerSource, LoadedLayers

UNKNOWN_CONTEXT = 8192


@dataclass(frozen=True, eq=False)
class PrunableLayer:
    """A layer with separate keys and values, for a method that prunes them.

    The query heads of layers that read them are part of it (calibration.kv_sharing).
    `frequencies` are float64 [P], a layer's own: local and global layers may rotate differently.
    `logit_scales` are what q.k counts in logits, of pairs and of channels that never rotate.
    `normalised` says that something divides keys by their size.
    `mixes_keys` and `mixes_values` are false where single channels are worked on
    (`key_mixing_limit`), `maps_keys` and `maps_values` true where maps of every head could mix them
    nevertheless. `merge_limit` says why KV heads cannot be merged ("": they can), `mapped_limit`
    what then limits merging (rap.model.factored). `merge` of them become one cached head.
    """

    index: int
    shape: AttentionShape
    read: Callable[[], Named]
    frequencies: Tensor
    mixes_keys: bool = True
    mixes_values: bool = True
    maps_keys: bool = False
    maps_values: bool = False
    merge_limit: str = ""
    mapped_limit: str = ""
    logit_scales: tuple[float, float] = (1.0, 1.0)
    normalised: bool = False
    merge: int = 1
    statistics: Named = field(default_factory=dict)

    @property
    def weights(self) -> Named:
        """What `DenseLayers.weights` has of the layer, read when it is asked for."""
        return self.read()


@dataclass(frozen=True, eq=False)
class DenseLayers:
    """What a method plans on, per layer (None: nothing to prune, or `spared`).

    `weights` maps the projections q, k, v, o to matrices as in nn.Linear, and where keys are
    normalised `key_sizes` to the size [G, D] of every normalised channel. `every_shape` has all
    layers by themselves.
    """

    layers: Sequence[PrunableLayer | None]
    weights: Sequence[Named | None]
    context: int
    every_shape: Sequence[AttentionShape | None]
    spared: tuple[int, ...] = ()

    @property
    def present(self) -> list[PrunableLayer]:
        """The layers to prune."""
        return [layer for layer in self.layers if layer is not None]

    @property
    def shapes(self) -> list[AttentionShape | None]:
        """The shape of every layer."""
        return [None if layer is None else layer.shape for layer in self.layers]

    @property
    def frequencies(self) -> list[Tensor | None]:
        """The frequencies of every layer."""
        return [None if layer is None else layer.frequencies for layer in self.layers]

    @property
    def merges(self) -> list[int]:
        """KV heads of a cached head of every layer, 1 where its heads stay apart."""
        return [1 if layer is None else layer.merge for layer in self.layers]

    def with_statistics(self, statistics: Statistics) -> "DenseLayers":
        """The same, every layer with its statistics."""
        found = statistics.layers
        layers = [x and replace(x, statistics=found[x.index] or {}) for x in self.layers]
        return replace(self, layers=layers)


class ReadLayers(Sequence[Any]):
    """What `read` finds in every layer of a source (None: no attention); the last one is kept."""

    def __init__(self, source: LayerSource, read: Callable[[AttentionLayer, AttentionSpec], Any]):
        self._source, self._layers, self._reader = source, attention_layers(source.model), read
        self._kept: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        if self._kept is None or self._kept[0] != index:
            self._kept = index, self._read(index)
        return self._kept[1]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def _read(self, index: int) -> Any:
        layer = self._layers[index]
        if layer.shape is None:
            return None
        live = replace(layer, module=self._source.attention(index))
        return self._reader(live, attention_spec(self._source.model.config))


def dense_layers(
    model: PreTrainedModel,
    source: LayerSource | None = None,
    spared: frozenset[int] = frozenset(),
) -> DenseLayers:
    """Shapes, weights and frequencies of a dense model; weights are read when they are asked for.

    With a `source` they are read from it, and those of `model` may be on the meta device. Layers
    that read the keys and values of a spared one must be spared themselves.
    """
    layers = attention_layers(model)
    every_shape = [layer.shape for layer in layers]
    shapes, weights = joined(every_shape, ReadLayers(source or LoadedLayers(model), layer_weights))

    def prunable(layer: AttentionLayer, shape: AttentionShape) -> PrunableLayer:
        about = (layer, layers, model.config)
        return PrunableLayer(
            index=layer.index,
            shape=shape,
            read=partial(weights.__getitem__, layer.index),
            frequencies=layer_frequencies(model, layer),
            mixes_keys=not key_mixing_limit(layer, model.config),
            mixes_values=not value_mixing_limit(model.config),
            maps_keys=maps_keys(*about),
            maps_values=maps_values(*about),
            merge_limit=merge_limit(*about),
            mapped_limit=merge_limit(*about, mapped=True),
            logit_scales=logit_scales(model, layer),
            normalised=layer.norm is not None,
        )

    return DenseLayers(
        layers=[
            None if shape is None or layer.index in spared else prunable(layer, shape)
            for layer, shape in zip(layers, shapes, strict=True)
        ],
        weights=weights,
        context=trained_length(model.config) or UNKNOWN_CONTEXT,
        every_shape=every_shape,
        spared=tuple(sorted(spared)),
    )


def layer_weights(layer: AttentionLayer, spec: AttentionSpec) -> dict[str, Tensor]:
    """Weights of one layer's attention, as `DenseLayers` has them."""
    assert layer.shape is not None
    weights = {projection: linear.weight for projection, linear in projections(layer, spec).items()}
    if layer.norm is not None and layer.shape.source is None:
        weight = norm_weights(layer)[1].to(weights["k"].device)
        weights["key_sizes"] = row_sizes(weights["k"], layer.shape, layer.norm, weight)
    return weights


_CLIPPED = "clip_qkv clamps single channels"
_BY_AXIS = "pairs of a head take positions of different axes"


def key_mixing_limit(layer: AttentionLayer, config: Any, *, mapped: bool = False) -> str:
    """What works on single channels or pairs of keys before or in their rotation, or "".

    With `mapped` maps may stand behind a norm (rap.model.factored), which then limits nothing.
    """
    if layer.norm is not None:
        limit = mapped_limit(layer.norm) if mapped else "QK-norm weighs single channels"
        if limit:
            return limit
    if attention_spec(config).by_axis:
        return _BY_AXIS
    return _CLIPPED if _clips(config) else ""


def value_mixing_limit(config: Any, *, mapped: bool = False) -> str:
    """What works on single channels of values or of attention's output, or "".

    With `mapped` a map may stand before a gate.
    """
    if attention_spec(config).gate is not None and not mapped:
        return "a gate multiplies single channels"
    return _CLIPPED if _clips(config) else ""


def _clips(config: Any) -> bool:
    return getattr(text_config(config), "clip_qkv", None) is not None


def merge_limit(
    layer: AttentionLayer,
    layers: Sequence[AttentionLayer],
    config: Any,
    *,
    mapped: bool = False,
) -> str:
    """Why the KV heads of a layer cannot be merged, or ""; `mapped` as of keys and values."""
    if layer.shape is None:
        return "no attention"
    if layer.shape.num_kv_heads == 1:
        return "one KV head leaves nothing to merge"
    if _shares(layers, config):
        return "layers of this family share keys and values, or normalise values per head"
    return key_mixing_limit(layer, config, mapped=mapped) or value_mixing_limit(
        config, mapped=mapped
    )


def maps_keys(layer: AttentionLayer, layers: Sequence[AttentionLayer], config: Any) -> bool:
    """Whether keys that may not be mixed in their projection may be behind it, by maps."""
    if layer.shape is None or _shares(layers, config):
        return False
    return key_mixing_limit(layer, config) != "" == key_mixing_limit(layer, config, mapped=True)


def maps_values(layer: AttentionLayer, layers: Sequence[AttentionLayer], config: Any) -> bool:
    """Whether values that may not be mixed in W_o may be before it, by maps.

    Not of a layer that keeps its normalised keys as they are: its norm would need to be cut.
    """
    if layer.norm is not None and not maps_keys(layer, layers, config):
        return False
    return value_mixing_limit(config) != "" == value_mixing_limit(config, mapped=True)


def _shares(layers: Sequence[AttentionLayer], config: Any) -> bool:
    reads = any(other.shape is not None and other.shape.source is not None for other in layers)
    return reads or attention_spec(config).value_norm is not None
