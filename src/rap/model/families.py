"""The table of Hugging Face families: one row per family, and errors for other models.

Most of what differs between families is read off the live attention module (biases, scale, head
counts, clipping, dropout, partial rotation). A row states what cannot be read.

Shapes: B batch, T tokens, H query heads, W key width.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .specs import AttentionSpec, Kwargs, QKNorm


def rotates_where_listed(attention: nn.Module) -> bool:
    """the layers that `no_rope_layers` marks"""
    return bool(attention.use_rope)


def rotates_under_a_window(attention: nn.Module) -> bool:
    """the layers with a sliding window"""
    return attention.sliding_window is not None


def rotates_under_a_window_or_forced(attention: nn.Module) -> bool:
    """the layers with a sliding window, and the dense ones that a config forces to"""
    return attention.sliding_window is not None or bool(attention.force_rope)


def rotates_unless_global(attention: nn.Module) -> bool:
    """the layers with a sliding window, or all if the model has none"""
    return attention.sliding_window is None or bool(attention.is_sliding)


def scale_by_position(attention: Any, q_BHTW: Tensor, cached: int, kwargs: Kwargs) -> Tensor:
    """1 + beta log(1 + floor(position / trained length)) on every query"""
    rope = attention.config.rope_parameters
    position = kwargs["position_ids"] / rope["original_max_position_embeddings"]
    scale_BT = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + torch.floor(position))
    return q_BHTW * scale_BT[:, None, :, None].to(q_BHTW.dtype)


def scale_without_rotation(attention: Any, q_BHTW: Tensor, cached: int, kwargs: Kwargs) -> Tensor:
    """1 + s log(1 + floor((position + 1) / floor)) on queries of layers that do not rotate"""
    if attention.use_rope or not attention.attn_temperature_tuning:
        return q_BHTW
    position_T = torch.arange(q_BHTW.shape[2], device=q_BHTW.device) + cached + 1.0
    steps_T = torch.log1p(torch.floor(position_T / attention.floor_scale))
    return (q_BHTW * (steps_T * attention.attn_scale + 1.0)[:, None]).to(q_BHTW.dtype)


_DENSE = ("q_proj", "k_proj", "v_proj", "dense")
_FUSED_DENSE = ("query_key_value", "query_key_value", "query_key_value", "dense")
_LAYER_NORM = QKNorm(("q_layernorm", "k_layernorm"), centred=True)
_ZERO_CENTRED = QKNorm(weight_offset=1.0)
_HEADS_FIRST = QKNorm(layout="BHTD")
_ALL_HEADS = QKNorm(over="all")
_SHARING: dict[str, Any] = {"norm": QKNorm(), "value_norm": "v_norm"}
_LFM2 = QKNorm(("q_layernorm", "k_layernorm"))
_OUT = ("q_proj", "k_proj", "v_proj", "out_proj")
_HUNYUAN = QKNorm(("query_layernorm", "key_layernorm"), after_rotation=True)

FAMILIES: dict[str, AttentionSpec] = {
    spec.model_type: spec
    for spec in (
        AttentionSpec("llama"),
        AttentionSpec("aria_text"),
        AttentionSpec("cwm", sliding_window_from="module"),
        AttentionSpec("jais2"),
        AttentionSpec("mistral", sliding_window_from="config"),
        AttentionSpec("ministral", sliding_window_from="module"),
        AttentionSpec("ministral3", sliding_window_from="config", query_scale=scale_by_position),
        AttentionSpec("mixtral", sliding_window_from="config"),
        AttentionSpec("phimoe"),
        AttentionSpec("qwen2", sliding_window_from="module"),
        AttentionSpec("qwen2_moe", sliding_window_from="module"),
        AttentionSpec("qwen3", norm=QKNorm(), sliding_window_from="module"),
        AttentionSpec("qwen3_moe", norm=QKNorm(), sliding_window_from="module"),
        AttentionSpec("qwen3_next", norm=_ZERO_CENTRED, gate="query"),
        AttentionSpec("qwen3_5_text", by_axis=True, norm=_ZERO_CENTRED, gate="query"),
        AttentionSpec("qwen3_5_moe_text", by_axis=True, norm=_ZERO_CENTRED, gate="query"),
        AttentionSpec("qwen2_vl_text", by_axis=True, sliding_window_from="module"),
        AttentionSpec("qwen2_5_vl_text", by_axis=True, sliding_window_from="module"),
        AttentionSpec("qwen3_vl_text", by_axis=True, norm=QKNorm()),
        AttentionSpec("qwen3_vl_moe_text", by_axis=True, norm=QKNorm()),
        AttentionSpec("dots1", norm=QKNorm(), sliding_window_from="module"),
        AttentionSpec("mellum", norm=QKNorm(), sliding_window_from="module"),
        AttentionSpec("gemma", needs_bos=True),
        AttentionSpec(
            "gemma2",
            needs_bos=True,
            sliding_window_from="module",
            arguments=(("softcap", "attn_logit_softcapping"),),
        ),
        AttentionSpec(
            "gemma3_text",
            needs_bos=True,
            norm=replace(_ZERO_CENTRED, layout="BHTD"),
            sliding_window_from="module",
        ),
        AttentionSpec("gemma3n_text", needs_bos=True, sliding_window_from="module", **_SHARING),
        AttentionSpec("gemma4_text", needs_bos=True, sliding_window_from="module", **_SHARING),
        AttentionSpec(
            "vaultgemma",
            needs_bos=True,
            sliding_window_from="module",
            arguments=(("softcap", "attn_logit_softcapping"),),
        ),
        AttentionSpec(
            "gpt_oss", table="half", sliding_window_from="module", arguments=(("s_aux", "sinks"),)
        ),
        AttentionSpec("glm", pairing="interleaved"),
        AttentionSpec("glm4", pairing="interleaved"),
        AttentionSpec("glm4_moe", norm=QKNorm()),
        AttentionSpec(
            "llama4_text",
            pairing="interleaved",
            table="complex",
            rope_in_float32=True,
            rotates=rotates_where_listed,
            norm=QKNorm(("qk_norm", "qk_norm"), after_rotation=True),
            query_scale=scale_without_rotation,
        ),
        AttentionSpec("phi", projections=_DENSE, norm=replace(_LAYER_NORM, layout="BHTD")),
        AttentionSpec(
            "phi3",
            fused="blocks",
            projections=("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
            sliding_window_from="config",
        ),
        AttentionSpec("olmo"),
        AttentionSpec("olmo2", norm=_ALL_HEADS),
        AttentionSpec("olmo3", norm=_ALL_HEADS, sliding_window_from="module"),
        AttentionSpec("flex_olmo", norm=_ALL_HEADS),
        AttentionSpec("olmo_hybrid", norm=_ALL_HEADS),
        AttentionSpec("olmoe", norm=_ALL_HEADS, sliding_window_from="config"),
        AttentionSpec("smollm3", rotates=rotates_where_listed, sliding_window_from="module"),
        AttentionSpec(
            "cohere",
            pairing="interleaved",
            table="interleaved",
            rope_in_float32=True,
            norm=QKNorm(centred=True),
        ),
        AttentionSpec(
            "cohere2",
            pairing="interleaved",
            table="interleaved",
            rope_in_float32=True,
            rotates=rotates_under_a_window,
            sliding_window_from="module",
        ),
        AttentionSpec(
            "cohere2_moe",
            pairing="interleaved",
            table="interleaved",
            rope_in_float32=True,
            rotates=rotates_under_a_window_or_forced,
            sliding_window_from="module",
        ),
        AttentionSpec("granite"),
        AttentionSpec("granitemoe"),
        AttentionSpec("granitemoehybrid"),
        AttentionSpec("granitemoeshared"),
        AttentionSpec("hyperclovax"),
        AttentionSpec("falcon_h1"),
        AttentionSpec("arcee"),
        AttentionSpec("starcoder2", sliding_window_from="config"),
        AttentionSpec(
            "stablelm", norm=replace(_LAYER_NORM, layout="BHTD", one_module_per_head=True)
        ),
        AttentionSpec(
            "gpt_neox",
            attention="attention",
            fused="heads",
            projections=_FUSED_DENSE,
        ),
        AttentionSpec("persimmon", fused="heads", projections=_FUSED_DENSE, norm=_LAYER_NORM),
        AttentionSpec("seed_oss"),
        AttentionSpec("solar_open"),
        AttentionSpec("ernie4_5", pairing="interleaved", rope_in_float32=True),
        AttentionSpec("ernie4_5_moe", pairing="interleaved", rope_in_float32=True),
        AttentionSpec("nemotron"),
        AttentionSpec("helium", pairing="interleaved"),
        AttentionSpec(
            "exaone4",
            norm=_HEADS_FIRST,
            rotates=rotates_unless_global,
            sliding_window_from="module",
        ),
        AttentionSpec(
            "exaone_moe",
            norm=_HEADS_FIRST,
            rotates=rotates_unless_global,
            sliding_window_from="module",
        ),
        AttentionSpec("hunyuan_v1_dense", norm=_HUNYUAN),
        AttentionSpec("hunyuan_v1_moe", norm=_HUNYUAN),
        AttentionSpec("minimax_m2", norm=_ALL_HEADS),
        AttentionSpec("apertus", norm=_HEADS_FIRST),
        AttentionSpec("lfm2", norm=_LFM2, projections=_OUT),
        AttentionSpec("lfm2_moe", norm=_LFM2, projections=_OUT),
        AttentionSpec(
            "afmoe",
            norm=QKNorm(),
            gate="gate_proj",
            rotates=rotates_under_a_window,
            sliding_window_from="module",
        ),
        AttentionSpec("nanochat", clockwise=True, norm=QKNorm(after_rotation=True)),
        AttentionSpec("hy_v3", norm=_HEADS_FIRST),
    )
}

# Text models that transformers has inside multimodal ones alone.
INNER = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
# Multimodal models whose text model, one of the families, is compressed; all else passes through.
WRAPPERS = (
    *("gemma3", "gemma3n", "gemma4", "internvl", "llama4", "llava", "llava_next"),
    *("llava_onevision", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
)
