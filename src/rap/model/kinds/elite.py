"""EliteKV's attention: a few rotated pairs of every head, one latent for all the rest.

Shapes: B batch, T new tokens, S cached tokens, G KV heads, D head dim, E model dim, r elite pairs,
c rank of the latent.
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
class EliteEntry(Entry):
    """`elite` pairs r of every KV head that rotate, and one `latent` c for all the rest."""

    kind: ClassVar[str] = "elite"

    elite: int
    latent: int

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """Elite pairs of all heads side by side, and the latent, as one head."""
        return CacheLayout(1, 2 * self.elite * shape.num_kv_heads, self.latent)


class EliteAttention(ReconstructingAttention):
    """Elite pairs are cached rotated; the other keys, which never rotate, and values are a latent.

    `k_proj` gives the elite pairs and `v_proj` the latent, of which `k_up` and `v_up` make the
    other key channels and the values. `frequency_index` [G, r].
    """

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: EliteEntry,
    ):
        dim, heads = dense_shape.head_dim, dense_shape.num_kv_heads
        rest = dim - 2 * entry.elite
        sizes = PairEntry(entry.elite, rest, dim)
        super().__init__(dense, spec, dense_shape, sizes)
        _, key, value, _ = (getattr(dense, name) for name in spec.projections)
        hidden, biased = key.in_features, key.bias is not None
        setattr(self, spec.projections[1], self.linear(hidden, heads * (dim - rest), bias=biased))
        setattr(self, spec.projections[2], self.linear(hidden, entry.latent))
        self.v_up = self.linear(entry.latent, heads * dim, bias=value.bias is not None)
        self.factors, self.reconstruction = {"v": ("v_up",)}, ("v_up",)
        if rest:
            self.k_up = self.linear(entry.latent, heads * rest, bias=biased)
            self.factors, self.reconstruction = {"k": ("k_up",), "v": ("v_up",)}, ("k_up", "v_up")

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [B, H, T, D], elite keys [B, G, T, 2r], the latent [B, 1, T, c]; no gate."""
        query, key, value, _ = (getattr(self, name) for name in self.spec.projections)
        q = query(hidden_states).unflatten(-1, (-1, self.key_width)).transpose(1, 2)
        k = key(hidden_states).unflatten(-1, (-1, 2 * self.num_slots)).transpose(1, 2)
        return q, k, value(hidden_states)[:, None], None

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Elite pairs rotated; keys as [B, 1, T, G 2r], like the latent next to them."""
        # Rotation takes both at one width.
        elite = k.shape[-1]
        q, k = self.rotate(q, nn.functional.pad(k, (0, self.key_width - elite)), tables)
        return q, k[..., :elite].transpose(1, 2).flatten(2)[:, None]

    def expand(
        self, k: Tensor, v: Tensor, start: int, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, G, S, D], elite channels first, and values [B, G, S, D]."""
        heads, latent_BSC = self.dense_shape.num_kv_heads, v[:, 0]
        keys = k[:, 0].unflatten(-1, (heads, -1))
        if self.key_width > 2 * self.num_slots:
            rest = self.k_up(latent_BSC).unflatten(-1, (heads, -1))
            keys = torch.cat([keys, rest], dim=-1)
        values = self.v_up(latent_BSC).unflatten(-1, (heads, -1))
        return keys.transpose(1, 2), values.transpose(1, 2)


KIND = Kind(
    EliteEntry,
    EliteAttention,
    unsupported={
        "vllm": "vLLM caches keys and values per head, and here both are reconstructed from a "
        "joint latent at every decode step",
        "plain": "no plain config describes rotated pairs beside a joint latent",
    },
)
