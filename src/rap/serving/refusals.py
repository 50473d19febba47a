"""Which pruned families vLLM does not serve, and why; read from a checkpoint's config."""

import torch
from transformers import PreTrainedConfig

from ..model.errors import UnsupportedModelError
from ..model.layers import base_model_type
from .families import support
from .layout import cache_layouts

BESIDE = (
    "vLLM's transformers backend does not read top_k_experts, and uses SiLU for all experts but "
    "gpt-oss's"
)


def check_precision(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError for a data type in which the family's activations overflow."""
    family = base_model_type(config)
    if dtype == torch.float16 and support(family).overflows:
        raise UnsupportedModelError(
            f"{family} is numerically unstable in float16: use --dtype bfloat16 or float32"
        )


def check_served(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if vLLM does not serve a pruned checkpoint's family or setting.

    Raises CheckpointError for a wrong `rap` section.
    """
    family = base_model_type(config)
    reason = support(family).unserved
    if reason:
        raise UnsupportedModelError(f"vLLM does not serve pruned {family}: {reason}")
    if getattr(config, "enable_moe_block", False):
        raise UnsupportedModelError(f"vLLM does not serve pruned {family} with experts: {BESIDE}")
    cache_layouts(config)
