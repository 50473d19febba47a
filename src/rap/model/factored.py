"""Attention that keeps W_q and W_o dense, and maps every head's queries and outputs instead.

Copied into checkpoints as remote code with `modeling`.

A pruned layer whose cached heads are wider than dense ones, for they are merged of several, has
larger W_q and W_o than the dense layer where these take in what queries and outputs are multiplied
by (absorbed). Factored, they stay as they are: query head h gets its W slots by a map of its D
channels, and its D output channels come back of the C that attention gives, by maps that the query
heads of a dense KV head share. The cache is the same, and no map is applied to what it holds.

Where queries and keys are normalised, both maps of keys and queries stand behind the family's own
norm, which sees all rows: exact, and the only way to combine what a norm weighs channel by channel.

Shapes: B batch, T tokens, H query heads, G KV heads, N cached heads of g = G/N, D dense head dim,
W key width, C value width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .attention import RapAttention
from .cache_layout import FactoredEntry, PairEntry
from .norms import normalise_dense
from .rope import AttentionShape, Tables
from .specs import AttentionSpec, QKNorm


class HeadMap(nn.Module):
    """A linear map of every head's channels: weight [heads, out, in], without bias."""

    bias = None

    def __init__(self, heads: int, rows: int, columns: int, like: Tensor):
        super().__init__()
        # Anything but what memory held before: checkpoints and plans replace it.
        start = torch.eye(rows, columns, dtype=like.dtype, device=like.device)
        self.weight = nn.Parameter(start.expand(heads, -1, -1).clone())

    def forward(self, x_BNLI: Tensor) -> Tensor:
        """[B, heads, L, in] to [B, heads, L, out]."""
        return x_BNLI @ self.weight.mT


class FactoredAttention(RapAttention):
    """RapAttention with `query_map` [G, W, D], `key_map` [N, W, g D] and `value_map` [G, D, C].

    Of these it has those that its entry asks for: the first with `queries`, the second if keys are
    normalised too, the third with `outputs`. `factors` names them.
    """

    fusable = False

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: FactoredEntry,
        norm: QKNorm | None = None,
        norm_mode: str = "exact",
    ):
        # Read by `projected_sizes`, before there is a module to set them on.
        self.__dict__.update(maps_queries=entry.queries, maps_outputs=entry.outputs)
        like = getattr(dense, spec.of(dense).projections[3]).weight
        super().__init__(dense, spec, dense_shape, entry, norm, "exact")
        if self.exact_norm:  # its channels are combined, not chosen
            del self.kept_channels
        groups, dim = dense_shape.num_kv_heads, dense_shape.head_dim
        merge, factors = groups // self.num_kept_heads, {}
        if self.maps_queries:
            self.query_map = HeadMap(groups, self.key_width, dim, like)
            factors["q"] = ("query_map",)
        if self.maps_queries and self.exact_norm:
            self.key_map = HeadMap(self.num_kept_heads, self.key_width, merge * dim, like)
            factors["k"] = ("key_map",)
        if self.maps_outputs:
            self.value_map = HeadMap(groups, dim, self.value_width, like)
            factors["o"] = ("value_map",)
        self.factors = factors

    def projected_sizes(self, entry: PairEntry) -> tuple[dict[str, int], dict[str, int]]:
        """As of every layer, with dense q, and k where it is normalized, and dense o and gate."""
        widths, heads = super().projected_sizes(entry)
        dense = self.dense_shape
        if self.maps_queries:
            widths["q"] = dense.head_dim
        if self.maps_queries and self.exact_norm:
            heads["k"] = dense.num_kv_heads
        if self.maps_outputs:
            widths |= dict.fromkeys(("o", "gate"), dense.head_dim)
        return widths, heads

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, W] and keys [B, N, T, W]: normalized, mapped, rotated."""
        if self.norm is not None:
            modules = (getattr(self, name) for name in self.norm.names)
            q, k = (
                normalise_dense(self.norm, module, x)
                for module, x in zip(modules, (q, k), strict=True)
            )
            groups = k.unflatten(1, (self.num_kept_heads, -1))
            k = self.key_map(groups.transpose(2, 3).flatten(-2))
        if self.maps_queries:
            q = self._of_query_heads(self.query_map, q)
        return self.rotate(q, k, tables) if self.num_slots else (q, k)

    def read_out(self, output: Tensor) -> Tensor:
        """[B, T, H C] to [B, T, H D], where W_o reads the dense channels."""
        if not self.maps_outputs:
            return output
        heads = output.unflatten(-1, (self.dense_shape.num_heads, -1)).transpose(1, 2)
        return self._of_query_heads(self.value_map, heads).transpose(1, 2).flatten(-2)

    def _of_query_heads(self, module: HeadMap, x_BHTI: Tensor) -> Tensor:
        """Every query head mapped as its KV head says; tokens of all of them at once."""
        groups, tokens = self.dense_shape.num_kv_heads, x_BHTI.shape[2]
        mapped: Any = module(x_BHTI.unflatten(1, (groups, -1)).flatten(2, 3))
        return mapped.unflatten(2, (-1, tokens)).flatten(1, 2)
