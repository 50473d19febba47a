"""The attention implementation "rap": SDPA for prefill, one kernel per layer for decode.

A model takes it like any other (`attn_implementation="rap"`, dense models too). On CUDA with Triton
one query per sequence goes to `decode_attention`, with a pruned model and a static cache to the
step that also rotates and writes the cache. Everywhere else a token takes `grouped_attention`,
which copies nothing of the cache, and several take SDPA.

Shapes: B batch, H query heads, G KV heads, T tokens, S slots, W key and C value width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention import ATTENTION
from .availability import takes_triton
from .decode_attention import decode_attention, decode_step
from .decode_attention.reference import attend
from .grouped import grouped_attention
from .rope_pairs import rope_pairs


def register_attention() -> None:
    """Make transformers know it; pruned models take it where SDPA would be the default."""
    AttentionInterface.register(ATTENTION, RapAttentionInterface())
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class RapAttentionInterface:
    """The registered object; pruned attention also asks it for `decode_step` and `rotate`."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of rotated states, [B, T, H, C], as every attention function of transformers.

        Unlike SDPA it obeys `softcap` and the sinks `s_aux`, for prefill at eager's cost.
        """
        scale = key.shape[-1] ** -0.5 if scaling is None else scaling
        if query.shape[2] == 1 and dropout == 0.0 and _is_shared(attention_mask):
            if takes_triton(query) and not _needs_grad(query, key, value):
                keep = None if attention_mask is None else attention_mask[:, 0, 0]
                settings = {"scale": scale, "keep_BS": keep, "softcap": softcap, "sinks_H": s_aux}
                output = decode_attention(query[:, :, 0], key, value, **settings)  # type: ignore[arg-type]
                return output[:, None], None
            if softcap is None and s_aux is None:
                rows_BGRW = query.squeeze(2).unflatten(1, (key.shape[1], -1))
                output = grouped_attention(rows_BGRW, key, value, attention_mask, scale)
                return output.flatten(1, 2)[:, None], None
        if softcap is None and s_aux is None:
            attended = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs
            )
            return attended[0], None
        if attention_mask is None and query.shape[2] > 1:
            # The mask is left out where each token sees those up to its own, from slot 0, and where
            # a single token sees all slots.
            attention_mask = _causal(query.shape[2], key.shape[2], query.device)
        output = attend(
            query,
            key,
            value,
            scale=scale,
            keep_B1TS=attention_mask,
            softcap=softcap,
            sinks_H=s_aux,
            dropout=dropout,
        )
        return output.transpose(1, 2), None

    def fuses(
        self,
        module: Any,
        states: tuple[Tensor, Tensor, Tensor],
        cache: Cache | None,
        attention_mask: Tensor | None,
    ) -> bool:
        """Whether `decode_step` runs here.

        It does for one token per sequence on CUDA, without a gradient or dropout, on an initialised
        `StaticLayer` of full length.
        """
        return (
            takes_triton(states[0])
            and states[0].shape[2] == 1
            and _static_layer(cache, module.layer_idx) is not None
            and _is_shared(attention_mask)
            and not _needs_grad(*states)
            and not (module.training and module.attention_dropout)
        )

    def decode_step(
        self,
        module: Any,
        states: tuple[Tensor, Tensor, Tensor],
        tables: tuple[Tensor, Tensor],
        cache: Any,
        attention_mask: Tensor | None,
        *,
        clockwise: bool,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """Rotation, cache write and attention in one, [B, 1, H, C], where `fuses` allows it.

        Advances the cache as its `update` would.
        """
        q, k, v = states
        layer = cache.layers[module.layer_idx]
        output = decode_step(
            (q[:, :, 0], k[:, :, 0], v[:, :, 0]),
            tables,
            module.frequency_index,
            (layer.keys, layer.values),
            layer.cumulative_length.reshape(1),
            scale=module.scaling,
            keep_BS=None if attention_mask is None else attention_mask[:, 0, 0],
            softcap=softcap,
            sinks_H=s_aux,
            clockwise=clockwise,
        )
        layer.cumulative_length.add_(1)
        return output[:, None]

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, index: Tensor, *, clockwise: bool
    ) -> tuple[Tensor, Tensor] | None:
        """The rotation by the kernel, or None where it does not run."""
        if not takes_triton(q):
            return None
        return rope_pairs(q, k, cos, sin, index, clockwise=clockwise)


def _static_layer(cache: Cache | None, index: int) -> StaticLayer | None:
    """The cache of one layer, if it is a full and initialised static one."""
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    return layer if type(layer) is StaticLayer and layer.is_initialized else None


def _is_shared(mask: Tensor | None) -> bool:
    """Whether a mask is one of truth values for all heads, as transformers makes them."""
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _causal(num_tokens: int, num_slots: int, device: torch.device) -> Tensor:
    tokens, slots = torch.arange(num_tokens, device=device), torch.arange(num_slots, device=device)
    return (slots <= tokens[:, None])[None, None]
