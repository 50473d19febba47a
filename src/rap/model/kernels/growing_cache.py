"""A growing cache that does not copy itself at every step.

transformers' `DynamicCache` joins the old and the new tensors for each token: a decode step reads
and writes the whole cache on top of the attention that it is for.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

# Room is made for this much more than is held: few copies, little memory unused.
_SPARE = 1 / 8
_LEAST = 64


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are views of larger tensors with room to grow."""

    def __init__(self, capacity: int = 0):
        super().__init__()
        self.capacity = capacity
        self._stores: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, G, T, W] and [B, G, T, C]; returns all, as views unless gradients flow."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if torch.is_grad_enabled() and (key_states.requires_grad or self.keys.requires_grad):
            self._stores = []  # what was written in place has no gradients
            return super().update(key_states, value_states, *args, **kwargs)
        held = self.get_seq_length()
        total = held + key_states.shape[-2]
        if not self._has_room(total, (self.keys, self.values)):
            room = max(total + _LEAST, int(total * (1 + _SPARE)), self.capacity)
            self._stores = [
                _moved(old, new, held, room)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            ]
        for store, new in zip(self._stores, (key_states, value_states), strict=True):
            store[:, :, held:total] = new
        self.keys, self.values = (store[:, :, :total] for store in self._stores)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget everything, the room included."""
        super().reset()
        self._stores = []

    def _has_room(self, total: int, held: tuple[Tensor, Tensor]) -> bool:
        """Whether the stores still hold what the layer does, and more fits.

        Beams and eviction replace what it holds, also by other views of the same memory; what was
        made in inference mode cannot be written to outside it.
        """
        return bool(self._stores) and all(
            store.shape[-2] >= total
            and store.shape[0] == now.shape[0]
            and store.data_ptr() == now.data_ptr()
            and store.stride() == now.stride()
            and store.is_inference() <= torch.is_inference_mode_enabled()
            for store, now in zip(self._stores, held, strict=True)
        )


class GrowingCache(DynamicCache):
    """A `DynamicCache` whose full-attention layers grow in place.

    Pass it as `past_key_values` to a model or to `generate`. `capacity` tokens, if given, are made
    room for at once; beyond them, or without, room grows by an eighth at a time.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int = 0):
        super().__init__(config=config)
        self.layers = [
            GrowingLayer(capacity) if type(layer) is DynamicLayer else layer
            for layer in self.layers
        ]


def grow(cache: Any, capacity: int = 0) -> Any:
    """The cache that a model made, its full-attention layers growing in place from here on.

    What it holds stays, and so do all other layers; a cache of another class is left as it is.
    """
    if type(cache) is DynamicCache:
        cache.layers = [
            _growing(layer, capacity) if type(layer) is DynamicLayer else layer
            for layer in cache.layers
        ]
    return cache


def _growing(layer: DynamicLayer, capacity: int) -> GrowingLayer:
    grown = GrowingLayer(capacity)
    # States that lie in no store of its own are moved into one at the next token.
    vars(grown).update(vars(layer))
    return grown


def _moved(old: Tensor, new: Tensor, held: int, room: int) -> Tensor:
    """A store for `room` tokens like `new`, with the first `held` taken from `old`."""
    store = torch.empty(*new.shape[:2], room, new.shape[-1], dtype=new.dtype, device=new.device)
    if held:
        store[:, :, :held] = old
    return store
