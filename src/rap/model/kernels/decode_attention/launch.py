"""Grids and block sizes of the decode kernel; imported only where Triton runs."""

import math

import torch
import triton
from torch import Tensor

from .triton import decode_reduce_kernel, decode_split_kernel

# Programs per multiprocessor: several hide the latency of loads, more only lengthen the reduction.
_PROGRAMS_PER_PROCESSOR = 4
_MAX_SPLITS = 64
_BLOCK = 64


def num_splits(batch: int, groups: int, num_cached: int, device: torch.device) -> int:
    """Splits of the context: from shapes alone, so that a captured graph serves every length."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, batch * groups)
    return max(1, min(wanted, triton.cdiv(num_cached, _BLOCK), _MAX_SPLITS))


def launch(
    q_BHW: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    scale: float,
    new: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
    lengths_B: Tensor | None = None,
    keep_BS: Tensor | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    clockwise: bool = False,
    splits: int | None = None,
) -> Tensor:
    """One decode step on Triton: output [B, H, C] of queries [B, H, W] over a cache of S slots.

    `cache` is keys [B, G, S, W] and values [B, G, S, C] with H a multiple of G. `lengths_B` int,
    the filled slots of each sequence (None: all S), `keep_BS` bool, slots that a mask leaves.
    Logits are multiplied by `scale`, capped by `softcap`, and share the softmax with `sinks_H`.
    `new`, for the fused step, is k [B, G, W] and v [B, G, C] of the new token, not rotated, cos and
    sin [B or 1, P], and the frequency index int32 [G, M]: query and key are then rotated (by the
    negative angle if `clockwise`), and written to slot `lengths_B`. `splits` is the number of
    stretches of the context, by default `num_splits`.

    The first kernel gives each stretch's output, largest logit and sum, the second joins them
    (as in https://pytorch.org/blog/flash-decoding/). Accumulates in float32; a slot must hold
    finite numbers also where a mask hides it. Sizes that do not fit are an AssertionError:
    `decode_attention` checks what a user gives.
    """
    (batch, heads, width), (groups, num_cached) = q_BHW.shape, cache[0].shape[1:3]
    value_width = cache[1].shape[-1]
    assert heads % groups == 0, (heads, groups)
    assert cache[0].shape == (batch, groups, num_cached, width), cache[0].shape
    assert cache[1].shape[:3] == cache[0].shape[:3], cache[1].shape
    k, v, cos, sin, index = new if new is not None else (q_BHW,) * 5
    tables = tuple(t.expand(batch, -1) if new is not None else t for t in (cos, sin))
    lengths = None if lengths_B is None else lengths_B.expand(batch)
    keep = None if keep_BS is None else keep_BS.expand(batch, -1).view(torch.uint8)
    cache_strides = [tensor.stride() for tensor in cache]
    align = math.gcd(16, *(step for strides in cache_strides for step in strides[:2]))
    scaled = [(strides[0] // align, strides[1] // align) for strides in cache_strides]
    if splits is None:
        splits = num_splits(batch, groups, num_cached, q_BHW.device)
    acc = q_BHW.new_empty(batch, heads, splits, value_width, dtype=torch.float32)
    top, total = q_BHW.new_empty(2, batch, heads, splits, dtype=torch.float32)
    decode_split_kernel[(splits, groups, batch)](
        q_BHW, k, v, *tables, index, *cache, q_BHW if keep is None else keep,
        q_BHW if lengths is None else lengths,
        acc, top, total,
        q_BHW.stride(), k.stride(), v.stride(), *(t.stride() for t in tables), index.stride(),
        *scaled, (0, 0) if keep is None else keep.stride(),
        0 if lengths is None else lengths.stride(0),
        num_cached, splits, scale, softcap or 1.0,
        *cache_strides[0][2:], *cache_strides[1][2:], align,
        NUM_QUERIES=heads // groups, NUM_SLOTS=0 if new is None else index.shape[1],
        WIDTH=width, VALUE_WIDTH=value_width, FUSED=new is not None, CLOCKWISE=clockwise,
        MASKED=keep is not None, LENGTHS=lengths is not None, CAPPED=softcap is not None,
        # 16 is the least a tensor core multiplies.
        BR=max(16, triton.next_power_of_2(heads // groups)), BS=_BLOCK,
        BW=max(16, triton.next_power_of_2(width)),
        BC=max(16, triton.next_power_of_2(value_width)),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    output = q_BHW.new_empty(batch, heads, value_width)
    decode_reduce_kernel[(heads, batch)](
        acc, top, total, q_BHW if sinks_H is None else sinks_H.contiguous(), output, splits,
        VALUE_WIDTH=value_width, SINKS=sinks_H is not None,
        BN=triton.next_power_of_2(splits), BC=triton.next_power_of_2(value_width),
    )  # fmt: skip
    return output
