"""Attention over single key channels: the two ways a channel without its partner can rotate.

Shapes: B batch, T tokens, H query heads, G KV heads, W kept key channels, M = W/2 pairs they are
taken for, P dense pairs.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention import RapAttention, StateCache
from ..cache_layout import CacheLayout, Entry, PairEntry
from ..rope import AttentionShape, Tables
from ..specs import AttentionSpec
from .base import Kind


@dataclass(frozen=True)
class ReindexedEntry(Entry):
    """As of pairs, and the `frequencies` [M] and the `scaling` of cos and sin at head dim W.

    These stay in the config, where no cast can round them.
    """

    kind: ClassVar[str] = "reindexed"

    pairs: int
    free: int
    values: int
    frequencies: list[float]
    scaling: float

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """Kept channels, head by head."""
        return CacheLayout(shape.num_kv_heads, 2 * self.pairs + self.free, self.values)


@dataclass(frozen=True)
class IndexedEntry(Entry):
    """Kept channels of every head: `keys` W and `values` C."""

    kind: ClassVar[str] = "indexed"

    keys: int
    values: int

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """Kept channels, head by head."""
        return CacheLayout(shape.num_kv_heads, self.keys, self.values)


class ReindexedAttention(RapAttention):
    """Kept channels rotate as a narrower head would: slot j at the j-th frequency of that head."""

    places_by_slot = True

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: ReindexedEntry,
    ):
        sizes = PairEntry(entry.pairs, entry.free, entry.values)
        super().__init__(dense, spec, dense_shape, sizes)
        self.frequencies, self.rotary_scaling = entry.frequencies, entry.scaling

    def prepare(
        self, hidden_states: Tensor, tables: Tables | None, cache: StateCache | None
    ) -> tuple[Tables, StateCache | None]:
        """cos and sin of separate frequencies.

        Positions are slots of the cache: pairs are whole, so attention sees distances only.
        """
        # The family's tables tell the precision that it rotates in: ernie4_5 keeps float32.
        like = tables[0] if isinstance(tables, tuple) else hidden_states
        seen = int(self.num_cached(cache))
        return self._tables(seen, seen + hidden_states.shape[1], like), cache

    def _tables(self, start: int, stop: int, like: Tensor) -> Tables:
        """cos and sin in the family's layout, made in float32 as transformers makes them.

        As wide as the dense head's, which rotation counts on; no slot reads beyond column M.
        """
        exact: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
        positions = torch.arange(start, stop, **exact)
        angles = (positions[:, None] * torch.tensor(self.frequencies, **exact))[None]
        more = self.dense_shape.geometry.num_pairs - angles.shape[-1]
        angles = nn.functional.pad(angles, (0, more))
        cos, sin = angles.cos() * self.rotary_scaling, angles.sin() * self.rotary_scaling
        if self.spec.table == "complex":
            return torch.complex(cos, sin)
        if self.spec.table == "interleaved":
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return cos.to(like.dtype), sin.to(like.dtype)


class IndexedAttention(RapAttention):
    """Kept channels rotate at their own frequencies, as if missing partners were zero.

    `kept_channels` [G, W] are dense channels in canonical order, ascending; `frequency_index`
    [G, W] is the pair of each. A channel without its partner becomes x cos: what it would give to
    its partner is lost, so distances alone no longer decide a logit.
    """

    fusable = False

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: IndexedEntry,
    ):
        pairs, free = divmod(entry.keys, 2)
        sizes = PairEntry(pairs, free, entry.values)
        super().__init__(dense, spec, dense_shape, sizes)
        index = torch.zeros(
            dense_shape.num_kv_heads,
            entry.keys,
            dtype=torch.int32,
            device=self.frequency_index.device,
        )
        self.register_buffer("frequency_index", index)
        self.register_buffer("kept_channels", index.clone())

    def rotate(
        self, q: Tensor, k: Tensor, tables: Tables | None, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate kept channels of [B, H, T, W] and [B, G, T, W], dropped ones being zero."""
        geometry = self.dense_shape.geometry
        if not geometry.num_pairs:
            return q, k
        cos, sin = self.slot_tables(tables, self.frequency_index)
        partner_GW, sign_GW = partners(self.kept_channels, geometry.num_pairs)
        free_GW = self.kept_channels >= geometry.rotary_dim
        cos = torch.where(free_GW[:, None], torch.ones_like(cos), cos)
        sin = sin * sign_GW[:, None].to(sin.dtype)
        q_out, k_out = (self._exchanged(x, cos, sin, partner_GW) for x in (q, k))
        return q_out, k_out

    def _exchanged(self, x_BHTW: Tensor, cos: Tensor, sin: Tensor, partner_GW: Tensor) -> Tensor:
        x = self.widened(x_BHTW).unflatten(1, (len(partner_GW), -1))
        other = x.gather(-1, partner_GW[:, None, None].expand(x.shape))
        turned = x * cos.unsqueeze(2) + other * sin.unsqueeze(2)
        return turned.flatten(1, 2).to(x_BHTW.dtype)


def partners(kept_GW: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Where every kept channel's partner is, LongTensor [G, W], and the sign of its sine.

    The sign is -1 for first halves and +1 for second ones, and 0 for orphans and free channels,
    whose partner is given as 0.
    """
    kept = kept_GW.long().contiguous()
    first, rotates = kept < num_pairs, kept < 2 * num_pairs
    wanted = torch.where(first, kept + num_pairs, kept - num_pairs)
    position = torch.searchsorted(kept, wanted).clamp_max(kept.shape[1] - 1)
    whole = rotates & (kept.gather(1, position) == wanted)
    sign = torch.where(first, -1, 1) * whole
    return position * whole, sign


REINDEXED = Kind(
    ReindexedEntry,
    ReindexedAttention,
    unsupported={
        "vllm": "tokens rotate by their place in the cache, which in vLLM holds many requests",
        "plain": "no plain config describes the frequencies of a narrower head in a wider one",
    },
)
INDEXED = Kind(
    IndexedEntry,
    IndexedAttention,
    unsupported={
        "vllm": "channels without their partner rotate by themselves, which vLLM's rotation of "
        "whole pairs cannot do",
        "plain": "no plain config describes channels that rotate without their partner",
    },
)
