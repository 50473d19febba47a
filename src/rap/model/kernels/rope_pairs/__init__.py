"""Rotation of a layer's queries and keys by the kept pairs' own frequencies.

Shapes: B batch, T tokens, H query heads, G KV heads, P dense pairs, M slots, W = 2M + kept
pass-through channels, C value channels, S slots of the cache. The tables are the model's own, one
column per dense pair; `index` says which column each slot reads.
"""

import torch
from torch import Tensor, library

from ..availability import takes_triton
from . import reference


def rope_pairs(
    q_BHTW: Tensor,
    k_BGTW: Tensor,
    cos_BTP: Tensor,
    sin_BTP: Tensor,
    index_GM: Tensor,
    *,
    clockwise: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys in their own dtype, computed in float32 (float64 for float64).

    Differentiable in q and k. The tables [1|B, T, P] may be strided views, the batch of one.
    """
    if not takes_triton(q_BHTW):
        return reference.rotate(q_BHTW, k_BGTW, cos_BTP, sin_BTP, index_GM, clockwise)
    q, k = _rope_pairs(q_BHTW, k_BGTW, cos_BTP, sin_BTP, index_GM, clockwise)
    return q, k


@library.custom_op("rap::rope_pairs", mutates_args=())
def _rope_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, index: Tensor, clockwise: bool
) -> tuple[Tensor, Tensor]:
    from . import triton  # only where it runs: a CPU has no use for it

    return triton.rotate(q, k, cos, sin, index, clockwise)


@_rope_pairs.register_fake
def _(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, index: Tensor, clockwise: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _keep_tables(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, _, cos, sin, index, ctx.clockwise = inputs
    ctx.save_for_backward(cos, sin, index)


def _rotate_back(ctx, q_grad: Tensor, k_grad: Tensor):  # type: ignore[no-untyped-def]
    # The transpose of a rotation is the rotation by the negative angle.
    q, k = _rope_pairs(q_grad, k_grad, *ctx.saved_tensors, not ctx.clockwise)
    return q, k, None, None, None, None


_rope_pairs.register_autograd(_rotate_back, setup_context=_keep_tables)
