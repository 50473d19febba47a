"""What a model's attention costs: measured on its tensors, and the formula each figure must equal.

`footprint` runs a few tokens through a live model (the meta device will do) and counts the cache
tensors, weights and matrix products it finds. `formula` computes the same figures from a config.

Symbols: E model dim, H query heads, G KV heads, W key width, C value width (both D when dense).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...calibration.state import evaluating
from ...model.families import ROLES, AttentionSpec
from ...model.layers import AttentionLayer, attention_layers, attention_spec, role_rows

PREFILL = 3  # tokens read before the decode step that is measured


@dataclass(frozen=True)
class Footprint:
    """Cost of attention in the whole model; every field is a plain number or string for JSON.

    `kv_bytes_per_token` is what the cache grows by per token, in the dtype `kv_dtype`. Layers that
    cache a sliding window stop growing at its size. Parameters are weights of q, k, v, o and of
    a gate, biases counted apart; `kv_parameters` is the share of W_k and W_v (`rap_complexity`).
    `projection_flops` are per token, `mixing_flops` (scores, their product with V, and what is
    reconstructed from the cache) per token and attended position. A multiply-add is two FLOPs;
    masked positions, rotation and softmax are not counted. Low-rank factors count with the role
    they belong to. `total_parameters` counts tied weights once.
    """

    kv_bytes_per_token: int
    kv_dtype: str
    attention_parameters: int
    attention_biases: int
    kv_parameters: int
    projection_flops: int
    kv_projection_flops: int
    mixing_flops: int
    total_parameters: int

    def attention_flops(self, context: int) -> int:
        """FLOPs of one decode step that attends to `context` tokens, itself included."""
        return self.projection_flops + context * self.mixing_flops


@dataclass(frozen=True)
class LayerWidths:
    """Sizes of one layer with a cache: H, G, E, and the kept W and C channels of a head."""

    num_heads: int
    num_kv_heads: int
    hidden_size: int
    key_width: int
    value_width: int

    def weights(self) -> dict[str, int]:
        """Parameters of each projection's matrix: q E H W, k E G W, v E G C, o H C E."""
        query, cached = self.num_heads * self.hidden_size, self.num_kv_heads * self.hidden_size
        return {
            "q": query * self.key_width,
            "k": cached * self.key_width,
            "v": cached * self.value_width,
            "o": query * self.value_width,
        }

    def biases(self) -> dict[str, int]:
        """Parameters of each projection's bias, where it has one."""
        outputs = {role: size // self.hidden_size for role, size in self.weights().items()}
        return {**outputs, "o": self.hidden_size}


@torch.no_grad()
def footprint(model: Any) -> Footprint:
    """Measure a dense or pruned causal LM, on any device, from a 3-token prefill and a decode step.

    KV bytes are what the real cache tensors of a dynamic cache grew by in the decode step, FLOPs
    what `torch.utils.flop_counter` saw of it under eager attention, whose products are plain
    matrix products everywhere. The model's attention implementation and training mode are put back.
    Needs no memory beyond a forward pass of 3 tokens. A sliding window must span 5 tokens or more.

    Raises UnsupportedModelError for a family the package does not know.
    """
    spec = attention_spec(model.config)
    layers = [layer for layer in attention_layers(model) if layer.shape is not None]
    weights, biases = dict.fromkeys((*ROLES, "gate"), 0), 0
    for layer in layers:
        module: Any = layer.module
        shares = [(role, getattr(module, name), part) for role, name, part in _shares(layer, spec)]
        shares += [(role, linear, Fraction(1)) for role, _, linear in _factors(layer)]
        for role, linear, share in shares:
            weights[role] += int(linear.weight.numel() * share)
            biases += int(linear.bias.numel() * share) if linear.bias is not None else 0
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            kv_bytes, kv_dtype, flops = _decode_step(model)
    finally:
        model.set_attn_implementation(implementation)
    projected = _projection_flops(model, layers, flops)
    attended = sum(flops[f"{type(model).__name__}.{layer.path}"] for layer in layers)
    mixing, rest = divmod(attended - sum(projected.values()), PREFILL + 1)
    assert rest == 0, "attention did products besides projections, scores and values"
    return Footprint(
        kv_bytes_per_token=kv_bytes,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        attention_parameters=sum(weights.values()),
        attention_biases=biases,
        kv_parameters=weights["k"] + weights["v"],
        projection_flops=sum(projected.values()),
        kv_projection_flops=projected["k"] + projected["v"],
        mixing_flops=mixing,
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def formula(
    layers: Sequence[LayerWidths],
    *,
    dtype: torch.dtype,
    biased: str = "",
    other_parameters: int = 0,
) -> Footprint:
    """The footprint from sizes alone, a cache held in `dtype`; equal to what `footprint` measures.

    Per layer (appendix `cost_model`, over G heads, with W = C = rho D in place of D): cache
    G (W + C) elements a token, weights E (H + G) (W + C), a projection 2 FLOPs a weight and token,
    mixing 2 H (W + C) FLOPs a token and position. `biased` names the projections with a bias, for
    example "qkv". `other_parameters` is everything outside attention (`other_parameters`).
    """
    roles = {role: sum(layer.weights()[role] for layer in layers) for role in ROLES}
    weights, kv = sum(roles.values()), roles["k"] + roles["v"]
    biases = sum(layer.biases()[role] for layer in layers for role in biased)
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
        total_parameters=weights + biases + other_parameters,
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


def other_parameters(config: Any) -> int:
    """Parameters outside attention of a decoder with gated MLPs and two RMS norms a layer.

    With vocabulary V and MLP width I: embedding V E, a head V E unless tied, and per layer 3 E I
    and 2 E, with one last norm E. True of Llama, Mistral and Qwen2 without MLP biases.
    """
    model_dim = config.hidden_size
    embeddings = (1 if config.tie_word_embeddings else 2) * config.vocab_size * model_dim
    layer = 3 * model_dim * config.intermediate_size + 2 * model_dim
    return embeddings + config.num_hidden_layers * layer + model_dim


def compare(dense: Footprint, small: Footprint) -> dict[str, float]:
    """Each figure of `small` over that of `dense`; figures that are zero when dense are left out.

    Only KV bytes also depend on `kv_dtype`: compare models of the same precision.
    """
    figures = ((name, getattr(small, name), whole) for name, whole in asdict(dense).items())
    return {name: part / whole for name, part, whole in figures if name != "kv_dtype" and whole}


def _decode_step(model: Any) -> tuple[int, torch.dtype, dict[str, int]]:
    """Bytes the cache grew by, its dtype, and the FLOPs of every module, in one decode step."""
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, PREFILL + 1, dtype=torch.long, device=device)
    cache = model(input_ids=ids[:, :PREFILL], use_cache=True).past_key_values
    before = sum(tensor.nbytes for tensor in _cache_tensors(cache))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids[:, PREFILL:], use_cache=True, past_key_values=cache)
    after = _cache_tensors(cache)
    flops = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    return sum(tensor.nbytes for tensor in after) - before, after[0].dtype, flops


