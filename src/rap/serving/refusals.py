"""Which pruned families vLLM does not serve, and why; read from a checkpoint's config."""

from transformers import PreTrainedConfig

from ..model.errors import UnsupportedModelError
from ..model.families import INNER, WRAPPERS
from ..model.layers import base_model_type
from .layout import cache_layouts

STATES = (
    "vLLM runs no layers with a state of their own (linear attention, convolution) through its "
    "transformers backend"
)
SLOTS = (
    "its queries are scaled by their place in a forward pass, which in vLLM holds many requests, "
    "and vLLM's transformers backend knows no chunked attention and fails to load experts that "
    "are stored like these, of a dense model too"
)
BESIDE = (
    "vLLM's transformers backend looks for their number per token under other names than "
    "top_k_experts, and gives all experts but gpt-oss's SiLU"
)
IMAGES = "the text model of a multimodal one is not served by itself yet"
WITH_STATES = (
    *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
REFUSED = {
    **dict.fromkeys(WITH_STATES, STATES),
    "llama4_text": SLOTS,
    **dict.fromkeys((*WRAPPERS, *INNER), IMAGES),
}


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
