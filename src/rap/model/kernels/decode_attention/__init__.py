"""Attention of one query token per sequence over a cache of kept channels.

Shapes: B batch, H query heads, G KV heads, P dense pairs, M slots, W key width, C value width, S
slots of the cache. `scale` is the dense head's. `lengths` (integers, on the device) say how many
slots each sequence holds, `keep` [B, S] which of them the query sees; `sinks` [H] are logits that
join the softmax's sum; `softcap` bounds scores by tanh. `pages_BL` (integers) lists the pages of
S slots, out of N, that a sequence holds in order; `cache_scales` are what stored keys and values
are multiplied by, one number each, as for a cache in float8_e4m3fn.
No call waits for the device, so that a step can be captured in a CUDA graph.
"""

from torch import Tensor, library

from ..availability import reads_cache, takes_triton
from . import reference


def decode_attention(
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
    """Attention output [B, H, C] of rotated queries; the new token is in the cache already.

    Keys and values are [B, G, S, ...], or with `pages_BL` pages [N, G, S, ...], in the dtype of the
    queries or a narrower one. Scores, softmax and sums in float32. A query that sees no slot gets
    zeros. No gradient.
    """
    if not (takes_triton(q_BHW) and reads_cache(keys_BGSW)):
        return reference.decode(
            q_BHW,
            keys_BGSW,
            values_BGSC,
            scale=scale,
            lengths_B=lengths_B,
            keep_BS=keep_BS,
            softcap=softcap,
            sinks_H=sinks_H,
            pages_BL=pages_BL,
            cache_scales=cache_scales,
        )
    return _decode_attention(
        q_BHW,
        keys_BGSW,
        values_BGSC,
        scale,
        lengths_B,
        keep_BS,
        softcap,
        sinks_H,
        pages_BL,
        *cache_scales,
    )


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
    """`decode_attention` fused with the rotation of q and k and the write of k and v: [B, H, C].

    `states` are q [B, H, W], k [B, G, W] and v [B, G, C], not rotated; `tables` cos and sin
    [1|B, 1, P], strided views allowed; `cache` keys [B, G, S, W] and values [B, G, S, C], whose
    slot `position_B[b]` (int64, on the device; one entry serves all) is overwritten. The query sees
    the slots up to its own. Slots are not checked: that would wait for the device.
    """
    settings = {"scale": scale, "keep_BS": keep_BS}
    if not takes_triton(states[0]):
        return reference.decode_step(
            states,
            tables,
            index_GM,
            cache,
            position_B,
            **settings,  # type: ignore[arg-type]
            softcap=softcap,
            sinks_H=sinks_H,
            clockwise=clockwise,
        )
    return _decode_step(
        *states,
        *tables,
        index_GM,
        *cache,
        position_B,
        scale,
        keep_BS,
        softcap,
        sinks_H,
        clockwise,
    )


@library.custom_op("rap::decode_attention", mutates_args=())
def _decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    lengths: Tensor | None,
    keep: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    pages: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    from .triton import launch  # only where it runs: a CPU has no use for it

    return launch(
        q,
        (keys, values),
        scale=scale,
        lengths_B=lengths,
        keep_BS=keep,
        softcap=softcap,
        sinks_H=sinks,
        pages_BL=pages,
        cache_scales=(key_scale, value_scale),
    )


@_decode_attention.register_fake
def _(q, keys, values, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:2], values.shape[-1])


@library.custom_op("rap::decode_step", mutates_args=("keys", "values"))
def _decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    keep: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    clockwise: bool,
) -> Tensor:
    from .triton import launch

    return launch(
        q,
        (keys, values),
        scale=scale,
        new=(k, v, cos[:, 0], sin[:, 0], index),
        lengths_B=position,
        keep_BS=keep,
        softcap=softcap,
        sinks_H=sinks,
        clockwise=clockwise,
    )


@_decode_step.register_fake
def _(q, k, v, cos, sin, index, keys, values, position, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:2], values.shape[-1])
