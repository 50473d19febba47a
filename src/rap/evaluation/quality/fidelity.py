"""How close a pruned model stays to its dense one: the distributions themselves, not a label.

Perplexity can stay while every answer changes. The KL divergence from the dense model needs no
labels, and its error over a given text is far smaller than that of perplexity.

Shapes: N tokens of text, T tokens of a window, W windows, C tokens of a chunk, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...calibration.state import evaluating
from ...model.errors import RapError
from .intervals import Interval, mean_interval
from .logits import decoder_of, head_logits
from .perplexity import CHUNK_LOGITS, in_precision, whole_windows

FIRST_EDGE = 128  # tokens; position ranges double from here


@dataclass(frozen=True)
class PositionRange:
    """Fidelity of predictions made after `start` to `stop - 1` tokens of context."""

    start: int
    stop: int
    kl: float
    top1: float


@dataclass(frozen=True)
class Fidelity:
    """Mean KL(dense || pruned) in nats a token with its interval over windows, and its tail.

    `kl_p99` is the 99th percentile over tokens; `top1` the share of tokens at which both models
    think the same one most likely.
    """

    kl: Interval
    kl_p99: float
    top1: Interval
    positions: tuple[PositionRange, ...]
    num_windows: int
    window: int


@torch.no_grad()
def fidelity(
    model: Any,
    dense: Any,
    token_ids: Tensor | Sequence[int],
    *,
    window: int,
    max_windows: int | None = None,
    bos: int | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Fidelity:
    """Compare the next-token distributions of `model` and `dense` on whole windows of a text.

    Both models run in `dtype` (None: as they are); distributions are float32, sums float64. The
    first token of a window predicts from nothing but itself and counts like any other; it is `bos`
    where one is given (`calibration.bos.bos_token` says which a model wants). Raises
    RapError for a text shorter than a window, models of different vocabularies, or a divergence
    that is not finite.
    """
    sizes = [part.get_input_embeddings().weight.shape[0] for part in (model, dense)]
    if sizes[0] != sizes[1]:
        raise RapError(
            f"the models have vocabularies of {sizes[0]} and {sizes[1]}: give the dense model that "
            "this one was cut from"
        )
    windows_WT, _ = whole_windows(model, token_ids, window, max_windows, bos)
    model, dense = in_precision(model, dtype), in_precision(dense, dtype)
    kl_WT, same_WT = torch.empty(windows_WT.shape), torch.empty(windows_WT.shape)
    with evaluating(model), evaluating(dense):
        for number, ids_T in enumerate(windows_WT):
            kl_WT[number], same_WT[number] = _compare_window(model, dense, ids_T)
    if not torch.isfinite(kl_WT).all():
        bad = int((~torch.isfinite(kl_WT)).any(1).nonzero()[0])
        raise RapError(f"the divergence is not finite in window {bad}: check the checkpoint")
    return Fidelity(
        kl=mean_interval(kl_WT.double().mean(1).tolist()),
        kl_p99=float(kl_WT.flatten().kthvalue(max(1, round(0.99 * kl_WT.numel()))).values),
        top1=mean_interval(same_WT.double().mean(1).tolist()),
        positions=tuple(_by_position(kl_WT, same_WT)),
        num_windows=len(windows_WT),
        window=window,
    )


def divergence(dense_CV: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(dense || model) [C] in nats, and whether both have the same most likely token [C]."""
    expected, found = dense_CV.float().log_softmax(-1), logits_CV.float().log_softmax(-1)
    # Rounding can leave a sum of many small terms just below zero.
    kl_C = (expected.exp() * (expected - found)).sum(-1, dtype=torch.float64).clamp_min(0.0)
    return kl_C.float(), (expected.argmax(-1) == found.argmax(-1)).float()


def _compare_window(model: Any, dense: Any, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    states = [_hidden(part, ids_T) for part in (dense, model)]
    step = max(1, CHUNK_LOGITS // model.get_input_embeddings().weight.shape[0] // 2)
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(ids_T), step):
        pair = []
        for part, (name, output, hidden_TE) in zip((dense, model), states, strict=True):
            output.last_hidden_state = hidden_TE[None, start : start + step]
            pair.append(head_logits(part, name, output)[0].cpu())
        found.append(divergence(*pair))
    kl, same = zip(*found, strict=True)
    return torch.cat(kl), torch.cat(same)


def _hidden(model: Any, ids_T: Tensor) -> tuple[str, Any, Tensor]:
    ids_BT = ids_T[None].to(model.get_input_embeddings().weight.device)
    name, decoder = decoder_of(model)
    output = decoder(input_ids=ids_BT, use_cache=False)
    return name, output, output.last_hidden_state[0]


def _by_position(kl_WT: Tensor, same_WT: Tensor) -> list[PositionRange]:
    length, start, stop = kl_WT.shape[1], 0, FIRST_EDGE
    ranges = []
    while start < length:
        stop = min(stop, length)
        kl, top1 = (float(x_WT[:, start:stop].double().mean()) for x_WT in (kl_WT, same_WT))
        ranges.append(PositionRange(start, stop, kl, top1))
        start, stop = stop, 2 * stop
    return ranges
