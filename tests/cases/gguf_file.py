"""A tiny Llama as a GGUF file, written by the format's own library."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rap import assets


def tiny_llama() -> LlamaForCausalLM:
    """Two layers, GQA, untied; its vocabulary is the bundled tokenizer's."""
    torch.manual_seed(0)
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


def write_gguf(
    path: Path,
    model: Any,
    quantization: str = "F32",
    scaling: tuple[str, float] | None = None,
    factors: dict[str, list[float]] | None = None,
) -> None:
    """Write `model`, its matrices in `quantization`, with the bundled tokenizer.

    With a named `scaling` of its frequencies, and tensors of `factors` to them.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
        writer.add_rope_scaling_factor(scaling[1])
    for name, values in (factors or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    for name, tensor in model.state_dict().items():
        _add_tensor(writer, name, tensor, config, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, config: Any, kind: str) -> None:
    data = tensor.detach().float().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:  # llama.cpp rotates neighbours: rows of a head are interleaved
            rows = data.reshape(count, 2, config.head_dim // 2, -1)
            data = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(data.shape))
    if name in OUTSIDE:
        stored = OUTSIDE[name]
    else:
        _, _, layer, rest = name.split(".", 3)
        stored = f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    if data.ndim == 1 or kind == "F32":
        writer.add_tensor(stored, data)
        return
    which = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(stored, gguf.quants.quantize(data, which), raw_dtype=which)
