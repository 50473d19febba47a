"""Pruned attention: one module for every family, built from the family's own.

Copied into checkpoints as remote code with `modeling`.

Shapes: B batch, T tokens, H query heads, G KV heads, E model dim, M slots, W key width, C value
width, P dense pairs.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache_layout import PairEntry
from .layers import AttentionLayer, sliding_window
from .norms import norm_names, normalise_dense, pruned_norms, select_channels
from .rope import AttentionShape, Tables, gather_pairs, pair_tables, rotate_pairs, rotate_step
from .specs import AttentionSpec, QKNorm

ATTENTION = "rap"  # the name of the package's attention implementation
# What some families, in some releases of transformers, call the cache.
_CACHE_ARGUMENTS = ("layer_past", "past_key_value")


class StateCache(Protocol):
    """Requirements of attention on a cache: the number of tokens, and the states to attend to."""

    def get_seq_length(self, layer_idx: int, /) -> int: ...

    def update(self, k: Tensor, v: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...


class RapAttention(nn.Module):
    """Attention over kept pairs only: narrow q, k, v and o, the dense head's softmax scale.

    Built from the family's own attention module, whose settings (scale, dropout, layer index,
    sliding window, biases, sinks) it keeps. `frequency_index` [G, M] says which dense pair's
    frequency each slot rotates at. Cache and attention see W = 2M + N channels of K and C of V.

    Other kinds of attention override `projected_sizes`, `prepare`, `project`, `position`, `rotate`
    or `read_out`. What they say of
    themselves: `fusable`, that a kernel may rotate, cache and attend at once, which takes whole
    pairs cached as they are; `places_by_slot`, that tokens rotate by their slot, whatever position
    the model gives them; `factors`, the linears that a projection has beside its own;
    `reconstruction`, those of them that every step applies to the whole cache; `rotates_cache`,
    that it rotates keys of the whole cache then, by a `rotary` that it is given.
    """

    config: PreTrainedConfig
    layer_idx: int
    frequency_index: Tensor
    kept_channels: Tensor
    fusable = True
    places_by_slot = False
    rotates_cache = False
    factors: Mapping[str, tuple[str, ...]] = {}
    reconstruction: tuple[str, ...] = ()

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: PairEntry,
        norm: QKNorm | None = None,
        norm_mode: str = "constant",
    ):
        nn.Module.__init__(self)
        for name, value in vars(dense).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, parameter in dense.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        spec = spec.of(dense)
        # A factor on keys is one on scores; taken once, should this be cut again.
        self.scaling *= vars(self).pop("key_multiplier", 1.0)
        self.dense_shape, self.spec, self.norm = dense_shape, spec, norm
        self.sliding_window = sliding_window(spec, dense)
        self.eager_attention = _eager_attention(type(dense))
        dropout = getattr(dense, "attention_dropout", 0.0)
        self.attention_dropout = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        self.num_slots, self.key_width = entry.pairs, entry.key_width
        self.value_width, self.num_kept_heads = entry.values, entry.num_heads(dense_shape)
        # What attention functions of transformers repeat keys and values by.
        self.num_key_value_groups = dense_shape.num_heads // self.num_kept_heads
        self.exact_norm = norm is not None and norm_mode == "exact"
        self.norm_rows = entry.norm_rows
        self.fusable &= norm is None and spec.query_scale is None and self.num_slots > 0
        self.projection_widths, self.projection_heads = self.projected_sizes(entry)
        for name, projections in spec.linears().items():
            setattr(self, name, _narrowed(self, getattr(dense, name), projections))
        # Kept here, because a decode step feels what is looked up in every layer.
        self.inputs = [item for item in spec.linears().items() if item[1] != ("o",)]
        self.clip_bound = getattr(self.config, "clip_qkv", None)
        if norm is not None:
            norms = pruned_norms(norm, dense, dense_shape, self.key_width, exact=self.exact_norm)
            for name, module in norms.items():
                self.add_module(name, module)
        device = getattr(dense, spec.projections[3]).weight.device
        slots = torch.arange(self.num_slots, dtype=torch.int32, device=device)
        # Persistent: from_pretrained refills non-persistent buffers with uninitialised memory.
        self.register_buffer("frequency_index", slots.expand(self.num_kept_heads, -1).clone())
        if self.exact_norm:
            kept = torch.arange(self.key_width, dtype=torch.int32, device=device)
            self.register_buffer("kept_channels", kept.expand(self.num_kept_heads, -1).clone())

    def projected_sizes(self, entry: PairEntry) -> tuple[dict[str, int], dict[str, int]]:
        """Rows of a head, and heads, that every projection gives (o: columns that it reads)."""
        dense = self.dense_shape
        projected = dense.head_dim if self.exact_norm else self.key_width + self.norm_rows
        widths = {
            **dict.fromkeys("qk", projected),
            **dict.fromkeys(("v", "o", "gate"), self.value_width),
        }
        heads = {
            **dict.fromkeys(("q", "o", "gate"), dense.num_heads),
            **dict.fromkeys("kv", self.num_kept_heads),
        }
        if self.spec.value_norm is not None:  # which sees all rows: `kv_sharing` says why
            widths["v"] = dense.head_dim
        return widths, heads

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tables | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [B, T, E]; the cache receives rotated keys [B, G, T, W] and values."""
        for name in _CACHE_ARGUMENTS:
            past_key_values = kwargs.pop(name, past_key_values)
        tables, cache = self.prepare(hidden_states, position_embeddings, past_key_values)
        q, k, v, gate = self.project(hidden_states)
        # In these words, because vLLM finds the call of `attend` and its scale in the source.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager_attention
        )
        fuses: Any = getattr(attend, "fuses", None)
        if self.fusable and fuses is not None and fuses(self, (q, k, v), cache, attention_mask):
            output = self._fused_step(attend, (q, k, v), tables, cache, attention_mask)
            weights = None
        else:
            q, k = self.position(q, k, tables)
            if self.spec.query_scale is not None:
                q = self.spec.query_scale(self, q, self.num_cached(cache), kwargs)
            k, v = self.cached(k, v, cache, kwargs)
            if self.sliding_window is not None:
                kwargs["sliding_window"] = self.sliding_window
            if v.shape[-1] > k.shape[-1] and "flash" in self.config._attn_implementation:
                q, k = _as_wide(q, v), _as_wide(k, v)
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
        output = self.read_out(output.reshape(*hidden_states.shape[:-1], -1).contiguous())
        if gate is not None:
            output = output * torch.sigmoid(gate)
        output = getattr(self, self.spec.projections[3])(output)
        if self.training:
            output = nn.functional.dropout(output, getattr(self, "residual_dropout", 0.0))
        return output, weights

    def _arguments(self) -> dict[str, Any]:
        return {argument: getattr(self, attribute) for argument, attribute in self.spec.arguments}

    def _fused_step(
        self,
        attend: Any,
        states: tuple[Tensor, Tensor, Tensor],
        tables: Tables | None,
        cache: StateCache | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Rotation, cache and attention in one call."""
        q, k, v = self._clip(states[0]), self._clip(states[1]), states[2]
        clockwise, pair_tables = self.spec.clockwise, self._pair_tables(tables)
        attended: Tensor = attend.decode_step(
            self, (q, k, v), pair_tables, cache, mask, clockwise=clockwise, **self._arguments()
        )
        return attended

    def prepare(
        self, hidden_states: Tensor, tables: Tables | None, cache: StateCache | None
    ) -> tuple[Tables | None, StateCache | None]:
        """What this layer rotates by and caches in: the model's cos and sin, and its cache."""
        return tables, cache

    def cached(
        self, k: Tensor, v: Tensor, cache: StateCache | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """What is attended to: the new keys and values, behind those the cache has."""
        return (k, v) if cache is None else cache.update(k, v, self.layer_idx)

    def read_out(self, output: Tensor) -> Tensor:
        """What the gate and the output projection take, of what attention gives [B, T, H C]."""
        return output

    def num_cached(self, cache: StateCache | None) -> int:
        """The tokens that this layer's part of a cache holds."""
        return 0 if cache is None else cache.get_seq_length(self.layer_idx)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [B, H, T, W], keys [B, G, T, W], values [B, G, T, C], a gate [B, T, H C] or None.

        Neither normalised nor rotated. Where the norm is exact, q and k have the dense width D.
        """
        projected: dict[str, Tensor] = {}
        for name, projections in self.inputs:
            output = getattr(self, name)(hidden_states)
            if len(projections) == 1:
                projected[projections[0]] = output
            else:
                sizes = [_num_rows(self, projection) for projection in projections]
                projected |= zip(projections, output.split(sizes, dim=-1), strict=True)
        heads = (*hidden_states.shape[:-1], -1)
        q, k, v = (
            projected[projection].view(*heads, self.projection_widths[projection]).transpose(1, 2)
            for projection in "qkv"
        )
        return q, k, self._clip(v), projected.get("gate")

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Normalized and rotated queries [B, H, T, W] and keys [B, G, T, W]."""
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
        self, q: Tensor, k: Tensor, tables: Tables | None, modules: list[nn.Module]
    ) -> tuple[Tensor, Tensor]:
        assert self.norm is not None
        norm, order = self.norm, self.dense_shape.geometry.canonical_order().to(q.device)
        every_pair = torch.arange(self.dense_shape.geometry.num_pairs, device=q.device)
        index = every_pair.expand(k.shape[1], -1)
        q, k = self.rotate(q[..., order], k[..., order], tables, index)
        back = order.argsort()
        q, k = (
            select_channels(normalise_dense(norm, module, x[..., back]), self.kept_channels)
            for module, x in zip(modules, (q, k), strict=True)
        )
        return q, k

    def rotate(
        self, q: Tensor, k: Tensor, tables: Tables | None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate [B, H, T, W] and [B, G, T, W] by every slot's own dense frequency."""
        own, index = index is None, self.frequency_index if index is None else index
        clockwise = self.spec.clockwise
        attend = (
            ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation) if q.is_cuda else None
        )
        kernel = getattr(attend, "rotate", None)
        if kernel is not None:
            rotated = kernel(q, k, *self._pair_tables(tables), index, clockwise=clockwise)
            if rotated is not None:
                return rotated
        # In this order: a compiler must not ask for the length, and so tie its graph to it.
        if own and not torch.compiler.is_compiling() and q.shape[2] == 1:
            states = self.widened(q), self.widened(k)
            turned = rotate_step(*states, *self._pair_tables(tables), index, clockwise=clockwise)
            return turned[0].to(q.dtype), turned[1].to(k.dtype)
        slots = self.slot_tables(tables, index)
        return self.turned(q, *slots), self.turned(k, *slots)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, H, T, W] rotated by the tables [1|B, G, T, M] of its slots, in its own dtype."""
        # Tables may be wider than the states (float32 beside bfloat16): cast back, as the families.
        return rotate_pairs(self.widened(x), cos, sin).to(x.dtype)

    def widened(self, x: Tensor) -> Tensor:
        """States in the dtype that the family rotates them in."""
        return x.float() if self.spec.rope_in_float32 else x

    def slot_tables(self, tables: Tables | None, index: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1|B, G, T, M] of slots with the frequencies `index` [G, M], sin signed."""
        cos, sin = (gather_pairs(table, index) for table in self._pair_tables(tables))
        return cos, -sin if self.spec.clockwise else sin

    def _pair_tables(self, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """cos and sin [1|B, T, P] of the dense pairs, views of the model's own."""
        assert tables is not None
        sections = self.config.rope_parameters.get("mrope_section") if self.spec.by_axis else None
        return pair_tables(tables, self.dense_shape.geometry.num_pairs, self.spec.table, sections)

    def _clip(self, x: Tensor) -> Tensor:
        return x if self.clip_bound is None else x.clamp(-self.clip_bound, self.clip_bound)


def pruned_attention(layer: AttentionLayer) -> RapAttention | None:
    """The attention of a layer, if it is one of this package's."""
    return layer.module if isinstance(layer.module, RapAttention) else None


def _num_rows(attention: RapAttention, projection: str) -> int:
    return attention.projection_heads[projection] * attention.projection_widths[projection]


def _eager_attention(dense: type) -> Callable[..., Any]:
    """A family's attention by single products, for as many KV heads as divide its query heads.

    A family without grouped queries repeats no heads in it, but merged ones are fewer.
    """
    module = sys.modules[dense.__module__]
    own: Callable[..., Any] = module.eager_attention_forward
    return own if hasattr(module, "repeat_kv") else partial(_with_repeated_heads, own)


def _with_repeated_heads(
    attend: Callable[..., Any],
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *args: Any,
    **more: Any,
) -> Any:
    groups = module.num_key_value_groups
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return attend(module, q, k, v, *args, **more)


def _as_wide(x: Tensor, v: Tensor) -> Tensor:
    """Queries or keys with zeros up to the width of values, to which flash attention cuts those."""
    return nn.functional.pad(x, (0, v.shape[-1] - x.shape[-1]))


def _narrowed(attention: RapAttention, old: nn.Linear, projections: tuple[str, ...]) -> nn.Linear:
    rows, hidden = (
        sum(_num_rows(attention, projection) for projection in projections),
        old.in_features,
    )
    sizes = (rows, attention.dense_shape.hidden_size) if projections == ("o",) else (hidden, rows)
    like: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    return nn.Linear(sizes[0], sizes[1], bias=old.bias is not None, **like)
