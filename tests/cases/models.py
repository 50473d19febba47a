"""Tiny random models of any family, with attention sharp enough to show a wrong channel."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCABULARY = 128

# 64 trained positions put the eight frequencies of a 16-wide head on both sides of the llama3 and
# yarn cut-offs, so that the scaled rope really differs from the default one.
_SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED},
    "yarn": {"rope_type": "yarn", **_SCALED},
}
MAX_POSITIONS = 512


def tiny_model(
    model_type: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 32,
    layers: int = 2,
    rope: str = "default",
    seed: int = 0,
    around: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """A random causal language model in eval mode; `overrides` are fields of its config.

    With `around`, a multimodal model of these fields, whose text model has all the others beside
    those of its `text_config`.

    The weights depend on `seed` and the shapes only: the same seed gives the same values in every
    dtype, up to rounding. The rotary buffer stays float32, as after `from_pretrained`.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": dict(ROPES[rope]),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    fields |= overrides
    whole: Any = AutoModelForCausalLM
    if around is not None:
        whole = AutoModelForImageTextToText
        fields = {**around, "text_config": fields | around["text_config"]}
    config = AutoConfig.for_model(model_type, **fields)
    model = whole.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, generator)
    return model.eval()


def random_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length] of the tiny models' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Overwrite one parameter: a projection of std 0.3 gives logits of attention of std about 3."""
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if "norm" in name:
        values = 1 + 0.2 * noise
    elif "embed" in name:
        values = noise
    elif name.endswith("bias"):
        values = 0.5 * noise
    else:
        values = 0.3 * noise
    parameter.copy_(values)
