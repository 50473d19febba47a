"""How alike two orderings are.

Shapes: N items that are ordered, leading dimensions are batches.
"""

import torch
from torch import Tensor


def ranks(values_N: Tensor) -> Tensor:
    """Average ranks along the last dimension, equal values sharing the mean of theirs."""
    below = (values_N[..., None, :] < values_N[..., :, None]).sum(-1)
    same = (values_N[..., None, :] == values_N[..., :, None]).sum(-1)
    return below.double() + (same.double() - 1) / 2


def spearman(first_N: Tensor, second_N: Tensor) -> Tensor:
    """Spearman's rank correlation along the last dimension; 0 where all values are equal."""
    first, second = ranks(first_N), ranks(second_N)
    first, second = first - first.mean(-1, keepdim=True), second - second.mean(-1, keepdim=True)
    size = (first.square().sum(-1) * second.square().sum(-1)).sqrt()
    return (first * second).sum(-1) / torch.where(size > 0, size, 1.0)


def overlap(first_GN: Tensor, second_GN: Tensor, count: int) -> Tensor:
    """Share of the `count` largest that both have in common, along the last dimension."""
    best = [
        torch.zeros_like(values, dtype=torch.bool).scatter(
            -1, values.argsort(dim=-1, descending=True, stable=True)[..., :count], True
        )
        for values in (first_GN, second_GN)
    ]
    return (best[0] & best[1]).sum(-1) / count
