"""Which pruned families vLLM does not serve, and why; read from a checkpoint's config."""

import torch
from transformers import PreTrainedConfig

from ..model.errors import UnsupportedModelError
from ..model.families import INNER, WRAPPERS
from ..model.layers import base_model_type
from .layout import cache_layouts

STATES = (
    "vLLM's transformers backend does not support layers with a state (linear attention, "
    "convolution)"
)
SLOTS = (
    "it scales queries by their place in a forward pass, which has many requests in vLLM. The "
    "transformers backend of vLLM lacks chunked attention, and cannot load its experts, of the "
    "dense model either"
)
BESIDE = (
    "vLLM's transformers backend does not read top_k_experts, and uses SiLU for all experts but "
    "gpt-oss's"
)
IMAGES = "the separate text model of a multimodal model is not implemented"
WITH_STATES = (
    *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
REFUSED = {
    **dict.fromkeys(WITH_STATES, STATES),
    "llama4_text": SLOTS,
    **dict.fromkeys((*WRAPPERS, *INNER), IMAGES),
}


# vLLM refuses float16 of these by model type, which a pruned checkpoint has no longer.
OVERFLOWS = ("gemma2", "gemma3_text", "glm4")


def check_precision(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError for a data type in which the family's activations overflow."""
    family = base_model_type(config)
    if dtype == torch.float16 and family in OVERFLOWS:
        raise UnsupportedModelError(
            f"{family} is numerically unstable in float16: use --dtype bfloat16 or float32"
        )


def is_served(model_type: str) -> bool:
    """Whether vLLM serves pruned checkpoints of a dense family; `REFUSED` states why not."""
    return model_type not in REFUSED


def check_served(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if vLLM does not serve a pruned checkpoint's family or setting.

    Raises CheckpointError for a wrong `rap` section.
    """
    family = base_model_type(config)
    if not is_served(family):
        raise UnsupportedModelError(f"vLLM does not serve pruned {family}: {REFUSED[family]}")
    if getattr(config, "enable_moe_block", False):
        raise UnsupportedModelError(f"vLLM does not serve pruned {family} with experts: {BESIDE}")
    cache_layouts(config)
