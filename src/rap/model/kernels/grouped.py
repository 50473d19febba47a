"""Attention of one token with the queries of a KV head as the rows of products: SDPA, or by hand.

SDPA serves a query group in one read of K and V, without a copy. On a CPU it has two weak places.
Of keys and values of different widths its kernel takes none, and what it falls back to copies the
keys to scale them. And it divides work by KV heads, so that with fewer of them than threads, as
merged heads have, some threads wait. There the same is done by two products, whose context is cut
into parts for the threads where that is faster (docs/log.md, 2026-11-25).

Shapes: B batch, G KV heads, R query heads of a KV head, S slots, W key and C value width, N parts.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Parts of the context for every thread, fewest slots of a part, and shortest context, by size of a
# number, that is cut.
PARTS = 2
LEAST = 256
SHORTEST = {2: 8192, 4: 1024}


def grouped_attention(
    query_BGRW: Tensor, key_BGSW: Tensor, value_BGSC: Tensor, keep_B11S: Tensor | None, scale: float
) -> Tensor:
    """softmax(scale q k) v over kept slots, [B, G, R, C]; no slot kept gives zeros, as in SDPA.

    The softmax is in float32 or wider. Scores are too in SDPA; those of the two products are
    rounded to the dtype of their operands, as in eager attention.
    """
    if query_BGRW.is_cpu:
        # A compiled step is to serve every length of the cache.
        compiled = torch.compiler.is_compiling()
        parts = 1 if compiled else num_parts(key_BGSW, torch.get_num_threads())
        if parts > 1 or key_BGSW.shape[-1] != value_BGSC.shape[-1]:
            return by_products(query_BGRW * scale, key_BGSW, value_BGSC, keep_B11S, parts)
    return scaled_dot_product_attention(
        query_BGRW, key_BGSW, value_BGSC, attn_mask=keep_B11S, scale=scale
    )


def num_parts(key_BGSW: Tensor, threads: int) -> int:
    """Parts of the context: one where there are KV heads for all threads, or little to read."""
    batch, heads, slots = key_BGSW.shape[:3]
    shortest = SHORTEST.get(key_BGSW.itemsize, min(SHORTEST.values()))
    if batch * heads >= threads or slots < shortest:
        return 1
    return min(PARTS * threads, slots // LEAST)


def by_products(
    query_BGRW: Tensor,
    key_BGSW: Tensor,
    value_BGSC: Tensor,
    keep_B11S: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """The same by two products, of queries that are scaled."""
    if parts == 1:
        weight = _weights(torch.matmul(query_BGRW, key_BGSW.mT), keep_B11S)
        return torch.matmul(weight.to(value_BGSC.dtype), value_BGSC)
    # Head by head: products of many batch dimensions copy what a cache with room has apart.
    batch, outputs = len(query_BGRW), []
    keeps = [None] * batch if keep_B11S is None else keep_B11S[:, 0].expand(batch, -1, -1)
    for *heads, keep_1S in zip(query_BGRW, key_BGSW, value_BGSC, keeps, strict=True):
        outputs += [_in_parts(q, k, v, keep_1S, parts) for q, k, v in zip(*heads, strict=True)]
    return torch.stack(outputs).unflatten(0, query_BGRW.shape[:2])


def _in_parts(
    query_RW: Tensor, key_SW: Tensor, value_SC: Tensor, keep_1S: Tensor | None, parts: int
) -> Tensor:
    """One KV head, [R, C]: equal parts as one batch, and the slots that are left over."""
    even = key_SW.shape[0] // parts * parts
    keys_NSW, values_NSC = (x[:even].unflatten(0, (parts, -1)) for x in (key_SW, value_SC))
    score_NRS = torch.matmul(query_RW, keys_NSW.mT)
    scores = [score_NRS.transpose(0, 1).flatten(1), torch.matmul(query_RW, key_SW[even:].mT)]
    weight_RS = _weights(torch.cat(scores, 1), keep_1S).to(value_SC.dtype)
    weight_NRS = weight_RS[:, :even].unflatten(1, (parts, -1)).transpose(0, 1)
    wide = torch.promote_types(value_SC.dtype, torch.float32)
    summed = torch.matmul(weight_NRS, values_NSC).sum(0, dtype=wide)
    return (summed + torch.matmul(weight_RS[:, even:], value_SC[even:])).to(value_SC.dtype)


def _weights(score: Tensor, keep: Tensor | None) -> Tensor:
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if keep is None:
        return score.softmax(-1)
    return score.masked_fill(~keep, float("-inf")).softmax(-1).masked_fill(~keep, 0.0)
