"""TransMLA's attention: one rotated key that all heads share, and one latent for all the rest.

Shapes: B batch, T new tokens, S cached tokens, H query heads, G KV heads, D head dim, E model dim,
M rotated slots, c rank of the latent.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..cache_layout import CacheLayout, Entry, PairEntry
from ..rope import AttentionShape, Tables
from ..specs import AttentionSpec
from .base import Kind
from .latent import ReconstructingAttention


@dataclass(frozen=True)
class MlaEntry(Entry):
    """`slots` M that rotate, shared by all heads, and one `latent` c for all else."""

    kind: ClassVar[str] = "mla"

    slots: int
    latent: int

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """One head: the shared slots, and the latent."""
        return CacheLayout(1, 2 * self.slots, self.latent)


class MlaAttention(ReconstructingAttention):
    """Every query head reads the shared rotated key, and D channels that never rotate.

    `q_proj` gives every head's 2M rotated channels, then its D others; `k_proj` the shared slots
    and `v_proj` the latent, of which `k_up` and `v_up` make the others of keys, and the values.
    `frequency_index` [G, M], the same for every head.
    """

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: MlaEntry,
    ):
        dim, heads = dense_shape.head_dim, dense_shape.num_kv_heads
        super().__init__(dense, spec, dense_shape, PairEntry(entry.slots, dim, dim))
        _, key, value, _ = (getattr(dense, name) for name in spec.projections)
        hidden, biased = key.in_features, key.bias is not None
        setattr(self, spec.projections[1], self.linear(hidden, 2 * entry.slots, bias=biased))
        setattr(self, spec.projections[2], self.linear(hidden, entry.latent))
        self.k_up = self.linear(entry.latent, heads * dim, bias=biased)
        self.v_up = self.linear(entry.latent, heads * dim, bias=value.bias is not None)
        self.factors, self.reconstruction = {"k": ("k_up",), "v": ("v_up",)}, ("k_up", "v_up")

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Slots rotated, by one table for all heads."""
        slots = self.slot_tables(tables, self.frequency_index[:1])
        return self.turned(q, *slots), self.turned(k, *slots)

    def expand(
        self, k: Tensor, v: Tensor, start: int, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, G, S, 2M + D], the shared slots first, and values [B, G, S, D]."""
        heads, latent_BSC = self.dense_shape.num_kv_heads, v[:, 0]
        others, values = (
            up(latent_BSC).unflatten(-1, (heads, -1)).transpose(1, 2)
            for up in (self.k_up, self.v_up)
        )
        return torch.cat([k.expand(-1, heads, -1, -1), others], dim=-1), values


KIND = Kind(
    MlaEntry,
    MlaAttention,
    unsupported={
        "vllm": "vLLM's latent attention takes the sizes of DeepSeek's models alone, and elsewhere "
        "keys and values would be reconstructed at every decode step",
        "plain": "no plain config describes a shared rotated key beside a joint latent",
    },
)
