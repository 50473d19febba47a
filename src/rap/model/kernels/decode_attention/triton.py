"""Attention of one query per sequence in Triton: split over the context, then one reduction.

A program serves all queries of a KV head over one stretch of the context, so K and V are read once.
Every split gets the same share of what a sequence really holds, taken from its length on the
device. FUSED also rotates the query and the new key, which split 0 writes into the cache with the
new value and scores from its registers.

Names: p_ pointers, s_ strides, o_ offsets, m_ masks, b_ blocks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(x):
    """tanh to float32's relative precision: a series near zero, where the quotient cancels."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    decay = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.2, near, far)


@triton.jit
def _capped(b_score, softcap, CAPPED: tl.constexpr):
    """Scores after the soft cap."""
    if CAPPED:
        b_score = softcap * _tanh(b_score / softcap)
    return b_score


@triton.jit
def _rotated(p_row, s_row, o_w, m_w, b_cos, b_sin, NUM_SLOTS: tl.constexpr):
    """A block of rows rotated in float32. `b_sin` has the sign; both are 1 and 0 past 2M."""
    o_partner = tl.where(o_w < NUM_SLOTS, o_w + NUM_SLOTS, o_w - NUM_SLOTS)
    o_partner = tl.where(o_w < 2 * NUM_SLOTS, o_partner, o_w)
    b_x = tl.load(p_row + o_w * s_row, mask=m_w, other=0).to(tl.float32)
    b_partner = tl.load(p_row + o_partner * s_row, mask=m_w, other=0).to(tl.float32)
    return b_x * b_cos + b_partner * b_sin


