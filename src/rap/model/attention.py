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

from .errors import UnsupportedModelError
from .families import AttentionSpec, QKNorm
from .layers import sliding_window
from .norms import KeptNorm, normalise_dense, select_channels
from .rope import gather_pairs, pair_table, rotate_pairs, rotate_step

# What some families, in some releases of transformers, call the cache.
CACHE_ARGUMENTS = ("layer_past", "past_key_value")


class RapAttention(nn.Module):
    """Attention over kept pairs only: narrow q, k, v and o, the dense head's softmax scale.

    Built from the family's own attention module, whose settings (scale, dropout, layer index,
    sliding window, biases, sinks) it keeps. `frequency_index` [G, M] says which dense pair's
    frequency each slot rotates at. Cache and attention see W = 2M + N channels of K and C of V.
    """

    config: Any
    frequency_index: Tensor
    kept_channels: Tensor

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: Any,
        widths: Mapping,
        norm: QKNorm | None = None,
        norm_mode: str = "constant",
    ):
        nn.Module.__init__(self)
        for name, value in vars(dense).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, parameter in dense.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.dense_shape, self.spec, self.norm = dense_shape, spec, norm
        self.sliding_window = sliding_window(spec, dense)
        self.eager_attention = sys.modules[type(dense).__module__].eager_attention_forward
        dropout = getattr(dense, "attention_dropout", 0.0)
        self.attention_dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        self.num_slots, self.value_width = widths["pairs"], widths["values"]
        self.key_width = 2 * widths["pairs"] + widths["free"]
        self.exact_norm = norm is not None and norm_mode == "exact"
        self.norm_rows = widths.get("norm_rows", 0)
        projected = dense_shape.head_dim if self.exact_norm else self.key_width + self.norm_rows
        self.role_widths = {
            **dict.fromkeys("qk", projected),
            **dict.fromkeys(("v", "o", "gate"), self.value_width),
        }
        for name, roles in spec.linears().items():
            _replace_linear(self, name, getattr(dense, name), roles)
        # Kept here, because a decode step feels what is looked up in every layer.
        self.inputs = [item for item in spec.linears().items() if item[1] != ("o",)]
        self.clip_bound = getattr(self.config, "clip_qkv", None)
        _take_norms(self, dense)
        device = getattr(dense, spec.projections[3]).weight.device
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=device)
        # Persistent: from_pretrained refills non-persistent buffers with uninitialised memory.
        groups = dense_shape.num_kv_heads
        self.register_buffer("frequency_index", slots.expand(groups, -1).clone())
        if self.exact_norm:
            kept = torch.arange(self.key_width, dtype=torch.int32, device=device)
            self.register_buffer("kept_channels", kept.expand(groups, -1).clone())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [B, T, E]; the cache receives rotated keys [B, G, T, W] and values."""
        for name in CACHE_ARGUMENTS:
            past_key_values = kwargs.pop(name, past_key_values)
        q, k, v, gate = self.project(hidden_states)
        weights, attend = None, self._implementation()
        output = self._fused_step(
            attend, (q, k, v), position_embeddings, past_key_values, attention_mask
        )
        if output is None:
            q, k = self.position(q, k, position_embeddings)
            if self.spec.query_scale is not None:
                cache = past_key_values
                cached = 0 if cache is None else cache.get_seq_length(self.layer_idx)
                q = self.spec.query_scale(self, q, cached, kwargs)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            if self.sliding_window is not None:
                kwargs["sliding_window"] = self.sliding_window
            output, weights = attend(
                self,
                q,
                k,
                v,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **self._arguments(),
                **kwargs,
            )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        if gate is not None:
            output = output * torch.sigmoid(gate)
        output = getattr(self, self.spec.projections[3])(output)
        if self.training:
            output = nn.functional.dropout(output, getattr(self, "residual_dropout", 0.0))
        return output, weights

    def _implementation(self) -> Any:
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager_attention
        )

    def _arguments(self) -> dict[str, Any]:
        return {argument: getattr(self, attribute) for argument, attribute in self.spec.arguments}

    def _fused_step(
        self,
        attend: Any,
        states: tuple[Tensor, Tensor, Tensor],
        tables: Any,
        cache: Any,
        mask: Tensor | None,
    ) -> Tensor | None:
        """Rotation, cache and attention in one call, if the implementation offers that here."""
        fuses = getattr(attend, "fuses", None)
        changed = self.norm is not None or self.spec.query_scale is not None
        if fuses is None or changed or self.num_slots == 0:
            return None
        if not fuses(self, states, cache, mask):
            return None
        q, k, v = self._clip(states[0]), self._clip(states[1]), states[2]
        cos, sin = self._pair_tables(tables)
        arguments = self._arguments()
        found: Tensor = attend.decode_step(
            self, (q, k, v), (cos, sin), cache, mask, clockwise=self.spec.clockwise, **arguments
        )
        return found

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [B, H, T, W], keys [B, G, T, W], values [B, G, T, C], a gate [B, T, H C] or None.

        Neither normalised nor rotated. Where the norm is exact, q and k have the dense width D.
        """
        found: dict[str, Tensor] = {}
        for name, roles in self.inputs:
            output = getattr(self, name)(hidden_states)
            if len(roles) == 1:
                found[roles[0]] = output
            else:
                sizes = [_num_rows(self, role) for role in roles]
                found |= zip(roles, output.split(sizes, dim=-1), strict=True)
        heads = (*hidden_states.shape[:-1], -1)
        q, k, v = (
            found[role].view(*heads, self.role_widths[role]).transpose(1, 2) for role in "qkv"
        )
        return q, k, self._clip(v), found.get("gate")

    def position(self, q: Tensor, k: Tensor, tables: Any) -> tuple[Tensor, Tensor]:
        """Normalised and rotated queries [B, H, T, W] and keys [B, G, T, W]."""
        norm = self.norm
        if norm is None:
            q, k = self._clip(q), self._clip(k)
            return self.rotate(q, k, tables) if self.num_slots else (q, k)
        modules = [getattr(self, name) for name in norm_names(norm, exact=self.exact_norm)]
        if self.exact_norm and norm.after_rotation:
            return self._rotate_then_norm(q, k, tables, modules)
        if self.exact_norm:
            q, k = (
                select_channels(normalise_dense(norm, module, x), self.kept_channels)
                for module, x in zip(modules, (q, k), strict=True)
            )
        elif not norm.after_rotation:
            q, k = modules[0](q), modules[1](k)
        q, k = self._clip(q), self._clip(k)
        if self.num_slots:
            q, k = self.rotate(q, k, tables)
        if norm.after_rotation:
            q, k = modules[0](q), modules[1](k)
        return q, k

    def _rotate_then_norm(
        self, q: Tensor, k: Tensor, tables: Any, modules: list[nn.Module]
    ) -> tuple[Tensor, Tensor]:
        assert self.norm is not None
        norm, order = self.norm, self.dense_shape.geometry.canonical_order().to(q.device)
        every_pair = torch.arange(self.dense_shape.geometry.num_pairs, device=q.device)
        q, k = self.rotate(q[..., order], k[..., order], tables, every_pair[None])
        back = order.argsort()
        q, k = (
            select_channels(normalise_dense(norm, module, x[..., back]), self.kept_channels)
            for module, x in zip(modules, (q, k), strict=True)
        )
        return q, k

    def rotate(
        self, q: Tensor, k: Tensor, tables: Any, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate [B, H, T, W] and [B, G, T, W] by every slot's own dense frequency."""
        own, index = index is None, self.frequency_index if index is None else index
        cos, sin = self._pair_tables(tables)
        kernel = getattr(self._implementation(), "rotate", None) if q.is_cuda else None
        if kernel is not None:
            rotated = kernel(q, k, cos, sin, index, clockwise=self.spec.clockwise)
            if rotated is not None:
                return rotated
        # Tables may be wider than the states (float32 beside bfloat16): cast back, as the families.
        q_in, k_in = (q.float(), k.float()) if self.spec.rope_in_float32 else (q, k)
        if own and q.shape[2] == 1 and not torch.compiler.is_compiling():
            clockwise = self.spec.clockwise
            q_out, k_out = rotate_step(q_in, k_in, cos, sin, index, clockwise=clockwise)
        else:
            cos, sin = (gather_pairs(table, index) for table in (cos, sin))
            sin = -sin if self.spec.clockwise else sin
            q_out, k_out = rotate_pairs(q_in, cos, sin), rotate_pairs(k_in, cos, sin)
        return q_out.to(q.dtype), k_out.to(k.dtype)

    def _pair_tables(self, tables: Any) -> tuple[Tensor, Tensor]:
        """cos and sin [1|B, T, P] of the dense pairs, views of the model's own."""
        pairs, kind = self.dense_shape.geometry.num_pairs, self.spec.table
        cos, sin = (tables.real, tables.imag) if kind == "complex" else tables
        return pair_table(cos, pairs, kind), pair_table(sin, pairs, kind)

    def _clip(self, x: Tensor) -> Tensor:
        bound = self.clip_bound
        return x if bound is None else x.clamp(-bound, bound)


def norm_names(norm: QKNorm, *, exact: bool) -> tuple[str, str]:
    """Names of the query's and the key's norm; one shared by both is two where they are cut."""
    return norm.names if exact or norm.names[0] != norm.names[1] else ("q_norm", "k_norm")


def _num_rows(attention: Any, role: str) -> int:
    shape = attention.dense_shape
    heads = shape.num_kv_heads if role in "kv" else shape.num_heads
    return heads * attention.role_widths[role]


def _replace_linear(attention: Any, name: str, old: nn.Linear, roles: tuple[str, ...]) -> None:
    rows, hidden = sum(_num_rows(attention, role) for role in roles), old.in_features
    sizes = (rows, attention.dense_shape.hidden_size) if roles == ("o",) else (hidden, rows)
    like: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    setattr(attention, name, nn.Linear(sizes[0], sizes[1], bias=old.bias is not None, **like))


def _take_norms(attention: Any, dense: nn.Module) -> None:
    norm, shape = attention.norm, attention.dense_shape
    if norm is None:
        return
    if norm.one_module_per_head and not attention.exact_norm:
        raise UnsupportedModelError(
            "this family has a norm module per head, which cannot be cut: plan with qk_norm='exact'"
        )
    heads = (shape.num_heads, shape.num_kv_heads)
    names = norm_names(norm, exact=attention.exact_norm)
    for name, old, count in zip(names, norm.names, heads, strict=True):
        module = getattr(dense, old)
        if not attention.exact_norm:
            module = KeptNorm(norm, module, count, attention.key_width, shape.head_dim)
        attention.add_module(name, module)
