"""Why a layer's keys or values may only be cut as they are, and not mixed with each other."""

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
