"""What a footprint must be, from sizes alone: the formula that the measured figures are held to.

Symbols: E model dim, H query heads, G KV heads, W key width, C value width (both D when dense).
"""

from dataclasses import dataclass
from typing import Any

import torch

from rap.evaluation.cost.footprint import Footprint


@dataclass(frozen=True)
class LayerWidths:
    """Sizes of one layer with a cache: H, G, E, and the kept W and C channels of a head."""

    num_heads: int
    num_kv_heads: int
    hidden_size: int
    key_width: int
    value_width: int


def formula(config: Any, dtype: torch.dtype, biased: str = "") -> Footprint:
    """The footprint of a config of Llama, Mistral or Qwen2, a cache held in `dtype`.

    Per layer (appendix `cost_model`, over G heads, with W = C = rho D in place of D): cache
    G (W + C) elements a token, weights E (H + G) (W + C), a projection 2 FLOPs a weight and token,
    mixing 2 H (W + C) FLOPs a token and position. `biased` names the projections with a bias, for
    example "qkv".
    """
    layers = layer_widths(config)
    projections = {
        projection: sum(weights_of(layer)[projection] for layer in layers) for projection in "qkvo"
    }
    weights, kv = sum(projections.values()), projections["k"] + projections["v"]
    biases = sum(biases_of(layer)[projection] for layer in layers for projection in biased)
    widths = [(layer, layer.key_width + layer.value_width) for layer in layers]
    return Footprint(
        kv_bytes_per_token=sum(
            layer.num_kv_heads * width * dtype.itemsize for layer, width in widths
        ),
        kv_dtype=str(dtype).removeprefix("torch."),
        attention_parameters=weights,
        attention_biases=biases,
        kv_parameters=kv,
        projection_flops=2 * weights,
        kv_projection_flops=2 * kv,
        mixing_flops=sum(2 * layer.num_heads * width for layer, width in widths),
        total_parameters=weights + biases + other_parameters(config),
        # Mistral's, which has no types of layers.
        whole_window=None
        if hasattr(config, "layer_types")
        else getattr(config, "sliding_window", None),
    )


def layer_widths(config: Any) -> list[LayerWidths]:
    """Widths of every layer from a config alone: its `rap` section, or the dense head dim."""
    dense = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    section = getattr(config, "rap", None) or {"layers": [None] * config.num_hidden_layers}
    return [
        LayerWidths(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            hidden_size=config.hidden_size,
            key_width=2 * kept["pairs"] + kept["free"] if kept else dense,
            value_width=kept["values"] if kept else dense,
        )
        for kept in section["layers"]
    ]


def weights_of(layer: LayerWidths) -> dict[str, int]:
    """Parameters of each projection's matrix: q E H W, k E G W, v E G C, o H C E."""
    query, cached = layer.num_heads * layer.hidden_size, layer.num_kv_heads * layer.hidden_size
    return {
        "q": query * layer.key_width,
        "k": cached * layer.key_width,
        "v": cached * layer.value_width,
        "o": query * layer.value_width,
    }


def biases_of(layer: LayerWidths) -> dict[str, int]:
    """Parameters of each projection's bias, where it has one."""
    outputs = {
        projection: size // layer.hidden_size for projection, size in weights_of(layer).items()
    }
    return {**outputs, "o": layer.hidden_size}


def other_parameters(config: Any) -> int:
    """Parameters outside attention of a decoder with gated MLPs and two RMS norms a layer.

    With vocabulary V and MLP width I: embedding V E, a head V E unless tied, and per layer 3 E I
    and 2 E, with one last norm E. True of Llama, Mistral and Qwen2 without MLP biases.
    """
    model_dim = config.hidden_size
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * model_dim
    layer = 3 * model_dim * config.intermediate_size + 2 * model_dim
    return embeddings + config.num_hidden_layers * layer + model_dim
