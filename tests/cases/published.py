"""Published configurations, from the config.json of each release: what decides its KV cache."""

from typing import Any

_ROPE = {"rope_type": "default"}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, **rest: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": "bfloat16",
        **rest,
    }


# Name, model type of the text model, fields.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B": (
        "llama",
        _sizes(4096, 32, 32, 8, intermediate_size=14336, vocab_size=128256)
        | {"rope_parameters": _ROPE | {"rope_theta": 5e5}},
    ),
    "Llama-3.2-3B": (
        "llama",
        _sizes(3072, 28, 24, 8, head_dim=128, intermediate_size=8192, vocab_size=128256)
        | {"rope_parameters": _LLAMA_3 | {"factor": 32.0, "original_max_position_embeddings": 8192}}
        | {"max_position_embeddings": 131072, "tie_word_embeddings": True},
    ),
    "Llama-2-7B": (
        "llama",
        _sizes(4096, 32, 32, 32, intermediate_size=11008, vocab_size=32000)
        | {"rope_parameters": _ROPE | {"rope_theta": 1e4}},
    ),
    "Mistral-7B-v0.3": (
        "mistral",
        _sizes(4096, 32, 32, 8, intermediate_size=14336, vocab_size=32768, sliding_window=None)
        | {"rope_parameters": _ROPE | {"rope_theta": 1e6}},
    ),
    "Qwen2.5-14B": (
        "qwen2",
        _sizes(5120, 48, 40, 8, intermediate_size=13824, vocab_size=152064)
        | {"rope_parameters": _ROPE | {"rope_theta": 1e6}, "use_sliding_window": False},
    ),
    "GLM-4.7": (
        "glm4_moe",
        _sizes(5120, 92, 96, 8, head_dim=128, intermediate_size=12288, vocab_size=151552)
        | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True}
        | {"rope_parameters": _ROPE | {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
        | {"partial_rotary_factor": 0.5},
    ),
    "Qwen3-Next": (
        "qwen3_next",
        _sizes(2048, 48, 16, 2, head_dim=256, intermediate_size=5120, vocab_size=151936)
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"rope_parameters": _ROPE | {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
        | {"partial_rotary_factor": 0.25, "full_attention_interval": 4},
    ),
    "GPT-OSS": (
        "gpt_oss",
        _sizes(2880, 24, 64, 8, head_dim=64, intermediate_size=2880, vocab_size=201088)
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
        },
    ),
    "Mistral-Small-3.2": (
        "mistral",
        _sizes(5120, 40, 32, 8, head_dim=128, intermediate_size=32768, vocab_size=131072)
        | {"rope_parameters": _ROPE | {"rope_theta": 1e9}, "sliding_window": None},
    ),
    "Llama-4-Scout": (
        "llama4_text",
        _sizes(5120, 48, 40, 8, head_dim=128, intermediate_size=8192, vocab_size=202048)
        | {"num_local_experts": 16, "intermediate_size_mlp": 16384, "no_rope_layer_interval": 4}
        | {"rope_parameters": _LLAMA_3 | {"factor": 16.0, "original_max_position_embeddings": 8192}}
        | {"use_qk_norm": True},
    ),
    "Gemma-3": (
        "gemma3_text",
        _sizes(5376, 62, 32, 16, head_dim=128, intermediate_size=21504, vocab_size=262208)
        | {"query_pre_attn_scalar": 168, "sliding_window": 1024, "sliding_window_pattern": 6},
    ),
}
