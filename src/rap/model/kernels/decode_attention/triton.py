"""Attention of one query per sequence in Triton: split over the context, then one reduction.

A program serves all queries of a KV head over one stretch of the context, so K and V are read once.
Every split gets the same share of what a sequence really holds, taken from its length on the
device. The cache is contiguous or, with PAGE, in pages that a table lists; what it holds is widened
to the dtype of the queries. FUSED also rotates the query and the new key, which split 0 writes into
the cache with the new value and scores from its registers.

Names: p_ pointers, s_ strides, o_ offsets, m_ masks, b_ blocks.
"""

import math
from typing import Any

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
def _rotation(
    p_cos, p_sin, p_index, s_cos, s_sin, s_index, o_w,
    NUM_SLOTS: tl.constexpr, CLOCKWISE: tl.constexpr,
):  # fmt: skip
    """cos and signed sin of a head's channels, float32 [BW]; 1 and 0 where nothing rotates."""
    o_slot = tl.where(o_w < NUM_SLOTS, o_w, o_w - NUM_SLOTS)
    m_turn = o_w < 2 * NUM_SLOTS
    o_pair = tl.load(p_index + o_slot * s_index[1], mask=m_turn, other=0)
    b_cos = tl.load(p_cos + o_pair * s_cos[1], mask=m_turn, other=0)
    b_sin = tl.load(p_sin + o_pair * s_sin[1], mask=m_turn, other=0)
    b_cos, b_sin = tl.where(m_turn, b_cos.to(tl.float32), 1.0), b_sin.to(tl.float32)
    return b_cos, tl.where((o_w < NUM_SLOTS) != CLOCKWISE, -b_sin, b_sin)


