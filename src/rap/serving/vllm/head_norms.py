"""QK-norm where a rank has some of the heads.

Shapes: B batch, T tokens, H heads of q or k of this rank, D dense head dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from ...model.attention import RapAttention
from ...model.norms import KeptNorm, norm_names


def over_ranks(mean: Tensor) -> Tensor:
    """The mean of every rank's mean, which stand for as many channels each."""
    return tensor_model_parallel_all_reduce(mean) / get_tensor_model_parallel_world_size()


class DividedNorm(KeptNorm):
    """A norm of kept channels over all heads. Where heads are replicated, all are, as often."""

    def over_heads(self, mean_BHT1: Tensor) -> Tensor:
        """The mean of what the heads of all ranks have, [B, 1, T, 1]."""
        return over_ranks(super().over_heads(mean_BHT1))


class DividedDenseNorm(nn.Module):
    """A root mean square over all heads: weight [H D], those of this rank."""

    def __init__(self, dense: Any):
        super().__init__()
        self.weight, self.eps = dense.weight, dense.variance_epsilon

    def forward(self, x_BTE: Tensor) -> Tensor:
        """x [B, T, H D] over the root mean square of the heads of all ranks, times the weight."""
        x = x_BTE.float()
        x = x * torch.rsqrt(over_ranks(x.square().mean(-1, keepdim=True)) + self.eps)
        return (self.weight * x).to(x_BTE.dtype)


class OwnHeadNorms(nn.Module):
    """One module for every head of the model, and those of this rank applied."""

    def __init__(self, dense: Any, part: slice):
        super().__init__()
        self.norms, self.part = dense.norms, part

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """x [B, H, T, D], every head by its own norm."""
        own = zip(self.norms[self.part], x_BHTD.unbind(1), strict=True)
        return torch.stack([norm(x_BTD) for norm, x_BTD in own], 1)


def divide_norms(attention: RapAttention, query: slice, key: slice) -> None:
    """Let the norms of a pruned attention know that a rank has these heads of q and of k."""
    spec = attention.norm
    if spec is None:
        return
    names = norm_names(spec, exact=attention.exact_norm)
    for name, part in zip(names, (query, key), strict=True):
        norm = getattr(attention, name, None)
        if norm is None:  # of keys, where they are another layer's
            continue
        if spec.one_module_per_head:
            setattr(attention, name, OwnHeadNorms(norm, part))
        elif spec.over == "all" and attention.exact_norm:
            setattr(attention, name, DividedDenseNorm(norm))
        elif spec.over == "all":
            norm.__class__ = DividedNorm


def norms_by_heads(
    attention: RapAttention, query: slice, key: slice
) -> Iterator[tuple[str, Tensor, slice]]:
    """Every tensor of the norms with a row per head, or D: its name, itself, this rank's rows."""
    spec = attention.norm
    if spec is None or spec.one_module_per_head:
        return
    for name, part in zip(norm_names(spec, exact=attention.exact_norm), (query, key), strict=True):
        norm = getattr(attention, name, None)
        if norm is None:
            continue
        if not attention.exact_norm:
            for leaf, tensor in (*norm.named_parameters(), *norm.named_buffers()):
                yield f"{name}.{leaf}", tensor, part
            continue
        # Dense norms: one weight [D] for all heads is whole on every rank.
        size = attention.dense_shape.head_dim
        for leaf, weight in norm.named_parameters():
            if spec.over == "all":
                yield f"{name}.{leaf}", weight, slice(part.start * size, part.stop * size)
            elif weight.ndim > 1:
                yield f"{name}.{leaf}", weight, part
