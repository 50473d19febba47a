"""The cache's heads and head size of every layer, as vLLM and its attention kernels read them.

Shapes: T tokens, H query heads and N cached heads of this rank, W key width, C value width, S head
size in the cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.config.model_arch import ModelArchitectureConfig
from vllm.model_executor.layers.attention import Attention
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.v1.attention.selector import get_attn_backend

from ...model.cache_layout import CacheLayout
from ...model.errors import RapError
from ..layout import cache_layouts, dense_head_dims, is_grouped, padded_width


class WidthConvertor(ModelArchConfigConvertorBase):
    """Declares the cached heads of every layer and their size; of the whole model, the largest.

    Buffers that serve all layers are sized for the whole model: its head is the dense one, or a
    wider one of merged heads, and its KV heads are the dense ones.
    """

    def convert(self, supports_multimodal: bool = True) -> ModelArchitectureConfig:
        """The architecture of the dense model, with the `rap` section's caches by layer."""
        whole = super().convert(supports_multimodal)
        try:
            layouts = cache_layouts(self.hf_text_config)
        except RapError:
            # The model class refuses it in the same words, which vLLM does not wrap there.
            return whole
        # Of layers that differ in the dense model too, beside what else differs in them.
        dense = whole.per_layer_overrides or [{} for _ in layouts]
        size = whole.head_size
        whole.per_layer_overrides = [
            {"head_size": size, **own} if layout is None else {**own, **_declared(layout)}
            for own, layout in zip(dense, layouts, strict=True)
        ]
        whole.head_size = max(size, *(layout.width for layout in layouts if layout is not None))
        return whole

    def get_total_num_kv_heads(self) -> int:
        """The model's KV heads: the config of a family without grouped queries may differ."""
        if is_grouped(self.hf_text_config):
            return super().get_total_num_kv_heads()
        return int(self.hf_text_config.num_attention_heads)


def _declared(layout: CacheLayout) -> dict[str, int]:
    """What vLLM calls a layer's cache. One that reads another's has the dense heads here."""
    heads = {"total_num_kv_heads": layout.num_heads} if layout.num_heads else {}
    return {"head_size": layout.width, **heads}


class PaddedAttention(Attention):
    """vLLM's attention of heads with W and C channels, in a cache of the next size it takes."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **settings: Any):
        backend = dense_backend(
            settings.get("cache_config"),
            window=settings.get("per_layer_sliding_window"),
            has_sink=settings.get("sinks") is not None,
        )
        size = cache_width(head_size, backend, settings.get("cache_config"))
        super().__init__(num_heads, size, scale, attn_backend=backend, **settings)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, output_shape: torch.Size | None = None
    ) -> Tensor:
        """Attention of [T, H W], [T, N W] and [T, N C], as [T, H C]."""
        key, value = (states.unflatten(-1, (self.num_kv_heads, -1)) for states in (key, value))
        new = (pad(states, self.head_size).flatten(1) for states in (key, value))
        return self._attended(query, value.shape[-1], *new)

    def read(self, query: Tensor, width: int) -> Tensor:
        """What queries [T, H W] of another layer find in this layer's cache, as [T, H C].

        Nothing is cached: this layer has done so already, for it comes before the other.
        """
        return self._attended(query, width, None, None)

    def _attended(self, query: Tensor, width: int, *new: Tensor | None) -> Tensor:
        padded = pad(query.unflatten(-1, (self.num_heads, -1)), self.head_size).flatten(1)
        mixed = super().forward(padded, *new).unflatten(-1, (self.num_heads, -1))
        return mixed[..., :width].flatten(1)


class ReadingAttention(nn.Module):
    """Attention of a layer that reads the cache of another, its source, and caches nothing.

    vLLM has a setting for that (`kv_sharing_target_layer_name`), but its runner has no entry for
    such a layer where layers have heads of several sizes, and stops with a KeyError.
    """

    def __init__(self, source: PaddedAttention):
        super().__init__()
        # Not a submodule: the model has it already.
        vars(self)["source"] = source
        self.sliding_window, self.num_kv_heads = source.sliding_window, source.num_kv_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of [T, H W] as [T, H C]; `key` and `value` are the source's, of this step."""
        source: PaddedAttention = vars(self)["source"]
        return source.read(query, value.shape[-1] // self.num_kv_heads)


def pad(x: Tensor, width: int) -> Tensor:
    """Zeros after the last channel: exact, they add nothing to a score and are removed from V."""
    missing = width - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing else x


def dense_backend(cache_config: Any, *, window: int | None, has_sink: bool = False) -> Any:
    """The backend of the dense model for every layer: one kind of cache, one set of rules."""
    return get_attn_backend(
        max(dense_head_dims(get_current_vllm_config().model_config.hf_text_config)),
        torch.get_default_dtype(),
        cache_config.cache_dtype if cache_config is not None else "auto",
        has_sink=has_sink,
        has_sliding_window=window is not None,
    )


def cache_width(width: int, backend: Any, cache_config: Any) -> int:
    """S: the smallest head size of at least `width` that a backend takes."""
    eight_bit = cache_config is not None and str(cache_config.cache_dtype).startswith("fp8")

    def accepts(size: int) -> bool:
        # The CPU kernels check neither: a wrong size would fail at the first request.
        if eight_bit and backend.get_name() == "CPU_ATTN" and size % 32:
            return False
        return bool(backend.supports_head_size(size))

    return padded_width(width, accepts, backend.get_name())