@triton.jit
def _query(
    p_query, p_cos, p_sin, p_index, s_q, s_cos, s_sin, s_index, m_r, o_w, m_w,
    NUM_SLOTS: tl.constexpr, CLOCKWISE: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Queries [BR, BW] of rows [BR, 1], rotated if FUSED, and what they are rotated by [BW]."""
    m_q = m_r[:, None] & m_w[None, :]
    if FUSED:
        b_cos, b_sin = _rotation(
            p_cos, p_sin, p_index, s_cos, s_sin, s_index, o_w, NUM_SLOTS, CLOCKWISE
        )
        b_query = _rotated(
            p_query, s_q[2], o_w[None, :], m_q, b_cos[None, :], b_sin[None, :], NUM_SLOTS
        ).to(p_query.dtype.element_ty)
    else:
        b_query = tl.load(p_query + o_w[None, :] * s_q[2], mask=m_q, other=0)
        b_cos, b_sin = b_query, b_query
    return b_query, b_cos, b_sin


@triton.jit
def _stretch(p_length, num_cached, num_splits, i_split, LENGTHS: tl.constexpr, BS: tl.constexpr):
    """The slots of a split, begin to end, of all `old` ones that are read from the cache.

    A new token is one more, which FUSED takes by hand.
    """
    old = num_cached
    if LENGTHS:
        old = tl.load(p_length).to(tl.int32)
    share = tl.cdiv(tl.cdiv(old, num_splits), BS) * BS
    begin = i_split * share
    return begin, tl.minimum(begin + share, old), old


@triton.jit
def _rows(
    p_pages, o_s, m_s, s_keys, s_values, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    PAGE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Offsets of the key and value of cached slots, in a sequence or in the pages it lists."""
    o_row = o_s.to(tl.int64)
    if PAGE > 0:
        i_page = tl.load(p_pages + o_row // PAGE, mask=m_s, other=0).to(tl.int64)
        o_key = i_page * s_keys[0] * ALIGN + o_row % PAGE * KEY_ROW
        o_value = i_page * s_values[0] * ALIGN + o_row % PAGE * VALUE_ROW
    else:
        o_key, o_value = o_row * KEY_ROW, o_row * VALUE_ROW
    return o_key, o_value


@triton.jit
def _attend_block(
    b_query, b_acc, b_top, b_total, p_keys, p_values, o_key, o_value, m_s, m_kept,
    o_w, m_w, o_c, m_c, scale, softcap, KEY_CHANNEL: tl.constexpr, VALUE_CHANNEL: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Take a block of cached tokens [BS] into the running softmax; `m_kept` hides scores."""
    p_block = p_keys + o_key[None, :] + o_w[:, None] * KEY_CHANNEL
    b_keys = tl.load(p_block, mask=m_w[:, None] & m_s[None, :], other=0.0)  # [BW, BS]
    b_keys = b_keys.to(b_query.dtype)
    b_score = tl.dot(b_query, b_keys, input_precision="ieee") * scale  # [BR, BS]
    b_score = _capped(b_score, softcap, CAPPED)
    b_score = tl.where((m_s & m_kept)[None, :], b_score, float("-inf"))
    b_new_top = tl.maximum(b_top, tl.max(b_score, 1))
    b_weight = tl.exp(b_score - b_new_top[:, None])
    b_decay = tl.exp(b_top - b_new_top)
    p_block = p_values + o_value[:, None] + o_c[None, :] * VALUE_CHANNEL
    b_values = tl.load(p_block, mask=m_s[:, None] & m_c[None, :], other=0.0)  # [BS, BC]
    b_values = b_values.to(b_query.dtype)
    b_mixed = tl.dot(b_weight.to(b_values.dtype), b_values, input_precision="ieee")
    b_acc = b_acc * b_decay[:, None] + b_mixed
    return b_acc, b_new_top, b_total * b_decay + tl.sum(b_weight, 1)


@triton.jit
def _attend_stretch(
    b_query, begin, end, p_keys, p_values, p_pages, p_keep, s_keys, s_values, s_keep,
    o_w, m_w, o_c, m_c, scale, softcap,
    KEY_ROW: tl.constexpr, KEY_CHANNEL: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    MASKED: tl.constexpr, SKIPS: tl.constexpr, CAPPED: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The running softmax over cached slots begin to end: acc [BR, BC], top and total [BR]."""
    # Finite, so that a hidden score's exp(-inf - top) is zero and never a NaN.
    b_top = tl.full([BR], -1e30, tl.float32)
    b_total = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, BC], tl.float32)
    for start in range(begin, end, BS):
        o_s = start + tl.arange(0, BS)
        m_s = o_s < end
        m_kept = m_s
        if MASKED:
            m_kept = tl.load(p_keep + o_s * s_keep[1], mask=m_s, other=0) != 0
        wanted = True
        if SKIPS:
            wanted = tl.max(m_kept.to(tl.int32), 0) > 0
        if wanted:
            o_key, o_value = _rows(
                p_pages, o_s, m_s, s_keys, s_values, KEY_ROW, VALUE_ROW, PAGE, ALIGN
            )
            b_acc, b_top, b_total = _attend_block(
                b_query, b_acc, b_top, b_total, p_keys, p_values, o_key, o_value, m_s, m_kept,
                o_w, m_w, o_c, m_c, scale, softcap, KEY_CHANNEL, VALUE_CHANNEL, CAPPED,
            )  # fmt: skip
    return b_acc, b_top, b_total


@triton.jit
def _attend_new(
    b_query, b_acc, b_top, b_total, p_k, p_v, s_k, s_v, p_key, p_value, o_w, m_w, o_c, m_c,
    b_cos, b_sin, writes, scale, softcap, NUM_SLOTS: tl.constexpr, KEY_CHANNEL: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Take the new key and value into the running softmax, and write them if `writes`."""
    b_key = _rotated(p_k, s_k[2], o_w, m_w, b_cos, b_sin, NUM_SLOTS).to(p_key.dtype.element_ty)
    b_value = tl.load(p_v + o_c * s_v[2], mask=m_c, other=0).to(p_value.dtype.element_ty)
    if writes:
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
    p_q, p_k, p_v, p_cos, p_sin, p_index, p_keys, p_values, p_pages, p_keep, p_lengths,
    p_acc, p_top, p_total,
    s_q, s_k, s_v, s_cos, s_sin, s_index, s_keys, s_values, s_pages, s_keep, s_lengths,
    num_cached, num_splits, scale, softcap,
    KEY_ROW: tl.constexpr, KEY_CHANNEL: tl.constexpr, VALUE_ROW: tl.constexpr,
    VALUE_CHANNEL: tl.constexpr, ALIGN: tl.constexpr, PAGE: tl.constexpr,
    NUM_QUERIES: tl.constexpr, NUM_SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, FUSED: tl.constexpr, CLOCKWISE: tl.constexpr,
    MASKED: tl.constexpr, LENGTHS: tl.constexpr, CAPPED: tl.constexpr,
    TILES: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (splits, G TILES, B): acc [B, H, splits, C], top and total [B, H, splits], float32.

    With FUSED, `p_lengths` is the slot of the new token, and a length is one more. Strides of the
    caches' sequences (or pages) and heads are in units of ALIGN elements, those of rows and
    channels are constants: so the compiler can prove 16-byte loads at widths like 88.
    """
    i_split, i_tile = tl.program_id(0), tl.program_id(1) % TILES
    # int64: the element a stride leads to can lie beyond 2^31.
    i_g, i_b = (tl.program_id(1) // TILES).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_r, o_w, o_c = i_tile * BR + tl.arange(0, BR), tl.arange(0, BW), tl.arange(0, BC)
    m_r, m_w, m_c = o_r < NUM_QUERIES, o_w < WIDTH, o_c < VALUE_WIDTH
    i_h = i_g * NUM_QUERIES + o_r
    i_row = i_b if PAGE == 0 else 0  # pages are of no sequence
    p_keys += (i_row * s_keys[0] + i_g * s_keys[1]) * ALIGN
    p_values += (i_row * s_values[0] + i_g * s_values[1]) * ALIGN
    p_query = p_q + i_b * s_q[0] + i_h[:, None] * s_q[1]

    begin, end, old = _stretch(
        p_lengths + i_b * s_lengths, num_cached, num_splits, i_split, LENGTHS, BS
    )
    b_query, b_cos, b_sin = _query(
        p_query, p_cos + i_b * s_cos[0], p_sin + i_b * s_sin[0], p_index + i_g * s_index[0],
        s_q, s_cos, s_sin, s_index, m_r, o_w, m_w, NUM_SLOTS, CLOCKWISE, FUSED,
    )  # fmt: skip
    # Without lengths the mask hides the unused end of the cache: whole blocks, left unread. With
    # them it hides little, and a branch would keep loads from overlapping.
    b_acc, b_top, b_total = _attend_stretch(
        b_query, begin, end, p_keys, p_values, p_pages + i_b * s_pages, p_keep + i_b * s_keep[0],
        s_keys, s_values, s_keep, o_w, m_w, o_c, m_c, scale, softcap,
        KEY_ROW, KEY_CHANNEL, VALUE_ROW, VALUE_CHANNEL, ALIGN, PAGE,
        MASKED, MASKED and not LENGTHS, CAPPED, BR, BS, BC,
    )  # fmt: skip
    if FUSED:  # noqa: SIM102 - a constant: without FUSED the rest must not be compiled
        if i_split == 0:
            b_acc, b_top, b_total = _attend_new(
                b_query, b_acc, b_top, b_total, p_k + i_b * s_k[0] + i_g * s_k[1],
                p_v + i_b * s_v[0] + i_g * s_v[1], s_k, s_v,
                p_keys + old.to(tl.int64) * KEY_ROW, p_values + old.to(tl.int64) * VALUE_ROW,
                o_w, m_w, o_c, m_c, b_cos, b_sin, i_tile == 0, scale, softcap,
                NUM_SLOTS, KEY_CHANNEL, VALUE_CHANNEL, CAPPED,
            )  # fmt: skip

    o_out = (i_b * (tl.num_programs(1) // TILES * NUM_QUERIES) + i_h) * num_splits + i_split
    tl.store(p_top + o_out, b_top, mask=m_r)
    tl.store(p_total + o_out, b_total, mask=m_r)
    p_to = p_acc + o_out[:, None] * VALUE_WIDTH + o_c[None, :]
    tl.store(p_to, b_acc, mask=m_r[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def decode_reduce_kernel(
    p_acc, p_top, p_total, p_sinks, p_out, num_splits, value_scale,
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
    b_out *= value_scale
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m_c)


# Programs per multiprocessor: several hide the latency of loads, more only lengthen the reduction.
_PROGRAMS_PER_PROCESSOR = 4
_MAX_SPLITS = 64
# Query heads of a program; the further ones of a KV head are other programs', which read K and V
# again, mostly from the L2 cache.
_MAX_QUERIES = 32
# Blocks of keys and values in flight: two stages, within the shared memory of any GPU.
_STAGES, _BLOCK_BYTES = 2, 2**16
# Few and wide programs wait for memory: a third stage, where shared memory is large, makes one
# sequence of 32k at widths of 256 take 24 us for 35 on an H200 (and 16 of them 81 for 74).
_WIDE, _FEW = 512, 8
_LARGE_MEMORY = ((8, 0), (9, 0), (10, 0))  # compute capabilities with 160 KiB a multiprocessor


def num_splits(programs: int, num_cached: int, block: int, device: torch.device) -> int:
    """Splits of the context: from shapes alone, so that a captured graph serves every length."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, programs)
    return max(1, min(wanted, triton.cdiv(num_cached, block), _MAX_SPLITS))


def num_stages(programs: int, blocks: dict[str, int], device: torch.device) -> int:
    """Blocks in flight, by the programs of a split and the channels of a key and a value."""
    if programs > _FEW or blocks["BW"] + blocks["BC"] < _WIDE or device.type != "cuda":
        return _STAGES
    return _STAGES + (torch.cuda.get_device_capability(device) in _LARGE_MEMORY)


def block_sizes(queries: int, width: int, value_width: int, itemsize: int) -> dict[str, int]:
    """Query heads, cached slots and channels of a program's blocks: powers of two.

    16 is the least that a tensor core multiplies.
    """
    rows, channels, value_channels = (
        max(16, triton.next_power_of_2(size)) for size in (queries, width, value_width)
    )
    slots = _BLOCK_BYTES // (_STAGES * itemsize * (channels + value_channels))
    slots = 2 ** max(4, min(6, slots.bit_length() - 1))
    return {"BR": min(rows, _MAX_QUERIES), "BS": slots, "BW": channels, "BC": value_channels}


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
    pages_BL: Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    splits: int | None = None,
) -> Tensor:
    """One decode step on Triton: output [B, H, C] of queries [B, H, W] over a cache of S slots.

    `cache` is keys [B, G, S, W] and values [B, G, S, C] with H a multiple of G; with `pages_BL` it
    is pages of S slots, [N, G, S, W] and [N, G, S, C], of which a sequence has those that its row
    lists. `cache_scales` are what stored keys and values are multiplied by. `lengths_B` int, the
    filled slots of each sequence (None: all), `keep_BS` bool, slots that a mask leaves. Logits are
    multiplied by `scale`, capped by `softcap`, and share the softmax with `sinks_H`.
    `new`, for the fused step (contiguous caches only), is k [B, G, W] and v [B, G, C] of the new
    token, not rotated, cos and sin [B or 1, P], and the frequency index int32 [G, M]: query and key
    are then rotated (by the negative angle if `clockwise`), and written to slot `lengths_B`.
    `splits` is the number of stretches of the context, by default `num_splits`.

    The first kernel gives each stretch's output, largest logit and sum, the second joins them
    (as in https://pytorch.org/blog/flash-decoding/). Accumulates in float32; a slot must hold
    finite numbers also where a mask hides it. Sizes that do not fit are an AssertionError.
    """
    (batch, heads, width), (groups, value_width) = q_BHW.shape, cache[1].shape[1::2]
    num_cached = _num_cached(q_BHW, cache, pages_BL)
    assert new is None or (pages_BL is None and cache_scales == (1.0, 1.0))
    blocks = block_sizes(heads // groups, width, value_width, q_BHW.element_size())
    tiles = triton.cdiv(heads // groups, blocks["BR"])
    if splits is None:
        splits = num_splits(batch * groups * tiles, num_cached, blocks["BS"], q_BHW.device)
    acc = q_BHW.new_empty(batch, heads, splits, value_width, dtype=torch.float32)
    top, total = q_BHW.new_empty(2, batch, heads, splits, dtype=torch.float32)
    (key_rows, value_rows), align = (t.stride()[2:] for t in cache), _alignment(cache)
    tensors, strides = _inputs(q_BHW, cache, new, pages_BL, keep_BS, lengths_B, align)
    output = q_BHW.new_empty(batch, heads, value_width)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q_BHW):
        decode_split_kernel[(splits, groups * tiles, batch)](
            *tensors, acc, top, total, *strides,
            num_cached, splits, scale * cache_scales[0], softcap or 1.0,
            *key_rows, *value_rows, align, PAGE=0 if pages_BL is None else cache[0].shape[2],
            NUM_QUERIES=heads // groups, NUM_SLOTS=0 if new is None else new[4].shape[1],
            WIDTH=width, VALUE_WIDTH=value_width, FUSED=new is not None, CLOCKWISE=clockwise,
            MASKED=keep_BS is not None, LENGTHS=lengths_B is not None, CAPPED=softcap is not None,
            TILES=tiles, **blocks, num_warps=4,
            num_stages=num_stages(batch * groups * tiles, blocks, q_BHW.device),
        )  # fmt: skip
        decode_reduce_kernel[(heads, batch)](
            acc, top, total, q_BHW if sinks_H is None else sinks_H.contiguous(), output, splits,
            cache_scales[1], VALUE_WIDTH=value_width, SINKS=sinks_H is not None,
            BN=triton.next_power_of_2(splits), BC=triton.next_power_of_2(value_width),
        )  # fmt: skip
    return output


def _num_cached(q_BHW: Tensor, cache: tuple[Tensor, Tensor], pages_BL: Tensor | None) -> int:
    """Slots that a sequence can hold, of a cache that fits the queries."""
    (batch, heads, width), (rows, groups, slots, key_width) = q_BHW.shape, cache[0].shape
    assert heads % groups == 0, (heads, groups)
    assert key_width == width, (key_width, width)
    assert cache[1].shape[:3] == cache[0].shape[:3], cache[1].shape
    if pages_BL is None:
        assert rows == batch, (rows, batch)
        return slots
    assert len(pages_BL) == batch, (len(pages_BL), batch)
    return slots * pages_BL.shape[1]


def _alignment(cache: tuple[Tensor, Tensor]) -> int:
    """The most elements, up to 16, that every stride of a cache's sequences and heads counts by."""
    return math.gcd(16, *(step for tensor in cache for step in tensor.stride()[:2]))


def _inputs(
    q_BHW: Tensor,
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None,
    pages_BL: Tensor | None,
    keep_BS: Tensor | None,
    lengths_B: Tensor | None,
    align: int,
) -> tuple[list[Tensor], list[Any]]:
    """The kernel's tensors and their strides; `q_BHW` is where there is none, and is not read."""
    batch, nothing = len(q_BHW), q_BHW
    k, v, cos, sin, index = new if new is not None else (nothing,) * 5
    cos, sin = (t.expand(batch, -1) if new is not None else t for t in (cos, sin))
    pages = nothing if pages_BL is None else pages_BL.contiguous()
    keep = nothing if keep_BS is None else keep_BS.expand(batch, -1).view(torch.uint8)
    lengths = nothing if lengths_B is None else lengths_B.expand(batch)
    states = [q_BHW, k, v, cos, sin, index]
    strides: list[Any] = [tensor.stride() for tensor in states]
    strides += [tuple(step // align for step in tensor.stride()[:2]) for tensor in cache]
    strides += [pages.stride(0), keep.stride(), lengths.stride(0)]
    return [*states, *cache, pages, keep, lengths], strides
