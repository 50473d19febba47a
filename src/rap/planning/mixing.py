"""Why a layer's keys or values may only be cut as they are, and not mixed with each other."""

from collections.abc import Sequence
from typing import Any

from ..model.layers import AttentionLayer, attention_spec, text_config

_CLIPPED = "clip_qkv clamps single channels"
_BY_AXIS = "pairs of a head take positions of different axes"


def key_limit(layer: AttentionLayer, config: Any) -> str:
    """What works on single channels or pairs of keys before or in their rotation, or ""."""
    if layer.norm is not None:
        return "QK-norm weighs single channels"
    if attention_spec(config).by_axis:
        return _BY_AXIS
    return _CLIPPED if _clips(config) else ""


def value_limit(config: Any) -> str:
    """What works on single channels of values or of attention's output, or ""."""
    if attention_spec(config).gate is not None:
        return "a gate multiplies single channels"
    return _CLIPPED if _clips(config) else ""


def _clips(config: Any) -> bool:
    return getattr(text_config(config), "clip_qkv", None) is not None


def merge_limit(layer: AttentionLayer, layers: Sequence[AttentionLayer], config: Any) -> str:
    """Why the KV heads of a layer cannot be merged, or ""."""
    if layer.shape is None:
        return "no attention"
    if layer.shape.num_kv_heads == 1:
        return "one KV head leaves nothing to merge"
    shared = any(other.shape is not None and other.shape.source is not None for other in layers)
    if shared or attention_spec(config).value_norm is not None:
        return "layers of this family share keys and values, or normalise values per head"
    return key_limit(layer, config) or value_limit(config)