def _cache_tensors(cache: Any) -> list[Tensor]:
    held = (value for layer in cache.layers for value in vars(layer).values())
    return [value for value in held if isinstance(value, Tensor)]


def _projection_flops(
    model: Any, layers: list[AttentionLayer], flops: dict[str, int]
) -> dict[str, int]:
    spec, root = attention_spec(model.config), type(model).__name__
    found = dict.fromkeys((*ROLES, "gate"), 0)
    for layer in layers:
        for role, name, share in _shares(layer, spec):
            found[role] += int(flops[f"{root}.{layer.path}.{name}"] * share)
        rebuilding: tuple[str, ...] = getattr(layer.module, "reconstruction", ())
        for role, name, _ in _factors(layer):
            if name not in rebuilding:
                found[role] += flops[f"{root}.{layer.path}.{name}"]
    return found


def _shares(layer: AttentionLayer, spec: AttentionSpec) -> list[tuple[str, str, Fraction]]:
    """Role, name and share of the linear's rows: one linear may be q, k and v, or q and a gate."""
    shape, found = layer.shape, []
    assert shape is not None
    for name, roles in spec.linears().items():
        widths = getattr(layer.module, "role_widths", dict.fromkeys(roles, shape.head_dim))
        rows = role_rows(roles, widths, shape, per_head=False)
        total = sum(len(own) for own in rows.values())
        found += [(role, name, Fraction(len(own), total)) for role, own in rows.items()]
    return found


def _factors(layer: AttentionLayer) -> list[tuple[str, str, Any]]:
    """Role, name and module of the linears that baselines have beside their projections."""
    module: Any = layer.module
    named: dict[str, tuple[str, ...]] = getattr(module, "factors", {})
    return [(role, name, module.get_submodule(name)) for role in named for name in named[role]]
