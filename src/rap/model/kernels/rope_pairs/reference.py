"""The rotation in plain PyTorch: the definition that the kernel is tested against."""

import torch
from torch import Tensor

from ...rope import gather_pairs, rotate_pairs


def rotate(
    q_BHTW: Tensor,
    k_BGTW: Tensor,
    cos_BTP: Tensor,
    sin_BTP: Tensor,
    index_GM: Tensor,
    clockwise: bool = False,
) -> tuple[Tensor, Tensor]:
    """x1 cos - x2 sin, x2 cos + x1 sin per slot, in float32 or wider, rounded once at the end."""
    wide = torch.promote_types(q_BHTW.dtype, torch.float32)
    cos, sin = (gather_pairs(table.to(wide), index_GM) for table in (cos_BTP, sin_BTP))
    sin = -sin if clockwise else sin
    return (
        rotate_pairs(q_BHTW.to(wide), cos, sin).to(q_BHTW.dtype),
        rotate_pairs(k_BGTW.to(wide), cos, sin).to(k_BGTW.dtype),
    )


def rotate_into_cache(
    states: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    index_GM: Tensor,
    cache: tuple[Tensor, Tensor],
    position_B: Tensor,
    *,
    clockwise: bool = False,
) -> Tensor:
    """`rotate`, then keys and values written to slots `position` + 0, 1, ... of the cache."""
    q, k, v = states
    q, k = rotate(q, k, *tables, index_GM, clockwise)
    batch, tokens = k.shape[0], k.shape[2]
    rows_B1 = torch.arange(batch, device=k.device)[:, None]
    slots_BT = position_B.reshape(-1, 1) + torch.arange(tokens, device=k.device)
    for held, new in zip(cache, (k, v), strict=True):
        held.transpose(1, 2)[rows_B1, slots_BT.expand(batch, -1)] = new.transpose(1, 2)
    return q
