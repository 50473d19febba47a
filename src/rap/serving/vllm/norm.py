"""Pruned attention with QK-norm in vLLM (Qwen3), in both modes of module `norms`.

`exact` projects the dense width, applies vLLM's own norm and keeps channels behind it. `constant`
projects kept channels only and scales their energy by a constant per head.

Shapes: T tokens, H query heads, G KV heads of this rank, R = H/G, D dense head dim, W key width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.layernorm import RMSNorm

from ...model.modeling import norm_mode
from .attention import EngineAttention
from .rows import check_stored


class KeptRMSNorm(nn.Module):
    """RMS norm of kept channels as if all D were there: weight [heads, W], energy ratio [heads]."""

    def __init__(self, heads: int, width: int, head_dim: int, eps: float):
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.weight = nn.Parameter(torch.ones(heads, width), requires_grad=False)
        ratio = torch.ones(heads, dtype=torch.float32)
        self.ratio = nn.Parameter(ratio, requires_grad=False)

    def forward(self, x_THW: Tensor) -> Tensor:
        """x over the estimated root mean square of the dense head, times the weight."""
        x = x_THW.float()
        energy_TH1 = (x.square().sum(-1) * self.ratio).unsqueeze(-1)
        x = x * torch.rsqrt(energy_TH1 / self.head_dim + self.eps) * self.weight
        return x.to(x_THW.dtype)


class RapNormAttention(EngineAttention):
    """Pruned attention whose queries and keys are normalised per head before the rotation."""

    def width_before_norm(self, config: Any) -> int:
        """D in mode `exact`, where the norm sees the dense head."""
        self.exact_norm = norm_mode(config) == "exact"
        return self.head_dim if self.exact_norm else self.layout.key_width

    def add_norms(self, config: Any) -> None:
        """The two norms, and in mode `exact` the dense channel of every kept one."""
        eps, width = config.rms_norm_eps, self.layout.key_width
        if self.exact_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps=eps) for _ in range(2))
            channels = torch.arange(width, dtype=torch.int32).expand(self.num_kv_heads, -1)
            kept: Any = nn.Parameter(channels.clone(), requires_grad=False)
            kept.weight_loader = self._load_kept_channels
            self.kept_channels = kept
            return
        self.q_norm = KeptRMSNorm(self.num_heads, width, self.head_dim, eps)
        self.k_norm = KeptRMSNorm(self.num_kv_heads, width, self.head_dim, eps)
        for norm, load in ((self.q_norm, self._load_query_rows), (self.k_norm, self._load_kv_rows)):
            for parameter in norm.parameters():
                parameter.weight_loader = load

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Projected queries and keys to normalised [T, H, W] and [T, G, W]."""
        q, k = self.q_norm(q), self.k_norm(k)
        return (self._keep(q), self._keep(k)) if self.exact_norm else (q, k)

    def _keep(self, x: Tensor) -> Tensor:
        """The kept channels of [T, heads, D], the same for all heads of a group."""
        x_TGRD = x.unflatten(1, (self.num_kv_heads, -1))
        index = self.kept_channels.long()[None, :, None]
        return x_TGRD.gather(-1, index.expand(*x_TGRD.shape[:-1], -1)).flatten(1, 2)

    def _load_query_rows(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        start = get_tensor_model_parallel_rank() * self.num_heads
        parameter.data.copy_(loaded[start : start + self.num_heads])

    def _load_kv_rows(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        parameter.data.copy_(loaded[self.kv_rows()])

    def _load_kept_channels(self, parameter: nn.Parameter, loaded: Tensor) -> None:
        shape = (self.qkv_proj.total_num_kv_heads, self.layout.key_width)
        channels = ("channels", self.head_dim)
        check_stored(f"{self.prefix}.kept_channels", loaded, shape, channels)
        self._load_kv_rows(parameter, loaded)
