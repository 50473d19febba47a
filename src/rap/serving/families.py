"""What engines make of a family: a row of `SUPPORT` for every family that deviates.

A family without a row is served by vLLM, in any data type, and written as itself where its row of
`model.families` has nothing that a plain config cannot express (`plain_forms`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..model.families import INNER, WRAPPERS


@dataclass(frozen=True)
class OtherFamily:
    """The family that plain checkpoints of a family are written as, where it is another one.

    `windowed` is the one with a sliding window ("" if there is none). `dropped` are fields of the
    config that the other family does not have, `added` those that state what the first implies.
    """

    name: str
    windowed: str = ""
    dropped: tuple[str, ...] = ()
    added: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineSupport:
    """How engines run one family.

    `unserved` says why vLLM does not serve its pruned checkpoints ("" if it does), `not_plain` why
    no plain config expresses it, where its row of `model.families` does not show that. `written_as`
    is None for a family whose plain checkpoints are of the family itself. `as_llama`: llama.cpp and
    mlx-lm run it as a Llama, which reads a list of frequencies. `overflows`: its activations do in
    float16, which vLLM refuses by the dense model type. `harmony`: vLLM serves its chats in the
    format of gpt-oss, also chosen by that.
    """

    unserved: str = ""
    not_plain: str = ""
    written_as: OtherFamily | None = None
    as_llama: bool = False
    overflows: bool = False
    harmony: bool = False


_STATES = EngineSupport(
    unserved="vLLM's transformers backend does not support layers with a state (linear attention, "
    "convolution)",
    not_plain="some layers have a state",
)
_SLOTS = EngineSupport(
    unserved="it scales queries by their place in a forward pass, which has many requests in vLLM. "
    "The transformers backend of vLLM lacks chunked attention, and cannot load its experts, of the "
    "dense model either"
)
_IMAGES = EngineSupport(unserved="the separate text model of a multimodal model is not implemented")
_HEAD_SIZE = EngineSupport(not_plain="engines derive its head size from the hidden size")
_OVERFLOWS = EngineSupport(overflows=True)
# vLLM derives the head size of Qwen2 from its hidden size, and reads longrope of Phi-3 otherwise.
_QWEN2 = OtherFamily(
    "llama",
    dropped=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    added={"attention_bias": True},
)
_PHI3 = OtherFamily(
    "llama",
    windowed="mistral",
    dropped=("original_max_position_embeddings", "embd_pdrop", "resid_pdrop", "layer_types"),
)

SUPPORT: dict[str, EngineSupport] = {
    "aria_text": EngineSupport(not_plain="it is the text model of a multimodal one"),
    "falcon_h1": _STATES,
    "gemma2": _OVERFLOWS,
    "gemma3_text": _OVERFLOWS,
    "glm4": _OVERFLOWS,
    "gpt_oss": EngineSupport(
        not_plain="engines rotate it by yarn, whatever rope its config states", harmony=True
    ),
    "granitemoe": _HEAD_SIZE,
    "granitemoehybrid": _STATES,
    "granitemoeshared": _HEAD_SIZE,
    "lfm2": _STATES,
    "lfm2_moe": _STATES,
    "llama": EngineSupport(as_llama=True),
    "llama4_text": _SLOTS,
    "mistral": EngineSupport(as_llama=True),
    "nemotron": EngineSupport(not_plain="a part of every head does not rotate"),
    "olmo_hybrid": _STATES,
    "phi3": EngineSupport(written_as=_PHI3),
    "phimoe": _HEAD_SIZE,
    "qwen2": EngineSupport(as_llama=True, written_as=_QWEN2),
    "qwen2_moe": _HEAD_SIZE,
    "qwen3_5_moe_text": _STATES,
    "qwen3_5_text": _STATES,
    "qwen3_next": _STATES,
    **dict.fromkeys((*WRAPPERS, *INNER), _IMAGES),
}
_DEFAULT = EngineSupport()


def support(model_type: str) -> EngineSupport:
    """The row of a dense family, or the defaults."""
    return SUPPORT.get(model_type, _DEFAULT)
