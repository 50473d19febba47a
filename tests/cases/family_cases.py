"""One tiny configuration per family, and the dense model a plan describes, masked by hooks.

What a case says of a family (which channels pair up, which layers rotate, how projections are laid
out) is written down here from the family's own code, not read from the package, so that a mistake
in the package's table cannot appear on both sides of a comparison.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cases.models import tiny_model
from cases.plans import plan_of
from cases.tower import CHANNELS, stand_in_for_timm
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan

HEAD_DIM = 16
WINDOW = {"sliding_window": 4}


@dataclass(frozen=True)
class Case:
    """A family with the features it has switched on.

    `rotated` channels at the front of a head rotate, except in the layers `still`. `absent` layers
    have no attention. `in_float32` says that the family computes in float32 inside. `fused` says
    how a single linear lists them: `q, k, v` or `q, k, v of every head`. `norms` name the modules
    whose output, shaped `normed`, is what attention sees (rotated or not). `around` are the fields
    of a multimodal config whose text model has all the others. `wide` are layers with heads of
    another size, which rotate as a whole. `sources` are layers that read the keys and values of
    another, by that one. `value_norm` names a module whose output, [B, T, G, D], are the values.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    rotated: int = HEAD_DIM
    still: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    in_float32: bool = False
    attention: str = "self_attn"
    fused: str = ""
    norms: tuple[str, ...] = ()
    normed: str = "BTHD"
    around: dict[str, Any] = field(default_factory=dict)
    wide: dict[int, int] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    value_norm: str = ""

    def sizes(self, index: int) -> tuple[int, int]:
        """Channels of a head of a layer, and those of them that rotate."""
        size = self.wide.get(index, HEAD_DIM)
        rotated = size if index in self.wide else self.rotated
        return size, 0 if index in self.still else rotated

    @property
    def model_type(self) -> str:
        """The family: a name may say more after a colon."""
        return self.name.partition(":")[0]

    def model(self, **overrides: Any) -> Any:
        """The dense model, in float64 unless overridden: six query heads on two KV heads."""
        shape = {"heads": 6, "kv_heads": 2, "hidden": 36, "head_dim": HEAD_DIM, "layers": 3}
        fields = shape | {"dtype": torch.float64} | self.fields | overrides
        if self.around:
            fields["around"] = self.around
        if self.model_type == "gemma3n":
            stand_in_for_timm()
        model = tiny_model(self.model_type, **fields)
        # The grouped products that experts use by default take no float64.
        model.config._experts_implementation = "eager"
        return model


