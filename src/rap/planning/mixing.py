"""Why a layer's keys or values may only be selected, not mixed with each other."""

from collections.abc import Sequence
from typing import Any

from ..model.layers import AttentionLayer, attention_spec, text_config
from ..model.norms import mapped_limit

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
