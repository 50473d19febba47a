"""What a model's attention costs, measured on its tensors.

`footprint` runs a few tokens through a live model (the meta device will do) and counts the cache
tensors, weights and matrix products it finds. `reconstructs` says whether keys or values are
computed again from the cache at every decode step. It is seen from the products of a real step:
reconstruction multiplies weights with something that spans the cached tokens, while attention as
such multiplies weights with the new token alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ...model.attention import pruned_attention
from ...model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    attention_window,
    text_config,
    windowed_layers,
)
from ...model.projections import projection_rows
from ...model.specs import PROJECTIONS, AttentionSpec
from ...runtime.state import evaluating

PREFILL = 3  # tokens read before the decode step that is measured


@dataclass(frozen=True)
class Footprint:
    """Cost of attention in the whole model; every field is a plain number or string for JSON.

    `kv_bytes_per_token` is what the cache grows by per token, in the dtype `kv_dtype`, at any
    context: layers with a sliding window beside others without (`layers.windowed_layers`) are
    counted apart, as `windowed_kv_bytes_per_token`, of up to `window` tokens. Where all layers have
    one window, `whole_window`, all costs end there. Parameters are
    weights of q, k, v, o and of a gate, biases counted apart; `kv_parameters` is the share of W_k
    and W_v (`rap_complexity`).
    `projection_flops` are per token, `mixing_flops` (scores, their product with V, and what is
    reconstructed from the cache) per token and attended position, apart for layers with a window as
    bytes are (`windowed_mixing_flops`). A multiply-add is two FLOPs;
    masked positions, rotation and softmax are not counted. Low-rank factors count with their
    projection. `total_parameters` counts tied weights once.
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
    windowed_kv_bytes_per_token: int = 0
    window: int | None = None
    windowed_mixing_flops: int = 0
    whole_window: int | None = None

    def kv_bytes(self, context: int) -> int:
        """Bytes of the cache at a context of so many tokens."""
        context, held = self._held(context)
        return self.kv_bytes_per_token * context + self.windowed_kv_bytes_per_token * held

    def attention_flops(self, context: int) -> int:
        """FLOPs of one decode step that attends to `context` tokens, itself included."""
        context, held = self._held(context)
        windowed = held * self.windowed_mixing_flops
        return self.projection_flops + context * self.mixing_flops + windowed

    def _held(self, context: int) -> tuple[int, int]:
        """Tokens that layers attend to: those without a window beside them, and those with one."""
        context = min(context, self.whole_window or context)
        return context, min(context, self.window or context)


@torch.no_grad()
def footprint(model: PreTrainedModel) -> Footprint:
    """Measure a dense or pruned causal LM, on any device, from a 3-token prefill and a decode step.

    KV bytes are what the real cache tensors of a dynamic cache grew by in the decode step, FLOPs
    what `torch.utils.flop_counter` saw of it under eager attention, whose products are plain
    matrix products everywhere. The model's attention implementation and training mode are put back.
    Needs no memory beyond a forward pass of 3 tokens. A sliding window must span 5 tokens or more.

    Raises UnsupportedModelError for a family the package does not know.
    """
    spec = attention_spec(model.config)
    layers = [layer for layer in attention_layers(model) if layer.shape is not None]
    weights, biases = dict.fromkeys((*PROJECTIONS, "gate"), 0), 0
    for layer in layers:
        module: Any = layer.module
        shares = [
            (projection, getattr(module, name), part)
            for projection, name, part in _shares(layer, spec)
        ]
        shares += [(projection, linear, Fraction(1)) for projection, _, linear in _factors(layer)]
        for projection, linear, share in shares:
            weights[projection] += int(linear.weight.numel() * share)
            biases += int(linear.bias.numel() * share) if linear.bias is not None else 0
    with _eagerly(model):
        grown, kv_dtype, flops = _decode_step(model)
    bounded = windowed_layers(model.config)
    windowed = sum(count for index, count in enumerate(grown) if index in bounded)
    projected = _projection_flops(model, layers, flops)
    return Footprint(
        kv_bytes_per_token=sum(grown) - windowed,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        attention_parameters=sum(weights.values()),
        attention_biases=biases,
        kv_parameters=weights["k"] + weights["v"],
        projection_flops=sum(projected.values()),
        kv_projection_flops=projected["k"] + projected["v"],
        mixing_flops=_mixing(model, [x for x in layers if x.index not in bounded], flops),
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        windowed_kv_bytes_per_token=windowed,
        window=attention_window(model.config),
        windowed_mixing_flops=_mixing(model, [x for x in layers if x.index in bounded], flops),
        whole_window=_whole_window(model.config),
    )


def _whole_window(config: PreTrainedConfig) -> int | None:
    """The sliding window that all layers have, as the cache of transformers has it."""
    layers = DynamicCache(config=text_config(config)).layers
    sizes = {getattr(layer, "sliding_window", None) for layer in layers}
    return sizes.pop() if len(sizes) == 1 else None


