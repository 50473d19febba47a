"""Tiny models as GGUF files, written by the format's own library as llama.cpp's converter does.

How each architecture is stored (names, headers, permuted rows, shifted norms) is written down here,
independently of the package, which reads such files through transformers.

Shapes: H heads, D head dim, E model dim.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cases.models import tiny_model
from rap import assets

Arrays = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Stored:
    """How llama.cpp stores a family.

    `fields` make the tiny model. `states` are keys of the header beside the common ones, by what
    the config has; a common key that this architecture lacks is None. `change` gives a tensor, by
    its name in transformers, as the tensors that are stored, named as the format's library expects.
    """

    architecture: str
    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    states: Callable[[Any], dict[str, Any]] = lambda config: {}
    change: Callable[[str, np.ndarray, Any], Arrays] = lambda name, data, config: iter(
        [(name, data)]
    )
    name: str = "a model"


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, GQA, untied; its vocabulary is the bundled tokenizer's."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=assets.reference_tokenizer().vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def stored_model(stored: Stored, **fields: Any) -> Any:
    """A tiny random model of a row of STORED, with the bundled tokenizer's vocabulary."""
    vocabulary = assets.reference_tokenizer().vocab_size
    return tiny_model(stored.model_type, vocab_size=vocabulary, **{**stored.fields, **fields})


def write_gguf(
    path: Path,
    model: Any,
    quantization: str = "F32",
    *,
    stored: Stored | None = None,
    header: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> None:
    """Write `model`, its matrices in `quantization`, with the bundled tokenizer.

    `stored` is a row of STORED, Llama's unless given. `header` has keys to add, or with None to
    leave out; `tensors` are added to the model's own.
    """
    stored = stored or STORED["llama"]
    config = model.config
    writer = gguf.GGUFWriter(path, stored.architecture)
    writer.add_name(stored.name)
    keys = _common(config) | stored.states(config) | (header or {})
    for key, value in keys.items():
        if value is not None:
            whole = key if key.startswith("tokenizer.") else f"{stored.architecture}.{key}"
            _add_key(writer, whole, value)
    _add_tokenizer(writer)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == stored.architecture
    )
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for changed, data in stored.change(name, tensor.detach().float().numpy(), config):
            known = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert known is not None, f"{changed} has no name in {stored.architecture}"
            _add_tensor(writer, known, np.ascontiguousarray(data), quantization)
    _end(writer)


def write_header(path: Path, architecture: str) -> None:
    """Write a file of an architecture that holds no model."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_tensor(writer, "token_embd.weight", np.ones((4, 32), dtype=np.float32), "F32")
    _end(writer)


def _end(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _common(config: Any) -> dict[str, Any]:
    """What llama.cpp's converter states of any model."""
    rope = config.rope_parameters
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    width = getattr(config, "head_dim", None)
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok if experts else None,
    }


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = assets.reference_tokenizer()
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [" ".join(pair) for pair in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _add_tensor(writer: Any, name: str, data: np.ndarray, kind: str) -> None:
    if data.ndim == 1 or kind == "F32":
        writer.add_tensor(name, data)
        return
    which = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(data, which), raw_dtype=which)


