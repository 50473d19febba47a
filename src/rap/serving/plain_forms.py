"""Families with a plain form: a config of a transformers class with another head size.

A family has one if its own config states the head size, the KV heads and a list of frequencies, and
engines read these. Some are written as another family with the same computation.
"""

from typing import Any

from ..model.errors import UnsupportedModelError
from ..model.families import FAMILIES, INNER
from ..model.layers import base_model_type
from .refusals import WITH_STATES

# Families that llama.cpp and MLX read with a list of frequencies.
WIDELY_READ = ("llama", "mistral")
_AS_THEMSELVES = (
    *("llama", "mistral", "arcee", "cwm", "gemma", "gemma2", "granite", "hyperclovax", "jais2"),
    *("ministral", "mixtral", "olmo", "seed_oss", "solar_open", "starcoder2", "vaultgemma"),
)
# Engines derive the head size of Qwen2 from its hidden size, and read longrope of Phi-3 otherwise.
STOCK_FAMILIES = {name: name for name in _AS_THEMSELVES} | {"qwen2": "llama", "phi3": "llama"}

_HEAD_SIZE = "engines derive its head size from the hidden size"
_REASONS = {
    **dict.fromkeys(("granitemoe", "granitemoeshared", "phimoe", "qwen2_moe"), _HEAD_SIZE),
    "gpt_oss": "engines rotate it by yarn, whatever rope its config states",
    "aria_text": "it is the text model of a multimodal one",
    "nemotron": "a part of every head does not rotate",
}


def plain_family(config: Any) -> str:
    """The family that a config of STOCK_FAMILIES is written as; a window needs Mistral."""
    family = base_model_type(config)
    if family == "phi3" and config.sliding_window is not None:
        return "mistral"
    return STOCK_FAMILIES[family]


def check_stock(config: Any) -> None:
    """Raise UnsupportedModelError for a config, dense or pruned, that no plain config can express.

    Every text's frequencies must be the same, of a family in STOCK_FAMILIES whose heads rotate as a
    whole; Qwen2 may have no sliding window, OLMo no clamp.
    """
    family = base_model_type(config)
    if family not in STOCK_FAMILIES:
        raise UnsupportedModelError(
            f"{family} has no plain form ({why_not_plain(config)}); "
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
    if family == "qwen2" and getattr(config, "use_sliding_window", False):
        raise UnsupportedModelError("Qwen2 with a sliding window has no plain form")
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


def why_not_plain(config: Any) -> str:
    """What of a family's attention no plain config expresses, reasons joined by commas."""
    family = base_model_type(config)
    if family in _REASONS:
        return _REASONS[family]
    spec, rope = FAMILIES.get(family), getattr(config, "rope_parameters", None) or {}
    if spec is None:
        return "it is no family of docs/models.md"
    reasons = {
        "QK-norm divides by the norm of whole dense heads": spec.norm is not None,
        "layers rotate at different bases": any(isinstance(part, dict) for part in rope.values()),
        "some layers have a state": family in WITH_STATES,
        "pairs take positions of different axes": family in INNER or spec.by_axis,
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