@triton.jit
def _attend_block(
    b_query, b_acc, b_top, b_total, p_keys, p_values, o_s, m_s, m_kept, o_w, m_w, o_c, m_c,
    scale, softcap, KEY_ROW: tl.constexpr, KEY_CHANNEL: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Take a block of cached tokens [BS] into the running softmax; `m_kept` hides scores."""
    o_row = o_s.to(tl.int64)
    p_block = p_keys + o_row[None, :] * KEY_ROW + o_w[:, None] * KEY_CHANNEL
    b_keys = tl.load(p_block, mask=m_w[:, None] & m_s[None, :], other=0)  # [BW, BS]
    b_score = tl.dot(b_query, b_keys, input_precision="ieee") * scale  # [BR, BS]
    b_score = _capped(b_score, softcap, CAPPED)
    b_score = tl.where((m_s & m_kept)[None, :], b_score, float("-inf"))
    b_new_top = tl.maximum(b_top, tl.max(b_score, 1))
    b_weight = tl.exp(b_score - b_new_top[:, None])
    b_decay = tl.exp(b_top - b_new_top)
    p_block = p_values + o_row[:, None] * VALUE_ROW + o_c[None, :] * VALUE_CHANNEL
    b_values = tl.load(p_block, mask=m_s[:, None] & m_c[None, :], other=0)  # [BS, BC]
    b_mixed = tl.dot(b_weight.to(b_values.dtype), b_values, input_precision="ieee")
    b_acc = b_acc * b_decay[:, None] + b_mixed
    return b_acc, b_new_top, b_total * b_decay + tl.sum(b_weight, 1)


@triton.jit
def _attend_new(
    b_query, b_acc, b_top, b_total, p_k, p_v, s_k, s_v, p_key, p_value, o_w, m_w, o_c, m_c,
    b_cos, b_sin, scale, softcap, NUM_SLOTS: tl.constexpr, KEY_CHANNEL: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write the new key and value into their slot and take them into the running softmax."""
    b_key = _rotated(p_k, s_k[2], o_w, m_w, b_cos, b_sin, NUM_SLOTS).to(p_key.dtype.element_ty)
    b_value = tl.load(p_v + o_c * s_v[2], mask=m_c, other=0).to(p_value.dtype.element_ty)
    tl.store(p_key + o_w * KEY_CHANNEL, b_key, mask=m_w)
    tl.store(p_value + o_c * VALUE_CHANNEL, b_value, mask=m_c)
    b_score = tl.sum(b_query.to(tl.float32) * b_key.to(tl.float32)[None, :], 1) * scale  # [BR]
    b_score = _capped(b_score, softcap, CAPPED)
    b_new_top = tl.maximum(b_top, b_score)
    b_decay = tl.exp(b_top - b_new_top)
    b_weight = tl.exp(b_score - b_new_top)
    b_acc = b_acc * b_decay[:, None] + b_weight[:, None] * b_value.to(tl.float32)[None, :]
    return b_acc, b_new_top, b_total * b_decay + b_weight


@triton.jit(do_not_specialize=["num_cached", "num_splits"])
def decode_split_kernel(
    p_q, p_k, p_v, p_cos, p_sin, p_index, p_keys, p_values, p_keep, p_lengths,
    p_acc, p_top, p_total,
    s_q, s_k, s_v, s_cos, s_sin, s_index, s_keys, s_values, s_keep, s_lengths,
    num_cached, num_splits, scale, softcap,
    KEY_ROW: tl.constexpr, KEY_CHANNEL: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, ALIGN: tl.constexpr,
    NUM_QUERIES: tl.constexpr, NUM_SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, FUSED: tl.constexpr, CLOCKWISE: tl.constexpr,
    MASKED: tl.constexpr, LENGTHS: tl.constexpr, CAPPED: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (splits, G, B): acc [B, H, splits, C], top and total [B, H, splits], all float32.

    With FUSED, `p_lengths` is the slot of the new token, and a length is one more. Strides of the
    caches' sequences and heads are in units of ALIGN elements, those of rows and channels are
    constants: so the compiler can prove 16-byte loads at widths that are no multiple of 16.
    """
    i_split = tl.program_id(0)
    # int64: the element a stride leads to can lie beyond 2^31.
    i_g, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_r, o_w, o_c = tl.arange(0, BR), tl.arange(0, BW), tl.arange(0, BC)
    m_r, m_w, m_c = o_r < NUM_QUERIES, o_w < WIDTH, o_c < VALUE_WIDTH
    i_h = i_g * NUM_QUERIES + o_r
    p_keys += (i_b * s_keys[0] + i_g * s_keys[1]) * ALIGN
    p_values += (i_b * s_values[0] + i_g * s_values[1]) * ALIGN
    m_q = m_r[:, None] & m_w[None, :]
    p_query = p_q + i_b * s_q[0] + i_h[:, None] * s_q[1]

    # `old` slots are read from the cache; a new token is one more, which FUSED takes by hand.
    old = num_cached
    if LENGTHS:
        old = tl.load(p_lengths + i_b * s_lengths).to(tl.int32)
    share = tl.cdiv(tl.cdiv(old, num_splits), BS) * BS
    begin = i_split * share
    end = tl.minimum(begin + share, old)

    if FUSED:
        o_slot = tl.where(o_w < NUM_SLOTS, o_w, o_w - NUM_SLOTS)
        m_turn = o_w < 2 * NUM_SLOTS
        o_pair = tl.load(p_index + i_g * s_index[0] + o_slot * s_index[1], mask=m_turn, other=0)
        b_cos = tl.load(p_cos + i_b * s_cos[0] + o_pair * s_cos[1], mask=m_turn, other=0)
        b_sin = tl.load(p_sin + i_b * s_sin[0] + o_pair * s_sin[1], mask=m_turn, other=0)
        b_cos, b_sin = tl.where(m_turn, b_cos.to(tl.float32), 1.0), b_sin.to(tl.float32)
        b_sin = tl.where((o_w < NUM_SLOTS) != CLOCKWISE, -b_sin, b_sin)
        b_query = _rotated(
            p_query, s_q[2], o_w[None, :], m_q, b_cos[None, :], b_sin[None, :], NUM_SLOTS
        ).to(p_q.dtype.element_ty)
    else:
        b_query = tl.load(p_query + o_w[None, :] * s_q[2], mask=m_q, other=0)

    # Finite, so that a hidden score's exp(-inf - top) is zero and never a NaN.
    b_top = tl.full([BR], -1e30, tl.float32)
    b_total = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, BC], tl.float32)
    for start in range(begin, end, BS):
        o_s = start + tl.arange(0, BS)
        m_s = o_s < end
        m_kept = m_s
        if MASKED:
            p_seen = p_keep + i_b * s_keep[0] + o_s * s_keep[1]
            m_kept = tl.load(p_seen, mask=m_s, other=0) != 0
        # Without lengths the mask hides the unused end of the cache: whole blocks, left unread.
        # With them it hides little, and a branch would keep loads from overlapping.
        wanted = True
        if MASKED and not LENGTHS:
            wanted = tl.max(m_kept.to(tl.int32), 0) > 0
        if wanted:
            b_acc, b_top, b_total = _attend_block(
                b_query, b_acc, b_top, b_total, p_keys, p_values, o_s, m_s, m_kept,
                o_w, m_w, o_c, m_c, scale, softcap,
                KEY_ROW, KEY_CHANNEL, VALUE_ROW, VALUE_CHANNEL, CAPPED,
            )  # fmt: skip
    if FUSED:  # noqa: SIM102 - a constant: without FUSED the rest must not be compiled
        if i_split == 0:
            b_acc, b_top, b_total = _attend_new(
                b_query, b_acc, b_top, b_total, p_k + i_b * s_k[0] + i_g * s_k[1],
                p_v + i_b * s_v[0] + i_g * s_v[1], s_k, s_v,
                p_keys + old.to(tl.int64) * KEY_ROW, p_values + old.to(tl.int64) * VALUE_ROW,
                o_w, m_w, o_c, m_c, b_cos, b_sin, scale, softcap,
                NUM_SLOTS, KEY_CHANNEL, VALUE_CHANNEL, CAPPED,
            )  # fmt: skip

    o_out = (i_b * tl.num_programs(1) * NUM_QUERIES + i_h) * num_splits + i_split
    tl.store(p_top + o_out, b_top, mask=m_r)
    tl.store(p_total + o_out, b_total, mask=m_r)
    p_to = p_acc + o_out[:, None] * VALUE_WIDTH + o_c[None, :]
    tl.store(p_to, b_acc, mask=m_r[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def decode_reduce_kernel(
    p_acc, p_top, p_total, p_sinks, p_out, num_splits,
    VALUE_WIDTH: tl.constexpr, SINKS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (H, B): the splits of one head joined by their maxima; a sink joins the sum alone."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row = i_b * tl.num_programs(0) + i_h
    o_n, o_c = tl.arange(0, BN), tl.arange(0, BC)
    m_n, m_c = o_n < num_splits, o_c < VALUE_WIDTH
    b_top = tl.load(p_top + i_row * num_splits + o_n, mask=m_n, other=-1e30)
    b_total = tl.load(p_total + i_row * num_splits + o_n, mask=m_n, other=0)
    p_from = p_acc + (i_row * num_splits + o_n)[:, None] * VALUE_WIDTH + o_c[None, :]
    b_acc = tl.load(p_from, mask=m_n[:, None] & m_c[None, :], other=0)  # [BN, BC]
    top = tl.max(b_top, 0)
    if SINKS:
        sink = tl.load(p_sinks + i_h).to(tl.float32)
        top = tl.maximum(top, sink)
    b_weight = tl.exp(b_top - top)
    total = tl.sum(b_weight * b_total, 0)
    if SINKS:
        total += tl.exp(sink - top)
    b_out = tl.sum(b_weight[:, None] * b_acc, 0) / tl.where(total > 0, total, 1.0)
    p_to = p_out + i_row * VALUE_WIDTH + o_c
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m_c)


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