def _interleaved(name: str, data: np.ndarray, config: Any) -> Arrays:
    """llama.cpp's Llama rotates neighbours: rows of a head are interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            rows = data.reshape(count, 2, config.head_dim // 2, -1)
            data = rows.swapaxes(1, 2).reshape(data.shape)
    yield name, data


def _shifted_norms(name: str, data: np.ndarray, config: Any) -> Arrays:
    """Norms that scale by 1 + weight are stored as that sum."""
    yield name, data + 1 if name.endswith("norm.weight") else data


def _apart(name: str, data: np.ndarray, config: Any) -> Arrays:
    """Experts are stored by role; transformers joins gate and up."""
    whole, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for part, half in zip(("gate_proj", "up_proj"), np.split(data, 2, axis=1), strict=True):
            yield f"{whole}.{part}.weight", half
    elif last == "down_proj" and whole.endswith("experts"):
        yield f"{name}.weight", data
    else:
        yield name, data


def _flat_convolution(name: str, data: np.ndarray, config: Any) -> Arrays:
    yield name, data[:, 0] if name.endswith("conv.conv.weight") else data


def _minimax(name: str, data: np.ndarray, config: Any) -> Arrays:
    if name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), data
    else:
        yield from _apart(name, data, config)


def _linear(name: str, data: np.ndarray, config: Any) -> Arrays:
    """Qwen3.5: value heads of linear layers tiled instead of grouped by key head; other changes.

    A value head of a key head comes behind the same one of all other key heads.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width = config.linear_value_head_dim
    own = 2 * keys * config.linear_key_head_dim  # rows of q and k before those of v

    def tiled(rows: np.ndarray, size: int) -> np.ndarray:
        grouped = rows.reshape(keys, values // keys, size, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if "linear_attn" in name:
        role = name.partition("linear_attn.")[2].removesuffix(".weight")
        if role in ("in_proj_qkv", "conv1d"):
            data = data[:, 0] if role == "conv1d" else data
            data = np.concatenate([data[:own], tiled(data[own:], width)])
        elif role in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            data = tiled(data, width if role == "in_proj_z" else 1)
        elif role == "out_proj":
            data = tiled(data.T, width).T
        if role == "A_log":
            data = -np.exp(data)
        if role == "dt_bias":
            name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("norm.weight"):
        data = data + 1
    if name.endswith("shared_expert_gate.weight"):
        data = data[0]  # as files are that were quantized
    yield from _apart(name, data, config)


def _turned(config: Any) -> int:
    """Channels of a head that rotate."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width * config.rope_parameters["partial_rotary_factor"])


def _part(fraction: float, theta: float = 1e4) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": fraction}
    return {"rope_parameters": rope, "partial_rotary_factor": fraction}


def _theta(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _llama(config: Any) -> dict[str, Any]:
    return {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}


def _experts(config: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": getattr(
            config, "shared_expert_intermediate_size", None
        ),
    }


def _qwen35(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": _turned(config),
        "rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }


_NO_WIDTHS = {"attention.key_length": None, "attention.value_length": None}
_WIDE = {"hidden": 64}  # where heads are as wide as the model divided by their number
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 40}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 6, "tie_word_embeddings": True}
_TWO_BASES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
}
_LINEAR = {
    "layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        **_part(0.5)["rope_parameters"],
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

STORED = {
    "llama": Stored(
        "llama",
        "llama",
        states=_llama,
        change=_interleaved,
    ),
    # Told from Llama by its name alone.
    "mistral": Stored(
        "llama",
        "mistral",
        {"sliding_window": None},
        _llama,
        _interleaved,
        name="mistral",
    ),
    "qwen2": Stored("qwen2", "qwen2"),
    "qwen2moe": Stored("qwen2moe", "qwen2_moe", _SHARED, _experts, _apart),
    "qwen3": Stored("qwen3", "qwen3", _theta(1e6)),
    "qwen3moe": Stored(
        "qwen3moe", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True}, _experts, _apart
    ),
    "qwen35": Stored("qwen35", "qwen3_5_text", _LINEAR, _qwen35, _linear),
    "qwen35moe": Stored(
        "qwen35moe",
        "qwen3_5_moe_text",
        _LINEAR | _SHARED,
        lambda config: _qwen35(config) | _experts(config),
        _linear,
    ),
    "phi3": Stored(
        "phi3",
        "phi3",
        _WIDE | _part(0.75) | {"sliding_window": 6},
        lambda config: {
            "rope.dimension_count": _turned(config),
            "attention.sliding_window": config.sliding_window,
            **_NO_WIDTHS,
        },
    ),
    "stablelm": Stored(
        "stablelm",
        "stablelm",
        _WIDE | _part(0.5) | {"use_qkv_bias": True, "layer_norm_eps": 1e-3},
        lambda config: {
            "rope.dimension_count": _turned(config),
            "rope.freq_base": None,
            "attention.layer_norm_epsilon": config.layer_norm_eps,
            **_NO_WIDTHS,
        },
    ),
    "starcoder2": Stored(
        "starcoder2",
        "starcoder2",
        _WIDE | _theta(1e6) | {"norm_epsilon": 1e-3, "tie_word_embeddings": True},
        lambda config: {"attention.layer_norm_epsilon": config.norm_epsilon},
    ),
    "nemotron": Stored(
        "nemotron",
        "nemotron",
        _WIDE | _part(0.75) | {"norm_eps": 1e-3},
        lambda config: {
            "rope.dimension_count": _turned(config),
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.layer_norm_epsilon": config.norm_eps,
            "rope.scaling.type": "none",
            "vocab_size": config.vocab_size,
        },
        _shifted_norms,
    ),
    "gemma2": Stored(
        "gemma2",
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
        lambda config: {
            "rope.freq_base": None,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "attention.sliding_window": config.sliding_window,
        },
        _shifted_norms,
    ),
    "gemma3": Stored(
        "gemma3",
        "gemma3_text",
        _GEMMA | _TWO_BASES | {"layers": 7},
        lambda config: {"attention.sliding_window": config.sliding_window},
        _shifted_norms,
    ),
    "minimax-m2": Stored(
        "minimax-m2",
        "minimax_m2",
        _part(0.5) | {"num_local_experts": 4, "num_experts_per_tok": 2},
        lambda config: {
            "rope.dimension_count": _turned(config),
            "expert_feed_forward_length": config.intermediate_size,
            "expert_gating_func": 2,
        },
        _minimax,
    ),
    "lfm2": Stored(
        "lfm2",
        "lfm2",
        _WIDE
        | _theta(1e5)
        | {"layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3}
        | {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        lambda config: {
            "attention.head_count_kv": [0, config.num_key_value_heads, 0],
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "vocab_size": config.vocab_size,
            "shortconv.l_cache": config.conv_L_cache,
        },
        _flat_convolution,
    ),
}
