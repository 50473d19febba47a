"""Attention of one query per sequence in plain PyTorch: what the kernel is tested against.

Also the fall-back wherever neither the kernel nor SDPA fits (sinks or a soft cap outside CUDA).
"""

import torch
from torch import Tensor

from ..rope_pairs import reference as rope


def attend(
    q_BHTW: Tensor,
    keys_BGSW: Tensor,
    values_BGSC: Tensor,
    *,
    scale: float,
    keep_B1TS: Tensor | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(cap(scale q k)) v over kept slots, [B, H, T, C]; a sink takes its share of the sum.

    The mask may also be of every head, or of numbers to add to scores, as transformers takes them.
    Scores and softmax in float32 or wider, as in the families' eager attention. A query that keeps
    no slot gets zeros. Of the weights a share `dropout` is zeroed at random, and the others grow by
    1 / (1 - dropout). Memory grows with T x S.
    """
    groups, wide = keys_BGSW.shape[1], torch.promote_types(q_BHTW.dtype, torch.float32)
    q = q_BHTW.unflatten(1, (groups, -1))
    score = torch.matmul(q, keys_BGSW[:, :, None].transpose(-1, -2)).to(wide) * scale  # BGRTS
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if keep_B1TS is not None:
        score = _masked(score, keep_B1TS)
    top = score.amax(-1, keepdim=True).clamp_min(torch.finfo(wide).min)
    sink = None
    if sinks_H is not None:
        sink = sinks_H.to(wide).reshape(groups, -1)[None, :, :, None, None]
        top = torch.maximum(top, sink)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    weight = (weight / total.clamp_min(torch.finfo(wide).tiny)).to(values_BGSC.dtype)
    if dropout:
        weight = torch.dropout(weight, dropout, train=True)
    return torch.matmul(weight, values_BGSC[:, :, None]).flatten(1, 2)


def _masked(score_BGRTS: Tensor, mask: Tensor) -> Tensor:
    """Scores under a mask [B, 1 or H, T, S]: of what is kept, or, in floats, of what is added."""
    heads = score_BGRTS.shape[1:3]
    mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, heads)
    if mask.dtype == torch.bool:
        return score_BGRTS.masked_fill(~mask, float("-inf"))
    return score_BGRTS + mask.to(score_BGRTS.dtype)


def kept_slots(
    num_slots: int,
    lengths_B: Tensor | None,
    keep_BS: Tensor | None,
    batch: int,
    device: torch.device,
) -> Tensor:
    """Which slots the query of each sequence sees, bool [B, S]."""
    slots_S = torch.arange(num_slots, device=device)
    full = torch.full((1,), num_slots, device=device)
    length_B1 = (full if lengths_B is None else lengths_B).reshape(-1, 1)
    keep = (slots_S < length_B1).expand(batch, -1)
    return keep if keep_BS is None else keep & keep_BS


def decode(
    q_BHW: Tensor,
    keys_BGSW: Tensor,
    values_BGSC: Tensor,
    *,
    scale: float,
    lengths_B: Tensor | None = None,
    keep_BS: Tensor | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    pages_BL: Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """`attend` for one rotated query per sequence, [B, H, C].

    With `pages_BL` keys and values are pages, [N, G, S, W] and [N, G, S, C].
    """
    if pages_BL is not None:
        keys_BGSW, values_BGSC = (gathered(x, pages_BL) for x in (keys_BGSW, values_BGSC))
    batch, num_slots = q_BHW.shape[0], keys_BGSW.shape[2]
    keep = kept_slots(num_slots, lengths_B, keep_BS, batch, q_BHW.device)
    if pages_BL is not None or keys_BGSW.dtype != q_BHW.dtype or cache_scales != (1.0, 1.0):
        # A copy, in which what lies past the end of a sequence may be anything.
        keys_BGSW, values_BGSC = (
            (x.to(q_BHW.dtype) * scale).masked_fill(~keep[:, None, :, None], 0.0)
            for x, scale in zip((keys_BGSW, values_BGSC), cache_scales, strict=True)
        )
    output = attend(
        q_BHW[:, :, None],
        keys_BGSW,
        values_BGSC,
        scale=scale,
        keep_B1TS=keep[:, None, None],
        softcap=softcap,
        sinks_H=sinks_H,
    )
    return output[:, :, 0]


def gathered(pages_NGSX: Tensor, pages_BL: Tensor) -> Tensor:
    """The pages that every sequence lists, side by side: [B, G, L S, X].

    Entries of pages that do not exist, past the length of a sequence, are taken for others.
    """
    index = pages_BL.long().clamp(0, len(pages_NGSX) - 1)
    return pages_NGSX[index].transpose(1, 2).flatten(2, 3)


def decode_step(
    states: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    index_GM: Tensor,
    cache: tuple[Tensor, Tensor],
    position_B: Tensor,
    *,
    scale: float,
    keep_BS: Tensor | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    clockwise: bool = False,
) -> Tensor:
    """Rotate q [B, H, W] and k [B, G, W], write k and v into the cache, attend: [B, H, C]."""
    states = tuple(state[:, :, None] for state in states)  # type: ignore[assignment]
    q = rope.rotate_into_cache(states, tables, index_GM, cache, position_B, clockwise=clockwise)
    return decode(
        q[:, :, 0],
        *cache,
        scale=scale,
        lengths_B=position_B + 1,
        keep_BS=keep_BS,
        softcap=softcap,
        sinks_H=sinks_H,
    )
