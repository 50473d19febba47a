"""Pruned attention: one module for every family, built from the family's own.

Copied into checkpoints as remote code with `modeling`.

Shapes: B batch, T tokens, H query heads, G KV heads, E model dim, M slots, W key width, C value
width, P dense pairs.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .families import sliding_window
from .rope import gather_pairs, pair_table, rotate_pairs
from .specs import AttentionSpec


class RapAttention(nn.Module):
    """Attention over kept pairs only: narrow q, k, v and o, the dense head's softmax scale.

    Built from the family's own attention module, whose settings (scale, dropout, layer index,
    sliding window, biases, sinks) it keeps. `frequency_index` [G, M] says which dense pair's
    frequency each slot rotates at. Cache and attention see W = 2M + N channels of K and C of V.
    """

    def __init__(self, dense: nn.Module, spec: AttentionSpec, dense_shape: Any, widths: Mapping):
        nn.Module.__init__(self)
        for name, value in vars(dense).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, parameter in dense.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.dense_shape = dense_shape
        self.spec = spec
        self.sliding_window = sliding_window(spec, dense)
        self.eager_attention = sys.modules[type(dense).__module__].eager_attention_forward
        self.num_slots, self.value_width = widths["pairs"], widths["values"]
        self.key_width = 2 * widths["pairs"] + widths["free"]
        for name, (inputs, outputs) in self._projection_sizes().items():
            old = getattr(dense, name)
            like = {"device": old.weight.device, "dtype": old.weight.dtype}
            setattr(self, name, nn.Linear(inputs, outputs, bias=old.bias is not None, **like))
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=old.weight.device)
        # Persistent: from_pretrained refills non-persistent buffers with uninitialised memory.
        groups = dense_shape.num_kv_heads
        self.register_buffer("frequency_index", slots.expand(groups, -1).clone())

    def _projection_sizes(self) -> dict[str, tuple[int, int]]:
        shape, name = self.dense_shape, self.spec.projection_names()
        heads, groups, hidden = shape.num_heads, shape.num_kv_heads, shape.hidden_size
        return {
            name["q"]: (hidden, heads * self.key_width),
            name["k"]: (hidden, groups * self.key_width),
            name["v"]: (hidden, groups * self.value_width),
            name["o"]: (heads * self.value_width, hidden),
        }

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [B, T, E]; the cache receives rotated keys [B, G, T, W] and values."""
        q, k, v = self.project(hidden_states)
        if self.num_slots:
            q, k = self.rotate(q, k, position_embeddings)
        if self.spec.query_scale is not None:
            cached = past_key_values.get_seq_length(self.layer_idx) if past_key_values else 0
            q = self.spec.query_scale(self, q, cached, kwargs)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)

        if self.sliding_window is not None:
            kwargs["sliding_window"] = self.sliding_window
        for argument, attribute in self.spec.arguments:
            kwargs[argument] = getattr(self, attribute)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager_attention
        )
        output, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=getattr(self, "attention_dropout", 0.0) if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        output = getattr(self, self.spec.projections[3])(output)
        residual_dropout = getattr(self, "residual_dropout", 0.0)
        return nn.functional.dropout(output, residual_dropout, self.training), weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, W], keys [B, G, T, W] and values [B, G, T, C], not yet rotated."""
        q_name, k_name, v_name, _ = self.spec.projections
        parts = [getattr(self, name)(hidden_states) for name in (q_name, k_name, v_name)]
        clip = getattr(self.config, "clip_qkv", None)
        if clip is not None:
            parts = [part.clamp(-clip, clip) for part in parts]
        widths = (self.key_width, self.key_width, self.value_width)
        q, k, v = (
            part.unflatten(-1, (-1, width)).transpose(1, 2)
            for part, width in zip(parts, widths, strict=True)
        )
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotate [B, H, T, W] and [B, G, T, W] by every slot's own dense frequency."""
        pairs, index = self.dense_shape.geometry.num_pairs, self.frequency_index
        cos, sin = (gather_pairs(pair_table(t, pairs, self.spec.table), index) for t in tables)
        if not self.spec.rope_in_float32:
            return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        cos, sin = cos.float(), sin.float()
        return (
            rotate_pairs(q.float(), cos, sin).to(q.dtype),
            rotate_pairs(k.float(), cos, sin).to(k.dtype),
        )