def _mixing(model: PreTrainedModel, layers: list[AttentionLayer], flops: dict[str, int]) -> int:
    """FLOPs of these layers beside projections, per token and attended position."""
    attended = sum(flops[f"{type(model).__name__}.{layer.path}"] for layer in layers)
    projected = sum(_projection_flops(model, layers, flops).values())
    mixing, rest = divmod(attended - projected, PREFILL + 1)
    assert rest == 0, "attention did products besides projections, scores and values"
    return mixing


def _decode_step(model: Any) -> tuple[list[int], torch.dtype, dict[str, int]]:
    """Bytes each layer's cache grew by, its dtype, and every module's FLOPs, in a decode step."""
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, PREFILL + 1, dtype=torch.long, device=device)
    cache = model(input_ids=ids[:, :PREFILL], use_cache=True).past_key_values
    before = bytes_by_layer(cache)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids[:, PREFILL:], use_cache=True, past_key_values=cache)
    grown = [now - then for now, then in zip(bytes_by_layer(cache), before, strict=True)]
    flops = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    return grown, cached_tensors(cache)[0].dtype, flops


def bytes_by_layer(cache: Any) -> list[int]:
    """Bytes of all tensors that each layer of a cache holds."""
    return [sum(tensor.nbytes for tensor in _held(layer)) for layer in cache.layers]


@torch.no_grad()
def cached_channels(model: Any) -> list[int]:
    """Numbers that each layer of a cache grows by in a decode step. `model` may be on meta."""
    with _eagerly(model):
        grown, dtype, _ = _decode_step(model)
    return [count // dtype.itemsize for count in grown]


def cached_tensors(cache: Any) -> list[Tensor]:
    """All tensors that the layers of a cache hold."""
    return [tensor for layer in cache.layers for tensor in _held(layer)]


def _held(layer: Any) -> list[Tensor]:
    # A private tensor is transformers' own note of a window's size.
    named = vars(layer).items()
    return [x for name, x in named if isinstance(x, Tensor) and not name.startswith("_")]


def _projection_flops(
    model: PreTrainedModel, layers: list[AttentionLayer], flops: dict[str, int]
) -> dict[str, int]:
    spec, root = attention_spec(model.config), type(model).__name__
    by_projection = dict.fromkeys((*PROJECTIONS, "gate"), 0)
    for layer in layers:
        for projection, name, share in _shares(layer, spec):
            by_projection[projection] += int(flops[f"{root}.{layer.path}.{name}"] * share)
        own = pruned_attention(layer)
        for projection, name, _ in _factors(layer):
            if own is not None and name not in own.reconstruction:
                by_projection[projection] += flops[f"{root}.{layer.path}.{name}"]
    return by_projection


def _shares(layer: AttentionLayer, spec: AttentionSpec) -> list[tuple[str, str, Fraction]]:
    """Role, name and share of the linear's rows: one linear may be q, k and v, or q and a gate."""
    shares = []
    for name, projections in spec.of(layer.module).linears().items():
        rows = projection_rows(projections, layer.sizes, per_head=False)
        total = sum(len(own) for own in rows.values())
        shares += [
            (projection, name, Fraction(len(own), total)) for projection, own in rows.items()
        ]
    return shares


def _factors(layer: AttentionLayer) -> list[tuple[str, str, Any]]:
    """Role, name and module of the linears that baselines have beside their projections."""
    own = pruned_attention(layer)
    if own is None:
        return []
    named = own.factors
    return [
        (projection, name, own.get_submodule(name))
        for projection in named
        for name in named[projection]
    ]


CONTEXT = 58  # cached tokens; with the new one 59, a prime, which divides no number of heads
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@torch.no_grad()
def reconstructs(model: Any) -> bool:
    """Whether a decode step multiplies the cache, or anything as long, with weights.

    Weights are parameters and whatever is computed from parameters alone. Eager attention is used,
    so that no product hides in a fused kernel; the model's own implementation is put back.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, CONTEXT + 1, dtype=torch.long, device=device)
    with _eagerly(model):
        cache = model(input_ids=ids[:, :CONTEXT], use_cache=True).past_key_values
        with _WeightProducts(model.parameters(), CONTEXT + 1) as products:
            model(input_ids=ids[:, CONTEXT:], use_cache=True, past_key_values=cache)
    return products.found


@contextmanager
def _eagerly(model: Any) -> Iterator[None]:
    """Evaluate with eager attention; the model's own implementation is put back."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            yield
    finally:
        model.set_attn_implementation(implementation)


class _WeightProducts(TorchDispatchMode):
    """Watches for a product of a weight with a tensor that has a dimension of `length`."""

    def __init__(self, parameters: Iterator[Tensor], length: int) -> None:
        super().__init__()
        self.length, self.found = length, False
        self.weights = {_storage(parameter): parameter for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        weights = [_storage(tensor) in self.weights for tensor in given]
        if func.overloadpacket.__name__ in _PRODUCTS and any(weights):
            left, right = given[-2:]
            # Heads are often folded into the rows of a product, so multiples count.
            rows = left.shape[-2] if not weights[-2] else right.shape[-1]
            self.found |= weights[-2] != weights[-1] and rows % self.length == 0
        result = func(*args, **(kwargs or {}))
        if weights and all(weights):
            # Kept, or a freed tensor's address could be taken for a weight's.
            self.weights |= {_storage(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
