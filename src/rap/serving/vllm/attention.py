"""Pruned attention in vLLM: narrow projections, each slot's dense frequency, the dense scale.

Shapes: T tokens, H query heads and G KV heads of this rank, R = H/G, D dense head dim, P pairs,
M slots, W = 2M key width, C value width, S head size in the cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index

from ...model.cache_layout import CacheLayout
from ...model.errors import UnsupportedModelError
from ..layout import dense_head_dim
from .rows import check_stored
from .widths import cache_width, dense_backend, pad


class EngineAttention(nn.Module):
    """Attention of one pruned layer. The cache holds K and V in S channels each, S >= W and C."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int,
        quant_config: Any,
        bias: bool,
        bias_o_proj: bool,
        cache_config: Any,
        prefix: str,
        attn_type: str,
    ):
        super().__init__()
        self.layout, self.prefix = layout, prefix
        self.head_dim = dense_head_dim(config)
        self.projected_width = self.width_before_norm(config)
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            self.projected_width,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            v_head_size=layout.value_width,
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = RowParallelLinear(
            num_heads * layout.value_width,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb: Any = _dense_rotation(config, self.head_dim, max_position_embeddings)
        slots = torch.arange(layout.key_width // 2, dtype=torch.int32)
        index: Any = nn.Parameter(slots.expand(self.num_kv_heads, -1).clone(), requires_grad=False)
        index.weight_loader = self._load_frequency_index
        self.frequency_index = index
        self.add_norms(config)
        self._add_cache(config, cache_config, quant_config, attn_type)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Attention of [T, E] at `positions` [T]."""
        layout, heads, groups = self.layout, self.num_heads, self.num_kv_heads
        width = self.projected_width
        sizes = [heads * width, groups * width, groups * layout.value_width]
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(sizes, dim=-1)
        q, k = self.normalise(q.unflatten(-1, (heads, -1)), k.unflatten(-1, (groups, -1)))
        cos, sin = self._tables(positions, q.dtype)
        q = self._rotate(q, cos, sin)
        k = self._rotate(k, cos, sin)
        v = pad(v.unflatten(-1, (groups, -1)), self.cache_width)
        mixed = self.attn(q.flatten(1), k.flatten(1), v.flatten(1))
        mixed = mixed.unflatten(-1, (heads, -1))[..., : layout.value_width]
        output, _ = self.o_proj(mixed.flatten(1))
        return output

    def _add_cache(self, config: Any, cache_config: Any, quant_config: Any, attn_type: str) -> None:
        """vLLM's attention over a cache of the smallest head size that its backend takes."""
        window = sliding_window(config, extract_layer_index(self.prefix))
        backend = dense_backend(cache_config, window=window)
        self.cache_width = cache_width(self.layout.width, backend, cache_config)
        self.attn = Attention(
            self.num_heads,
            self.cache_width,
            self.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=window,
            attn_type=attn_type,
            prefix=f"{self.prefix}.attn",
            attn_backend=backend,
        )

    def width_before_norm(self, config: Any) -> int:
        """Channels of a projected query or key head; QK-norm may need more than are kept."""
        return self.layout.key_width

    def add_norms(self, config: Any) -> None:
        """Make the modules that `normalise` needs: none without QK-norm."""

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Projected queries [T, H, .] and keys [T, G, .] to [T, H, W] and [T, G, W]."""
        return q, k

    def kv_rows(self) -> slice:
        """This rank's rows of what has one row per KV head, as QKVParallelLinear takes of W_k."""
        rank = get_tensor_model_parallel_rank() // self.qkv_proj.num_kv_head_replicas
        return slice(rank * self.num_kv_heads, (rank + 1) * self.num_kv_heads)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every slot of every KV head, [T, G, 1, M]."""
        cos_TP, sin_TP = self.rotary_emb.cos_sin_cache[positions].to(dtype).chunk(2, dim=-1)
        index = self.frequency_index
        return cos_TP[:, index].unsqueeze(2), sin_TP[:, index].unsqueeze(2)

    def _rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, heads, W] rotated, and padded after the rotation to [T, heads, S]."""
        x = states.unflatten(1, (self.num_kv_heads, -1))
        first, second = x.chunk(2, dim=-1)
        x = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return pad(x.flatten(1, 2), self.cache_width)

    def _load_frequency_index(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        """Take the rows of this rank's KV heads."""
        shape = (self.qkv_proj.total_num_kv_heads, self.layout.key_width // 2)
        pairs = ("pairs", self.rotary_emb.cos_sin_cache.shape[-1] // 2)
        check_stored(f"{self.prefix}.frequency_index", loaded, shape, pairs)
        parameter.data.copy_(loaded[self.kv_rows()])


def _dense_rotation(config: Any, head_dim: int, max_position: int) -> nn.Module:
    """One cos/sin table for all layers: vLLM shares it, and frequency scaling is in it already."""
    rotary = get_rope(head_dim, max_position, rope_parameters=config.rope_parameters)
    if not hasattr(rotary, "cos_sin_cache"):
        raise UnsupportedModelError(
            f"rope_type {config.rope_parameters['rope_type']!r} has more than one table of "
            "frequencies, which this class does not index: start it with `rap serve`, or with "
            """--hf-overrides '{"architectures": ["RapForCausalLM"]}'"""
        )
    return rotary


def sliding_window(config: Any, layer: int) -> int | None:
    """The layer's own sliding window; vLLM adds one that the whole model has."""
    kinds = getattr(config, "layer_types", None)
    return config.sliding_window if kinds and kinds[layer] == "sliding_attention" else None
