"""What the paper compares whole pairs with: keys cut channel by channel, simulated on stock models.

A lone channel of a pair cannot rotate: the other half of its rotation is gone. Two ways out exist,
and both are built here from a dense Llama for an evaluation of quality; neither saves memory.

Shapes: G KV heads, R query heads per KV head, B batch, T tokens, D dense head dim, W kept key
channels, C kept value channels.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rap.model.errors import UnsupportedModelError
from rap.model.layers import attention_layers
from rap.planning.plan import Plan
from rap.planning.scores import Named


@dataclass(frozen=True, eq=False)
class LayerChannels:
    """Kept channels of every KV head of one layer, dense indices, ascending."""

    keys_GW: Tensor
    values_GC: Tensor


def best_channels(plan: Plan, statistics: Sequence[Named | None]) -> list[LayerChannels]:
    """As many key channels as the plan keeps, the best by root-Fisher; its own value channels.

    Raises UnsupportedModelError for a plan that mixes values or leaves a layer dense.
    """
    chosen = []
    for layer, shape, layer_statistics in zip(plan.pairs, plan.shapes, statistics, strict=True):
        if layer is None or shape is None or layer_statistics is None or layer.channels_GC is None:
            raise UnsupportedModelError("a plan of plain value channels in every layer is needed")
        order = torch.as_tensor(shape.geometry.canonical_order())
        best = layer_statistics["root_fisher_k"].topk(layer.key_width, dim=1).indices
        chosen.append(LayerChannels(order[best].sort(1).values, layer.channels_GC.long()))
    return chosen


@torch.no_grad()
def index_aware(dense: PreTrainedModel, kept: Sequence[LayerChannels]) -> Any:
    """Single channels at their best: every kept channel rotates as in the dense model.

    Rows of dropped channels of W_q, W_k and W_v are zero, and the dropped channels of the rotated
    keys are zeroed again as they enter the cache, so that only kept ones are cached.
    """
    model = copy.deepcopy(dense)
    layers = attention_layers(model)
    for layer, channels in zip(layers, kept, strict=True):
        keys_GD, values_GD = _masks(layer.shape, channels)
        group = layer.shape.group_size if layer.shape else 1
        for name, mask_GD in (
            ("q_proj", keys_GD.repeat_interleave(group, 0)),
            ("k_proj", keys_GD),
            ("v_proj", values_GD),
        ):
            linear = getattr(layer.module, name)
            for tensor in (linear.weight, linear.bias):
                if tensor is not None:
                    tensor.view(*mask_GD.shape, -1)[~mask_GD] = 0
    masks = [_masks(layer.shape, c)[0] for layer, c in zip(layers, kept, strict=True)]

    def cache_kept(module: nn.Module, arguments: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if kwargs.get("past_key_values") is None:
            kwargs |= {"past_key_values": _MaskedCache(masks), "use_cache": True}
        return arguments, kwargs

    model.model.register_forward_pre_hook(cache_kept, with_kwargs=True)
    return model


@torch.no_grad()
def reindexed(dense: PreTrainedModel, kept: Sequence[LayerChannels]) -> Any:
    """Single channels as a plain structured pruner leaves them: a stock model with narrower heads.

    Kept rows move together, so the stock model pairs channel i with i + W/2 and gives the pair the
    i-th frequency of a head of W channels. The dense softmax scale is kept. Every layer must keep
    one even W = C, which uniform budgets give; UnsupportedModelError otherwise.
    """
    width = kept[0].keys_GW.shape[1]
    if width % 2 or {w for c in kept for w in (c.keys_GW.shape[1], c.values_GC.shape[1])} != {
        width
    }:
        raise UnsupportedModelError("a stock model needs one even width of keys and values")
    state = dense.state_dict()
    for layer, channels in zip(attention_layers(dense), kept, strict=True):
        shape = layer.shape
        assert shape is not None
        for projection, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads)):
            name = f"{layer.path}.{projection}_proj.weight"
            scale = (width / shape.head_dim) ** 0.5 if projection == "q" else 1.0
            state[name] = scale * _rows(state[name], channels.keys_GW, heads)
        name = f"{layer.path}.v_proj.weight"
        state[name] = _rows(state[name], channels.values_GC, shape.num_kv_heads)
        name = f"{layer.path}.o_proj.weight"
        state[name] = _rows(state[name].T, channels.values_GC, shape.num_heads).T
    config = copy.deepcopy(dense.config)
    config.head_dim = width
    stock = AutoModelForCausalLM.from_config(config, dtype=dense.dtype)
    stock.load_state_dict(state, strict=True)
    return stock.eval()


class _MaskedCache(DynamicCache):
    """A dynamic cache whose keys hold zero outside the kept channels of every head."""

    def __init__(self, masks_GD: Sequence[Tensor]):
        super().__init__()
        self.masks_GD = masks_GD

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mask the rotated keys [B, G, T, D], then cache them."""
        mask_GTD = self.masks_GD[layer_idx][:, None].to(key_states.device)
        kept = key_states * mask_GTD
        return super().update(kept, value_states, layer_idx, *args, **kwargs)


def _masks(shape: Any, channels: LayerChannels) -> tuple[Tensor, Tensor]:
    keys = torch.zeros(shape.num_kv_heads, shape.head_dim, dtype=torch.bool)
    values = keys.clone()
    return keys.scatter_(1, channels.keys_GW, True), values.scatter_(1, channels.values_GC, True)


def _rows(weight: Tensor, kept_GW: Tensor, heads: int) -> Tensor:
    """The kept rows of every head; query heads take the channels of their KV head."""
    kept_HW = kept_GW.repeat_interleave(heads // len(kept_GW), 0)
    rows_HDE = weight.unflatten(0, (heads, -1))
    return torch.stack([rows_HDE[h, kept] for h, kept in enumerate(kept_HW)]).flatten(0, 1)
