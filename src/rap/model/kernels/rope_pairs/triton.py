"""The rotation in Triton: one program per KV head and block of tokens.

A program reads cos and sin of its slots once, through the index, and rotates the key and every
query of the group with them. Angles and products are float32. Strides may be anything.

Names: p_ pointers, s_ strides, o_ offsets, m_ masks, b_ blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_head(
    p_x, p_out, s_x, s_out, o_t, m_t, b_cos, b_sin, NUM_SLOTS: tl.constexpr,
    NUM_FREE: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rotate one head's tokens [BT]; pass-through channels are copied."""
    o_m = tl.arange(0, BM)
    mask = m_t[:, None] & (o_m < NUM_SLOTS)[None, :]
    p_in = p_x + (o_t[:, None] * s_x[2]) * ALIGN + o_m[None, :] * s_x[3]
    p_to = p_out + (o_t[:, None] * s_out[2]) * ALIGN + o_m[None, :] * s_out[3]
    b_first = tl.load(p_in, mask=mask, other=0).to(tl.float32)  # [BT, BM]
    b_second = tl.load(p_in + NUM_SLOTS * s_x[3], mask=mask, other=0).to(tl.float32)
    b_new = b_first * b_cos - b_second * b_sin
    tl.store(p_to, b_new.to(p_out.dtype.element_ty), mask=mask)
    b_new = b_second * b_cos + b_first * b_sin
    tl.store(p_to + NUM_SLOTS * s_out[3], b_new.to(p_out.dtype.element_ty), mask=mask)
    if NUM_FREE > 0:
        o_n = 2 * NUM_SLOTS + tl.arange(0, BN)
        mask = m_t[:, None] & (o_n < 2 * NUM_SLOTS + NUM_FREE)[None, :]
        p_in = p_x + (o_t[:, None] * s_x[2]) * ALIGN + o_n[None, :] * s_x[3]
        b_x = tl.load(p_in, mask=mask, other=0)
        p_to = p_out + (o_t[:, None] * s_out[2]) * ALIGN + o_n[None, :] * s_out[3]
        tl.store(p_to, b_x.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def rope_pairs_kernel(
    p_q, p_k, p_cos, p_sin, p_index, p_q_out, p_k_out,
    s_q, s_k, s_cos, s_sin, s_index, s_q_out, s_k_out,
    num_tokens,
    NUM_QUERIES: tl.constexpr, NUM_SLOTS: tl.constexpr, NUM_FREE: tl.constexpr,
    CLOCKWISE: tl.constexpr, ALIGN: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BT tokens, G, B).

    Strides of sequences, heads and tokens are in units of ALIGN elements: so the compiler can prove
    wide loads at widths that are no multiple of 16.
    """
    # int64: the element a stride leads to can lie beyond 2^31.
    i_t, i_g, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_t = (i_t * BT + tl.arange(0, BT)).to(tl.int64)
    m_t = o_t < num_tokens
    o_m = tl.arange(0, BM)
    m_m = o_m < NUM_SLOTS
    o_pair = tl.load(p_index + i_g * s_index[0] + o_m * s_index[1], mask=m_m, other=0).to(tl.int64)

    mask = m_t[:, None] & m_m[None, :]
    p_c = p_cos + i_b * s_cos[0] + o_t[:, None] * s_cos[1] + o_pair[None, :] * s_cos[2]
    p_s = p_sin + i_b * s_sin[0] + o_t[:, None] * s_sin[1] + o_pair[None, :] * s_sin[2]
    b_cos = tl.load(p_c, mask=mask, other=0).to(tl.float32)  # [BT, BM]
    b_sin = tl.load(p_s, mask=mask, other=0).to(tl.float32)
    if CLOCKWISE:
        b_sin = -b_sin

    for r in range(NUM_QUERIES):
        i_h = i_g * NUM_QUERIES + r
        _rotate_head(
            p_q + (i_b * s_q[0] + i_h * s_q[1]) * ALIGN,
            p_q_out + (i_b * s_q_out[0] + i_h * s_q_out[1]) * ALIGN,
            s_q, s_q_out, o_t, m_t, b_cos, b_sin, NUM_SLOTS, NUM_FREE, ALIGN, BM, BN,
        )  # fmt: skip
    _rotate_head(
        p_k + (i_b * s_k[0] + i_g * s_k[1]) * ALIGN,
        p_k_out + (i_b * s_k_out[0] + i_g * s_k_out[1]) * ALIGN,
        s_k, s_k_out, o_t, m_t, b_cos, b_sin, NUM_SLOTS, NUM_FREE, ALIGN, BM, BN,
    )  # fmt: skip


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, index: Tensor, clockwise: bool = False
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; outputs lie in memory as the inputs do."""
    batch, heads, tokens, width = q.shape
    groups, slots = index.shape
    tables = (cos, sin)
    assert heads % groups == 0 and k.shape == (batch, groups, tokens, width), (q.shape, k.shape)
    assert 2 * slots <= width and all(t.shape[:2] in ((batch, tokens), (1, tokens)) for t in tables)
    outputs = torch.empty_like(q), torch.empty_like(k)
    if q.numel() == 0:
        return outputs
    given = [tensor.stride() for tensor in (q, k, *outputs)]
    align = math.gcd(16, *(step for strides in given for step in strides[:3]))
    scaled = [(*(step // align for step in strides[:3]), strides[3]) for strides in given]
    block = min(triton.next_power_of_2(tokens), 16)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        rope_pairs_kernel[(triton.cdiv(tokens, block), groups, batch)](
            q, k, *tables, index, *outputs,
            *scaled[:2],
            *(table.expand(batch, -1, -1).stride() for table in tables),
            index.stride(),
            *scaled[2:],
            tokens,
            NUM_QUERIES=heads // groups,
            NUM_SLOTS=slots,
            NUM_FREE=width - 2 * slots,
            CLOCKWISE=clockwise,
            ALIGN=align,
            BT=block,
            BM=triton.next_power_of_2(max(slots, 1)),
            BN=triton.next_power_of_2(max(width - 2 * slots, 1)),
            num_warps=4,
        )  # fmt: skip
    return outputs
