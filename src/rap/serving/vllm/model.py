"""Pruned Llama, Mistral, Qwen2 and Qwen3 as native vLLM models, through the hooks of its Llama.

Only attention differs. Tensor and pipeline parallelism, compilation, caching, quantization and
loading are vLLM's.
"""

from typing import Any

from torch import nn
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.utils import extract_layer_index

from ...model.errors import UnsupportedModelError
from ...model.layers import base_model_type
from ..layout import cache_layouts
from ..paths import serving_path
from .attention import EngineAttention, sliding_window
from .norm import RapNormAttention


def attention(*, config: Any, prefix: str, bias: bool, bias_o_proj: bool, **rest: Any) -> nn.Module:
    """Pruned attention for a layer with widths in the config, vLLM's own for one left dense."""
    family = base_model_type(config)
    if family == "qwen2":
        bias, bias_o_proj = True, False
    layout = cache_layouts(config)[extract_layer_index(prefix)]
    settings = {"config": config, "prefix": prefix, "bias": bias, "bias_o_proj": bias_o_proj}
    if layout is None:
        dense = _dense_qwen3 if family == "qwen3" else LlamaAttention
        return dense(**settings, **rest)
    pruned = RapNormAttention if family == "qwen3" else EngineAttention
    return pruned(layout, **settings, **rest)


def _dense_qwen3(
    *,
    config: Any,
    prefix: str,
    bias: bool,
    bias_o_proj: bool,
    max_position_embeddings: int,
    **rest: Any,
) -> nn.Module:
    if bias_o_proj:
        raise UnsupportedModelError("Qwen3 with biases is not taken by vLLM's own classes")
    return Qwen3Attention(
        rope_parameters=config.rope_parameters,
        max_position=max_position_embeddings,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=bias,
        per_layer_sliding_window=sliding_window(config, extract_layer_index(prefix)),
        prefix=prefix,
        **rest,
    )


class RapDecoderLayer(LlamaDecoderLayer):
    """vLLM's Llama decoder layer with the attention its place in the config asks for."""

    def __init__(self, vllm_config: Any, prefix: str = "", config: Any = None):
        super().__init__(vllm_config, prefix, config, attn_layer_type=attention)


class RapLlamaForCausalLM(LlamaForCausalLM):
    """Pruned Llama."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        # Before anything is allocated: a config that cannot be served is refused in one sentence.
        serving_path(vllm_config.model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=RapDecoderLayer)


class RapMistralForCausalLM(RapLlamaForCausalLM):
    """Pruned Mistral: Llama with, in old checkpoints, a sliding window for all layers."""


class RapQwen2ForCausalLM(RapLlamaForCausalLM):
    """Pruned Qwen2: Llama with biases in the q, k and v projections."""


class RapQwen3ForCausalLM(RapLlamaForCausalLM):
    """Pruned Qwen3: Llama with queries and keys normalised per head."""
