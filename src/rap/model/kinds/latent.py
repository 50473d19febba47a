"""Attention over a low-rank latent: what PaLU, SVD-LLM, EliteKV and TransMLA cache and multiply by.

The cache holds the latents alone. At every step keys are reconstructed from all of them, rotated
and attended to, then thrown away: that work is what these methods pay for their cache.

Shapes: B batch, T new tokens, S cached tokens, H query heads, G KV heads, N groups of KV heads,
D head dim, E model dim, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..attention import RapAttention, StateCache
from ..cache_layout import CacheLayout, Entry, PairEntry
from ..norms import norm_names, normalise_dense
from ..rope import AttentionShape, Tables
from ..specs import AttentionSpec, QKNorm
from .base import Kind


class ReconstructingAttention(RapAttention):
    """RapAttention whose cache holds less than keys and values: `expand` makes these from it."""

    rotary: Callable[[Tensor, Tensor], Tables]
    fusable = False
    rotates_cache = True

    def prepare(
        self, hidden_states: Tensor, tables: Tables | None, cache: StateCache | None
    ) -> tuple[Tables | None, StateCache]:
        """The cache receives what `project` and `position` give for k and v, and expands it."""
        return tables, _ExpandedCache(self, cache)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [B, H, T, W], and what `k_proj` and `v_proj` give as one head each; no gate."""
        query, key, value, _ = (getattr(self, name) for name in self.spec.projections)
        q = query(hidden_states).unflatten(-1, (-1, self.key_width)).transpose(1, 2)
        return q, key(hidden_states)[:, None], value(hidden_states)[:, None], None

    def expand(
        self, k: Tensor, v: Tensor, start: int, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, G, S, D] and values [B, G, S, C] of the cache; its first token is in `start`.

        `tables` are the cos and sin of all of it, given where there is nothing but the new tokens.
        """
        raise NotImplementedError

    def linear(self, num_inputs: int, num_outputs: int, *, bias: bool = False) -> nn.Linear:
        """A linear of the dtype and device of the projections."""
        like = getattr(self, self.spec.projections[0]).weight
        return nn.Linear(num_inputs, num_outputs, bias=bias, device=like.device, dtype=like.dtype)


class _ExpandedCache:
    """A cache that stores what it is given, and gives back keys and values made of all of it."""

    def __init__(
        self,
        attention: ReconstructingAttention,
        cache: StateCache | None,
        tables: Tables | None = None,
    ):
        self.attention, self.cache, self.tables = attention, cache, tables
        self.cached = int(attention.num_cached(cache))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cached

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        seen = self.cached + k.shape[2]
        if self.cache is not None:
            k, v = self.cache.update(k, v, layer_idx)
        # A sliding window has lost its first tokens; a static cache is longer than what it saw.
        return self.attention.expand(k, v, max(0, seen - k.shape[2]), self.tables)


@dataclass(frozen=True)
class LatentEntry(Entry):
    """KV heads in N `groups`, with ranks r of a group's `keys` and `values`.

    With `fold` the output projection reads the values' latents (PaLU): it has H r inputs, for every
    head reads its whole group. Otherwise values are reconstructed like keys (SVD-LLM).
    """

    kind: ClassVar[str] = "latent"

    groups: int
    fold: bool
    keys: int
    values: int

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """The latents of all groups side by side, as one head."""
        return CacheLayout(1, self.groups * self.keys, self.groups * self.values)


class LatentAttention(ReconstructingAttention):
    """PaLU and SVD-LLM: a latent of every group of KV heads for keys and for values.

    With QK-norm the family's own modules normalize queries and reconstructed keys. Rows of W_q and
    of `k_up` are then in the order of the dense model, and `kept_channels` [G, D] is the canonical
    order.
    """

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: LatentEntry,
        norm: QKNorm | None = None,
        norm_mode: str = "exact",
    ):
        geometry, dim = dense_shape.geometry, dense_shape.head_dim
        values = entry.values if entry.fold else dim
        sizes = PairEntry(geometry.num_pairs, geometry.num_free, values)
        # The mode is that of cut heads, and these are whole.
        super().__init__(dense, spec, dense_shape, sizes, norm, "exact")
        self.num_groups, self.key_rank = entry.groups, entry.keys
        self.value_rank, self.fold = entry.values, entry.fold
        _, key, value, output = (getattr(dense, name) for name in spec.projections)
        hidden, rows = key.in_features, dense_shape.num_kv_heads // self.num_groups * dim
        names = spec.projections
        setattr(self, names[1], self.linear(hidden, self.num_groups * self.key_rank))
        setattr(self, names[2], self.linear(hidden, self.num_groups * self.value_rank))
        groups, biased = range(self.num_groups), key.bias is not None
        self.k_up = nn.ModuleList([self.linear(self.key_rank, rows, bias=biased) for _ in groups])
        self.factors = {"k": tuple(f"k_up.{group}" for group in groups)}
        biased = value.bias is not None
        if self.fold:
            wide = dense_shape.num_heads * self.value_rank
            biased = biased or output.bias is not None
            setattr(self, names[3], self.linear(wide, output.out_features, bias=biased))
        else:
            ups = [self.linear(self.value_rank, rows, bias=biased) for _ in groups]
            self.v_up = nn.ModuleList(ups)
            self.factors |= {"v": tuple(f"v_up.{group}" for group in groups)}
        self.reconstruction = tuple(name for names in self.factors.values() for name in names)

    def prepare(
        self, hidden_states: Tensor, tables: Tables | None, cache: StateCache | None
    ) -> tuple[Tables | None, StateCache]:
        """Tables of the slots in the cache: attention sees distances only.

        Cached keys have no other place, and padding on the left shifts queries and keys alike.
        Without a cache every key has the position that the model gives it, as its query.
        """
        if cache is None:
            return tables, _ExpandedCache(self, None, tables)
        cached = self.num_cached(cache)
        expanded = _ExpandedCache(self, cache)
        return self._table(hidden_states, cached, hidden_states.shape[1]), expanded

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Normalized and rotated queries; latents cannot rotate."""
        return self._placed(q, tables, 0), k

    def expand(
        self, k: Tensor, v: Tensor, start: int, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys [B, G, S, D]; values [B, G, S, D], or every head's latent [B, G, S, r]."""
        keys = self._up(self.k_up, k)
        tables = self._table(keys, start, keys.shape[2]) if tables is None else tables
        keys = self._placed(keys, tables, 1)
        if not self.fold:
            return keys, self._up(self.v_up, v)
        latents_BNSR = v[:, 0].unflatten(-1, (self.num_groups, -1)).transpose(1, 2)
        return keys, latents_BNSR.repeat_interleave(keys.shape[1] // self.num_groups, 1)

    def _up(self, factors: nn.ModuleList, latent_B1SR: Tensor) -> Tensor:
        parts = latent_B1SR[:, 0].chunk(self.num_groups, dim=-1)
        rows = torch.cat([up(part) for up, part in zip(factors, parts, strict=True)], dim=-1)
        return rows.unflatten(-1, (-1, self.dense_shape.head_dim)).transpose(1, 2)

    def _table(self, like: Tensor, start: int, count: int) -> Tables:
        positions = torch.arange(start, start + count, device=like.device)
        return self.rotary(like, positions[None])

    def _placed(self, x_BHTD: Tensor, tables: Tables | None, which: int) -> Tensor:
        """Queries (0) or keys (1) rotated, in canonical order, and normalized if the family does.

        Norms take the channels in the order of the dense model.
        """
        if self.norm is None:
            return self._turn(x_BHTD, tables)
        module = getattr(self, norm_names(self.norm, exact=True)[which])
        order = self.kept_channels[0].long()
        if not self.norm.after_rotation:
            x = normalise_dense(self.norm, module, x_BHTD)
            return self._turn(x[..., order], tables)
        x = self._turn(x_BHTD[..., order], tables)[..., order.argsort()]
        return normalise_dense(self.norm, module, x)[..., order]

    def _turn(self, x_BHTD: Tensor, tables: Tables | None) -> Tensor:
        if not self.num_slots:
            return x_BHTD
        # Every head has all pairs in order: one table serves them all.
        return self.turned(x_BHTD, *self.slot_tables(tables, self.frequency_index[:1]))


KIND = Kind(
    LatentEntry,
    LatentAttention,
    normed=True,
    unsupported={
        "vllm": "vLLM caches keys and values per head, and here keys are reconstructed from a "
        "latent at every decode step",
        "plain": "no plain config describes keys that are reconstructed from a latent",
    },
)
