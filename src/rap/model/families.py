"""The table of Hugging Face families: one row per family, and why other models are refused.

Most of what differs between families is read off the live attention module (biases, scale, head
counts, clipping, dropout, partial rotation). A row states what cannot be read.

Shapes: B batch, T tokens, H query heads, W key width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .rope import Pairing, TableKind

ROLES = ("q", "k", "v", "o")
# How QK-norm is computed after the cut; explained in `norms`.
NORM_MODES = ("exact", "constant", "rows")
# The further arguments of an attention module's forward.
Kwargs = Mapping[str, Any]


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


@dataclass(frozen=True)
class QKNorm:
    """How a family normalises queries and keys, if its attention module has modules of that name.

    `over` is what one mean runs over: each head's channels (`head`), or all heads' (`all`).
    `layout` is how the states lie when they are normalised. `centred` is LayerNorm, which subtracts
    the mean first. The weight is `weight_offset` plus what is stored.
    """

    names: tuple[str, str] = ("q_norm", "k_norm")
    over: Literal["head", "all"] = "head"
    layout: Literal["BTHD", "BHTD"] = "BTHD"
    after_rotation: bool = False
    centred: bool = False
    weight_offset: float = 0.0
    one_module_per_head: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """How one family writes its attention.

    `pairing` and `table` are the layouts of rotated channels and of cos/sin; `clockwise` rotates by
    the negative angle. `rope_in_float32` says that the family casts queries and keys to float32 for
    the rotation. `rotates` tells from the attention module whether the layer rotates (None: every
    layer does). `by_axis` says that the pairs of a head take their positions from several axes
    (time, height and width of an image). `sliding_window_from` tells where the window handed to the
    attention function lives: an attribute of the module (`module`), the config read at call time
    (`config`), or nowhere. `arguments` are further arguments of the attention function, each with
    the module's attribute that holds it. `query_scale` multiplies rotated queries.

    `fused` is one linear for q, k and v: all of q, then k, then v (`blocks`), or a head's q, k and
    v after each other (`heads`). `gate` multiplies the attention output by the sigmoid of a
    projection: its own linear, or the second half of every head of q_proj (`query`). `needs_bos`
    says that the family goes wrong on a text that does not begin with BOS.

    `value_norm` names a norm of values over each head, without weights, before they are cached.
    What `of` tells of one layer: it `reads` the keys and values of an earlier one and has q and o
    alone, or it `ties_values`, whose projection is that of the keys (module `sharing`).
    """

    model_type: str
    pairing: Pairing = "half"
    table: TableKind = "repeated"
    clockwise: bool = False
    rope_in_float32: bool = False
    rotates: Callable[[nn.Module], bool] | None = None
    by_axis: bool = False
    sliding_window_from: Literal["module", "config"] | None = None
    arguments: tuple[tuple[str, str], ...] = ()
    query_scale: Callable[[Any, Tensor, int, Kwargs], Tensor] | None = None
    norm: QKNorm | None = None
    fused: Literal["blocks", "heads"] | None = None
    gate: str | None = None
    needs_bos: bool = False
    value_norm: str | None = None
    reads: bool = False
    ties_values: bool = False
    attention: str = "self_attn"
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def projection_names(self) -> dict[str, str]:
        """Role (q, k, v, o) to the name of its linear layer."""
        return dict(zip(ROLES, self.projections, strict=True))

    def of(self, attention: nn.Module | None) -> "AttentionSpec":
        """The row of one layer, dense or pruned, of a family whose layers differ in projections."""
        if self.value_norm is None:
            return self
        q, k, v, o = self.projections
        reads = bool(getattr(attention, "is_kv_shared_layer", False))
        ties = not reads and getattr(attention, v, None) is None
        names = (q, k, k if ties else v, o)
        return replace(self, reads=reads, ties_values=ties, projections=names)

    def linears(self) -> dict[str, tuple[str, ...]]:
        """Every linear layer of the attention by name, and the roles its rows have, in order."""
        linears: dict[str, tuple[str, ...]] = {}
        for role, name in self.projection_names().items():
            if self.reads and role in "kv":
                continue
            linears[name] = (*linears.get(name, ()), role)
        if self.gate == "query":
            linears[self.projections[0]] += ("gate",)
        elif self.gate is not None:
            linears[self.gate] = ("gate",)
        return linears

    @property
    def per_head(self) -> bool:
        """Whether a linear of several roles lists them head by head in the dense model."""
        return self.fused == "heads" or self.gate == "query"


_DENSE = ("q_proj", "k_proj", "v_proj", "dense")
_FUSED_DENSE = ("query_key_value", "query_key_value", "query_key_value", "dense")
_LAYER_NORM = QKNorm(("q_layernorm", "k_layernorm"), centred=True)
_ZERO_CENTRED = QKNorm(weight_offset=1.0)
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
            "gemma3_text", needs_bos=True, norm=_ZERO_CENTRED, sliding_window_from="module"
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
            "exaone4", norm=QKNorm(), rotates=rotates_unless_global, sliding_window_from="module"
        ),
        AttentionSpec(
            "exaone_moe", norm=QKNorm(), rotates=rotates_unless_global, sliding_window_from="module"
        ),
        AttentionSpec("hunyuan_v1_dense", norm=_HUNYUAN),
        AttentionSpec("hunyuan_v1_moe", norm=_HUNYUAN),
        AttentionSpec("minimax_m2", norm=_ALL_HEADS),
        AttentionSpec("apertus", norm=QKNorm()),
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
        AttentionSpec("hy_v3", norm=QKNorm()),
    )
}

# Text models that transformers has inside multimodal ones alone.
INNER = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
# Multimodal models whose text model, one of the families, is compressed; all else passes through.
WRAPPERS = (
    *("gemma3", "internvl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
)