def partial(fraction: float, **fields: Any) -> dict[str, Any]:
    """Fields of a configuration that rotates a fraction of each head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": fraction}
    return {"rope_parameters": rope, "partial_rotary_factor": fraction, **fields}


def _inner(model_type: str) -> dict[str, Any]:
    return {"text_config": {"model_type": model_type}}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_QK = ("q_norm", "k_norm")
_LINEAR = partial(0.25, layers=4, linear_num_value_heads=2, linear_num_key_heads=2) | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_LOCAL = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    }
}
_GEMMA3 = WINDOW | _TYPES | _LOCAL | {"query_pre_attn_scalar": 24}
_SHARING = {
    "layers": 5,
    "layer_types": [
        *("sliding_attention", "sliding_attention", "full_attention"),
        *("sliding_attention", "full_attention"),
    ],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
_GEMMA3N = (
    WINDOW
    | _SHARING
    | {"rope_parameters": _LOCAL["rope_parameters"], "intermediate_size": [72] * 5}
    | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0]}
    | {"laurel_rank": 8, "altup_num_inputs": 2}
)
_GEMMA4_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e5,
            "partial_rotary_factor": 0.5,
        },
    }
}
_GEMMA4 = WINDOW | _SHARING | _GEMMA4_ROPE | {"global_head_dim": 24, "attention_bias": True}
# Their norms work in float32, of values in another order of channels.
_SHARED: dict[str, Any] = {"norms": _QK, "value_norm": "v_norm", "in_float32": True}
_LLAMA4 = {
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 4,
    "floor_scale": 3,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "use_qk_norm": True,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_GEMMA3N_EARS = {
    "hidden_size": 32,
    "vocab_offset": 128,
    "vocab_size": 4,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "sscp_conv_channel_size": [4, 4],
}
_GEMMA4_EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
_GEMMA4_EARS = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 24,
}
_QWEN_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 36,
    "num_position_embeddings": 16,
}
_QWEN_IDS = {"image_token_id": 127, "video_token_id": 126, "vision_start_token_id": 125} | {
    "vision_end_token_id": 124
}

_MAMBA = {"mamba_d_head": 8, "mamba_expand": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
_TURNS = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
_GRANITE = _MOE | {"attention_multiplier": 0.2, "hidden": 96}
# Four of eight pairs take the time's position, and two each the height's and the width's.
_SECTIONS = {"rope_type": "default", "rope_theta": 1e2, "mrope_section": [4, 2, 2]}
_CLIP_EYES = {"model_type": "clip_vision_model", **_EYES, "patch_size": 8}
_QWEN2_EYES = {"depth": 1, "patch_size": 4, "num_heads": 2}
_QWEN3_EYES = _QWEN_EYES | {"deepstack_visual_indexes": [0]}

CASES = [
    Case("llama", {"attention_bias": True}),
    Case("aria_text", {"moe_num_experts": 4, "moe_topk": 2}),
    Case("cwm", WINDOW | _TYPES | {"bos_token_id": 0}),
    Case("jais2", {"attention_bias": True}),
    Case("phimoe", _MOE | {"attention_bias": True}),
    Case(
        "vaultgemma", WINDOW | _TYPES | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}
    ),
    Case("hyperclovax", {"attention_multiplier": 0.2, "attention_bias": True}),
    Case("granitemoe", _GRANITE),
    Case("granitemoeshared", _GRANITE | {"shared_intermediate_size": 48}),
    Case(
        "granitemoehybrid",
        _GRANITE
        | _MAMBA
        | _TURNS
        | {"position_embedding_type": "rope", "shared_intermediate_size": 48, "mamba_n_heads": 12},
        absent=(0,),
    ),
    Case("falcon_h1", _MAMBA | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "key_multiplier": 0.4}),
    Case(
        "ernie4_5_moe",
        {"use_bias": True, "moe_num_experts": 4, "moe_k": 2} | {"moe_intermediate_size": 24},
        interleaved=True,
        in_float32=True,
    ),
    Case("mistral", WINDOW),
    Case("ministral", WINDOW | _TYPES),
    Case(
        "ministral3",
        WINDOW
        | {
            "rope_parameters": _YARN
            | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    Case("mixtral", WINDOW | _MOE),
    Case("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    Case(
        "qwen2_moe",
        WINDOW
        | {"use_sliding_window": True, "max_window_layers": 1, "num_experts": 4}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    Case("gemma", {"attention_bias": True}),
    Case("gemma2", WINDOW | _TYPES | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24}),
    Case("gpt_oss", WINDOW | _TYPES | _MOE | {"rope_parameters": _YARN | {"truncate": False}}),
    Case("glm", partial(0.5, attention_bias=True), interleaved=True, rotated=8),
    Case("glm4", partial(0.5, attention_bias=True), interleaved=True, rotated=8),
    Case(
        "glm4_moe",
        partial(0.5, attention_bias=True, n_routed_experts=4, moe_intermediate_size=24)
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        rotated=8,
    ),
    Case("phi", partial(0.5, hidden=96), rotated=8),
    Case("olmo", {"clip_qkv": 1.5, "hidden": 96}),
    Case(
        "smollm3",
        WINDOW
        | {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "layer_types": _TYPES["layer_types"],
        },
        still=(1,),
    ),
    Case("cohere", {"attention_bias": True, "hidden": 96}, interleaved=True, in_float32=True),
    Case("cohere2", WINDOW | _TYPES, interleaved=True, still=(1,), in_float32=True),
    Case(
        "cohere2_moe",
        WINDOW
        | _MOE
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_experts": 4},
        interleaved=True,
        still=(2,),
        in_float32=True,
    ),
    Case("arcee", {"attention_bias": True}),
    Case("granite", {"attention_multiplier": 0.2, "hidden": 96}),
    Case("starcoder2", WINDOW | {"hidden": 96}),
    Case("stablelm", partial(0.25, use_qkv_bias=True, hidden=96), rotated=4),
    Case("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    Case(
        "solar_open",
        {"attention_bias": True, "n_routed_experts": 4, "moe_intermediate_size": 24}
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    Case("ernie4_5", {"use_bias": True}, interleaved=True, in_float32=True),
    Case("nemotron", partial(0.5, attention_bias=True), rotated=8),
    Case("phi3", partial(0.75, **WINDOW, hidden=96), rotated=12, fused="q, k, v"),
    Case(
        "gpt_neox",
        partial(0.25, hidden=96, attention_bias=True),
        rotated=4,
        attention="attention",
        fused="q, k, v of every head",
    ),
    Case(
        "persimmon",
        partial(0.5, hidden=96, qk_layernorm=False),
        rotated=8,
        fused="q, k, v of every head",
    ),
    Case(
        "persimmon:norm",
        partial(0.5, hidden=96, qk_layernorm=True),
        rotated=8,
        fused="q, k, v of every head",
        norms=("q_layernorm", "k_layernorm"),
    ),
    Case("qwen3", WINDOW | _TYPES | {"use_sliding_window": True}, norms=_QK),
    Case(
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        norms=_QK,
    ),
    Case(
        "dots1",
        WINDOW
        | _TYPES
        | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1},
        norms=_QK,
    ),
    Case(
        "mellum",
        WINDOW
        | _TYPES
        | _LOCAL
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        norms=_QK,
    ),
    Case("qwen3_next", _LINEAR, rotated=4, absent=(0, 1, 2), norms=_QK),
    Case("qwen3_5_text", _LINEAR, rotated=4, absent=(0, 1, 2), norms=_QK),
    Case("qwen3_5_moe_text", _LINEAR, rotated=4, absent=(0, 1, 2), norms=_QK),
    Case(
        "gemma3_text",
        _GEMMA3,
        norms=_QK,
        normed="BHTD",
    ),
    Case(
        "gemma3n_text",
        _GEMMA3N,
        sources={3: 1, 4: 2},
        **_SHARED,
    ),
    Case(
        "gemma4_text",
        _GEMMA4,
        wide={2: 24, 4: 24},
        sources={3: 1, 4: 2},
        **_SHARED,
    ),
    Case(
        "gemma4_text:tied",
        WINDOW
        | _GEMMA4_ROPE
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0},
        wide={1: 24, 2: 24},
        **_SHARED,
    ),
    Case(
        "llama4_text",
        _LLAMA4,
        interleaved=True,
        still=(1,),
        in_float32=True,
        norms=("qk_norm",),
    ),
    Case(
        "phi:norm",
        partial(0.5, hidden=96, qk_layernorm=True),
        rotated=8,
        norms=("q_layernorm", "k_layernorm"),
        normed="BHTD",
    ),
    Case("olmo2", {"attention_bias": True}, norms=_QK, normed="flat"),
    Case("olmo3", WINDOW | _TYPES, norms=_QK, normed="flat"),
    Case(
        "flex_olmo",
        {"num_experts": 4, "num_experts_per_tok": 2},
        norms=_QK,
        normed="flat",
    ),
    Case(
        "olmo_hybrid",
        _TURNS
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        absent=(0,),
        norms=_QK,
        normed="flat",
    ),
    Case(
        "olmoe",
        {"clip_qkv": 1.0, "num_experts": 4, "num_experts_per_tok": 2, "hidden": 96},
        norms=_QK,
        normed="flat",
    ),
    Case(
        "cohere:norm",
        {"use_qk_norm": True, "hidden": 96},
        interleaved=True,
        in_float32=True,
        norms=_QK,
    ),
    Case(
        "stablelm:norm",
        partial(0.25, hidden=96, qk_layernorm=True),
        rotated=4,
        norms=("q_layernorm", "k_layernorm"),
        normed="BHTD",
    ),
    Case(
        "glm4_moe:norm",
        partial(0.5, n_routed_experts=4, moe_intermediate_size=24, use_qk_norm=True)
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        rotated=8,
        norms=_QK,
    ),
    Case(
        "exaone4",
        WINDOW | _TYPES | {"sliding_window_pattern": 2},
        still=(1,),
        norms=_QK,
        normed="BHTD",
    ),
    Case(
        "exaone_moe",
        WINDOW
        | _TYPES
        | {"sliding_window_pattern": 2, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        still=(1,),
        norms=_QK,
        normed="BHTD",
    ),
    Case(
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2},
        norms=("query_layernorm", "key_layernorm"),
        normed="BHTD",
        in_float32=True,
    ),
    Case(
        "hunyuan_v1_dense",
        {"attention_bias": True},
        norms=("query_layernorm", "key_layernorm"),
        normed="BHTD",
        in_float32=True,
    ),
    Case(
        "minimax_m2",
        partial(0.5, num_local_experts=4, num_experts_per_tok=2),
        rotated=8,
        norms=_QK,
        normed="flat",
    ),
    Case("apertus", norms=_QK, normed="BHTD"),
    Case(
        "lfm2",
        {"layer_types": ["conv", "full_attention", "full_attention"], "hidden": 96},
        absent=(0,),
        norms=("q_layernorm", "k_layernorm"),
    ),
    Case(
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention", "full_attention"], "hidden": 96}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"num_dense_layers": 1},
        absent=(0,),
        norms=("q_layernorm", "k_layernorm"),
    ),
    Case(
        "afmoe",
        WINDOW
        | _TYPES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"num_dense_layers": 1},
        still=(1,),
        norms=_QK,
    ),
    Case("nanochat", {"hidden": 96}, norms=_QK, normed="BHTD", in_float32=True),
    Case(
        "hy_v3",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        norms=_QK,
        normed="BHTD",
    ),
    Case("helium", {"attention_bias": True, "hidden": 96}, interleaved=True),
    Case(
        "gemma3",
        _GEMMA3,
        norms=_QK,
        normed="BHTD",
        around=_inner("gemma3_text")
        | {"vision_config": {"model_type": "siglip_vision_model", **_EYES}}
        | {"mm_tokens_per_image": 4, "image_token_index": 127}
        | {"boi_token_index": 125, "eoi_token_index": 126},
    ),
    Case(
        "gemma3n",
        _GEMMA3N,
        sources={3: 1, 4: 2},
        around=_inner("gemma3n_text")
        | {"vision_config": {"hidden_size": CHANNELS, "vocab_offset": 120, "vocab_size": 8}}
        | {"audio_config": _GEMMA3N_EARS, "audio_token_id": 130}
        | {"image_token_id": 127, "vision_soft_tokens_per_image": 4},
        **_SHARED,
    ),
    Case(
        "gemma4",
        _GEMMA4 | {"pad_token_id": 0, "use_bidirectional_attention": "vision"},
        wide={2: 24, 4: 24},
        sources={3: 1, 4: 2},
        around=_inner("gemma4_text")
        | {"vision_config": _GEMMA4_EYES, "image_token_id": 127, "video_token_id": 126}
        | {"audio_config": _GEMMA4_EARS, "audio_token_id": 125},
        **_SHARED,
    ),
    Case(
        "llava",
        {"attention_bias": True},
        around=_inner("llama") | {"vision_config": _CLIP_EYES, "image_token_index": 127},
    ),
    Case(
        "llava_next",
        WINDOW,
        around=_inner("mistral")
        | {"vision_config": _CLIP_EYES, "image_token_index": 127}
        | {"image_grid_pinpoints": [[16, 16]]},
    ),
    Case(
        "llava_onevision",
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        around=_inner("qwen2")
        | {"vision_config": {"model_type": "siglip_vision_model", **_EYES, "patch_size": 8}}
        | {"image_token_index": 127, "image_grid_pinpoints": [[16, 16]]}
        | {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    ),
    Case(
        "internvl",
        norms=_QK,
        around=_inner("qwen3")
        | {"vision_config": _EYES | {"image_size": [16, 16], "patch_size": [4, 4]}}
        | {"image_token_id": 127, "downsample_ratio": 0.5},
    ),
    Case(
        "qwen2_vl",
        {"rope_parameters": _SECTIONS, "hidden": 96},
        around=_inner("qwen2_vl_text")
        | {"vision_config": _QWEN2_EYES | {"embed_dim": 32, "hidden_size": 96}}
        | _QWEN_IDS,
    ),
    Case(
        "qwen2_5_vl",
        {"rope_parameters": _SECTIONS, "hidden": 96},
        around=_inner("qwen2_5_vl_text")
        | {
            "vision_config": _QWEN2_EYES
            | {"hidden_size": 32, "out_hidden_size": 96}
            | {"intermediate_size": 48, "window_size": 8, "fullatt_block_indexes": [0]}
        }
        | _QWEN_IDS,
    ),
    Case(
        "qwen3_vl",
        {"rope_parameters": _SECTIONS},
        norms=_QK,
        around=_inner("qwen3_vl_text") | {"vision_config": _QWEN3_EYES} | _QWEN_IDS,
    ),
    Case(
        "qwen3_vl_moe",
        {"rope_parameters": _SECTIONS, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24},
        norms=_QK,
        around=_inner("qwen3_vl_moe_text") | {"vision_config": _QWEN3_EYES} | _QWEN_IDS,
    ),
    Case(
        "mistral3",
        {"sliding_window": None},
        around=_inner("mistral")
        | {"vision_config": {"model_type": "pixtral", "head_dim": 16, **_EYES}}
        | {"image_token_index": 127, "spatial_merge_size": 2},
    ),
    Case(
        "llama4",
        _LLAMA4,
        interleaved=True,
        still=(1,),
        in_float32=True,
        norms=("qk_norm",),
        around=_inner("llama4_text")
        | {
            "vision_config": _EYES
            | {"intermediate_size": 128}
            | {"vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24}
            | {"pixel_shuffle_ratio": 0.5}
        }
        | {"image_token_index": 127, "boi_token_index": 125, "eoi_token_index": 126},
    ),
    Case(
        "qwen3_5",
        _LINEAR,
        rotated=4,
        absent=(0, 1, 2),
        norms=_QK,
        around=_inner("qwen3_5_text") | {"vision_config": _QWEN_EYES} | _QWEN_IDS,
    ),
    Case(
        "qwen3_5_moe",
        _LINEAR,
        rotated=4,
        absent=(0, 1, 2),
        norms=_QK,
        around=_inner("qwen3_5_moe_text") | {"vision_config": _QWEN_EYES} | _QWEN_IDS,
    ),
]


def random_case_plan(model: Any, case: Case, *, seed: int = 0) -> Plan:
    """About half of every layer's pairs, free channels and values; layer 0 stays dense."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[PairPlan | None] = []
    for index, layer in enumerate(attention_layers(model)):
        if index in case.absent or (index == 0 and not case.absent):
            layers.append(None)
            continue
        if index in case.sources:
            layers.append(layers[case.sources[index]])
            continue
        size, rotated = case.sizes(index)
        kept = [
            [_choose(size, count, generator) for _ in range(layer.shape.num_kv_heads)]
            for size, count in (
                (rotated // 2, rotated // 4 + rotated // 8),
                (size, 7 if index == 1 else 11),
                (size - rotated, (size - rotated) // 2),
            )
        ]
        layers.append(PairPlan.of_indices(*kept))
    return dataclasses.replace(plan_of(model, layers), qk_norm="exact")


def masked_by_hooks(model: Any, plan: Plan, case: Case) -> Any:
    """A copy of a stock model in which hooks zero the dropped channels of q, k and v."""
    model = copy.deepcopy(model)
    layers = getattr(model.get_decoder(), "model", model.get_decoder()).layers
    for index, (layer, planned) in enumerate(zip(layers, plan.layers, strict=True)):
        if planned is not None:
            size, rotated = case.sizes(index)
            heads = range(planned.frequency_GM.shape[0])
            keys = torch.tensor([_kept_keys(planned, g, size, rotated, case) for g in heads])
            kept = [set(planned.channels_GC[g].tolist()) for g in heads]
            values = torch.tensor([[c in kept[g] for c in range(size)] for g in heads])
            _hook(getattr(layer, case.attention), keys, values, case)
    return model


def _hook(attention: Any, keys_GD: Tensor, values_GD: Tensor, case: Case) -> None:
    repeats = 1 if case.fused == "q, k, v of every head" else 6 // len(keys_GD)
    queries_HD = keys_GD.repeat_interleave(repeats, 0)
    if case.norms and hasattr(attention, case.norms[0]):
        masks = (queries_HD, keys_GD)
        for position, name in enumerate(case.norms):
            if not hasattr(attention, name):  # keys of a layer that reads another's
                continue
            both = masks if len(case.norms) == 1 else masks[position : position + 1]
            getattr(attention, name).register_forward_hook(_multiply_heads(both, case.normed))
        queries_HD, keys_GD = torch.ones_like(queries_HD), torch.ones_like(keys_GD)
    if case.fused:
        masks = (queries_HD, keys_GD, values_GD)
        if repeats == 3:
            mask = torch.cat([part.flatten() for part in masks])
            attention.qkv_proj.register_forward_hook(_multiply(mask))
        else:
            attention.query_key_value.register_forward_hook(_multiply(torch.cat(masks, 1)))
        return
    if case.value_norm:
        if hasattr(attention, case.value_norm):
            norm = getattr(attention, case.value_norm)
            norm.register_forward_hook(_multiply_heads((values_GD,), "BTHD"))
        return
    if not keys_GD.all():
        attention.q_proj.register_forward_hook(_multiply(queries_HD))
        attention.k_proj.register_forward_hook(_multiply(keys_GD))
    attention.v_proj.register_forward_hook(_multiply(values_GD))


def _multiply_heads(masks: tuple[Tensor, ...], layout: str) -> Callable[..., Tensor]:
    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if layout == "flat":
            mask = masks[0].flatten()
        elif layout == "BHTD":
            mask = masks[0][:, None]
        else:
            mask = next(mask for mask in masks if len(mask) == output.shape[-2])
        return output * mask.to(output.dtype)

    return hook


def _kept_keys(planned: PairPlan, head: int, size: int, rotated: int, case: Case) -> list[bool]:
    kept = set()
    for pair in planned.frequency_GM[head].tolist():
        first = 2 * pair if case.interleaved else pair
        kept |= {first, first + 1 if case.interleaved else first + rotated // 2}
    kept |= {rotated + free for free in planned.free_GN[head].tolist()}
    return [channel in kept for channel in range(size)]


def _multiply(mask_HD: Tensor) -> Callable[..., Tensor]:
    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output * mask_HD.flatten().to(output.dtype)

    return hook


def _choose(size: int, count: int, generator: torch.Generator) -> list[int]:
    return sorted(torch.randperm(size, generator=generator)[:count].tolist())
