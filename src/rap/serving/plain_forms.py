"""Families with a plain form: a config of a transformers class with another head size.

A family has one if its own config states the head size, the KV heads and a list of frequencies, and
engines read these. Some are written as another family with the same computation.
"""

from collections.abc import Mapping
from typing import Any

from ..model.errors import UnsupportedModelError
from ..model.families import FAMILIES
from ..model.layers import base_model_type
from .families import SUPPORT, support

# Families that llama.cpp and MLX read with a list of frequencies.
WIDELY_READ = tuple(
    family for family, row in SUPPORT.items() if row.as_llama and row.written_as is None
)


def plain_form(model_type: str) -> str | None:
    """The family that plain checkpoints of a family are written as, None if it has no such form."""
    if why_not_plain(model_type):
        return None
    other = support(model_type).written_as
    return model_type if other is None else other.name


def plain_family(config: Any) -> str:
    """The family that a config with a plain form is written as; a window needs Mistral."""
    family = base_model_type(config)
    other = support(family).written_as
    if other is None:
        return family
    return other.name if config.sliding_window is None else other.windowed


def check_stock(config: Any) -> None:
    """Raise UnsupportedModelError for a config, dense or pruned, that no plain config can express.

    Every text's frequencies must be the same, of a family with a plain form whose heads rotate as a
    whole; Qwen2 may have no sliding window, OLMo no clamp.
    """
    family = base_model_type(config)
    why_not = why_not_plain(family, getattr(config, "rope_parameters", None))
    if why_not:
        raise UnsupportedModelError(
            f"{family} has no plain form ({why_not}); "
            "remove --profile stock, or choose another --target"
        )
    rope = config.rope_parameters
    if is_variable(rope):
        raise UnsupportedModelError(
            f"rope_type {rope['rope_type']!r} has frequencies that depend on the length of the "
            "text, which a plain checkpoint cannot list; use --profile per-head"
        )
    rotated = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if (rotated or 1.0) != 1.0:
        raise UnsupportedModelError(
            f"only {rotated:g} of every head rotates, which a plain checkpoint cannot express; use "
            "--profile per-head"
        )
    if not plain_family(config):
        raise UnsupportedModelError(
            f"{family.capitalize()} with a sliding window has no plain form"
        )
    if getattr(config, "clip_qkv", None) is not None:
        raise UnsupportedModelError(
            f"{family} with clip_qkv has no plain form: queries are scaled there, and clamped"
        )


def check_widely_read(config: Any, engine: str) -> None:
    """Raise UnsupportedModelError for a plain form that an engine for Llama alone does not read."""
    family = plain_family(config)
    if family not in WIDELY_READ:
        raise UnsupportedModelError(
            f"{engine} reads a list of frequencies of {' and '.join(WIDELY_READ)} alone, not of "
            f"{family}: serve it with vLLM or transformers"
        )


def why_not_plain(model_type: str, rope: Mapping[str, Any] | None = None) -> str:
    """What of a family's attention no plain config expresses, reasons joined by commas.

    "" if a config expresses all of it. `rope` are the rope parameters of one model.
    """
    spec, own = FAMILIES.get(model_type), support(model_type).not_plain
    if spec is None:
        return "it is no family of docs/models.md"
    by_layer_type = any(isinstance(part, dict) for part in (rope or {}).values())
    reasons = {
        "QK-norm divides by the norm of whole dense heads": spec.norm is not None,
        "layers rotate at different bases": by_layer_type,
        own: bool(own),
        "pairs take positions of different axes": spec.by_axis,
        "layers read the keys and values of others": spec.value_norm is not None,
        "a gate multiplies the attention output": spec.gate is not None,
        "queries are scaled by position": spec.query_scale is not None,
        "some layers do not rotate": spec.rotates is not None,
        "channels next to each other are a pair": spec.pairing == "interleaved",
        "q, k and v are one linear, head by head": spec.fused == "heads",
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def is_variable(rope: dict[str, Any]) -> bool:
    """Whether frequencies change with the length of the text, so that no list holds them."""
    kind = rope["rope_type"]
    return kind == "dynamic" or (
        kind == "longrope" and list(rope["short_factor"]) != list(rope["long_factor"])
    )
