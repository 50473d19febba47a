"""Perplexity in float32 over contiguous non-overlapping windows, as the paper measures it.

Shapes: N tokens of text, B windows in a batch, T tokens of a window, C tokens of a chunk, V vocab.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.bos import Bos, bos_token, with_bos
from ...data.protocol import EVALUATION_WINDOW
from ...model.errors import RapError
from ...model.layers import trained_length
from ...runtime.logits import Head, chunk_tokens, decoder_of, vocabulary
from ...runtime.memory import in_precision
from ...runtime.progress import Progress
from ...runtime.state import evaluating
from .intervals import exponential

FIRST_EDGE = 128  # tokens; ranges of positions double from here


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss (nats) of tokens predicted at positions `start` to `stop - 1` of a window."""

    start: int
    stop: int
    nats_per_token: float


@dataclass(frozen=True)
class Perplexity:
    """`value` is exp of `nats_per_token`, the mean loss of `num_tokens` predicted tokens.

    It covers `num_windows` whole windows of `window` tokens, the first of each the token `bos`, if
    any; the `num_left_out` tokens of the text after the last of them were not read. `window_nats`
    are the mean losses of the windows one by one, so that two models can be compared in pairs, and
    `positions` those of positions in the window, by ranges that double: does far context help?
    `float()` gives the value, `dataclasses.asdict` a dictionary for JSON.
    """

    value: float
    nats_per_token: float
    num_windows: int
    num_tokens: int
    window: int
    num_left_out: int = 0
    bos: int | None = None
    # Results of earlier releases have none.
    window_nats: list[float] = field(default_factory=list)
    positions: list[PositionLoss] = field(default_factory=list)

    def __float__(self) -> float:
        return self.value


@torch.no_grad()
def perplexity(
    model: Any,
    token_ids: Tensor | Sequence[int],
    *,
    window: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    bos: Bos = "auto",
    dtype: torch.dtype | None = torch.float32,
    progress: bool = False,
) -> Perplexity:
    """Perplexity of a causal LM on a text of N tokens, in the paper's setting by default.

    The text, `token_ids` [N], is cut into whole windows of `window` tokens (default: 2048, or the
    model's `max_position_embeddings` if that is less) that share no token, of which the first
    `max_windows` are read (None: all); each predicts its T - 1 last tokens from those before, and
    what is left over at the end is not scored. Losses are nats in float32,
    their sum float64. Logits are made for a chunk of tokens at a time, at most 2^25 numbers.
    The same call gives the same digits; another `batch_size` may differ in the last ones.

    With a `bos` a window is that, which is read but not predicted, and T - 1 tokens of the text. By
    default it is there only for families that need it: token ids do not say what their tokenizer
    does, so give `bos.bos_token("auto", tokenizer, model.config)`. Windows of T tokens that all
    begin with it already, and one before the text, are taken as they are.

    A model of another precision than `dtype` is evaluated as a copy in it, which for float32 takes
    4 more bytes a parameter on the model's device, and is freed at the end; None evaluates the
    model as it is. Weights and training mode of `model` are left as they were.

    Raises RapError as `check_sizes` does, for a text shorter than a window, ids outside the
    vocabulary, a quantized model with a `dtype`, or a loss that is not finite.
    """
    check_sizes(window, max_windows, batch_size)
    window = evaluation_window(model, window)
    bos = bos_token(bos, config=model.config)
    windows_NT, num_left_out = whole_windows(model, token_ids, window, max_windows, bos)
    losses = Losses()
    model = in_precision(model, dtype)
    size = windows_NT.numel()
    bar = Progress("perplexity", size, "tokens", tokens=1, shown=progress, transient=True)
    with evaluating(model), bar:
        for ids_BT in windows_NT.split(batch_size):
            losses.add(_predicted(model, ids_BT), len(ids_BT))
            bar.advance(ids_BT.numel())
    return losses.perplexity(window, num_left_out, bos)


class Losses:
    """Losses of a text as windows of it are scored, and the perplexity that they come to.

    `of` says of which model, where there are several.
    """

    def __init__(self, of: str = "") -> None:
        self.of = of
        self.total = torch.zeros((), dtype=torch.float64)
        self.window_nats: list[float] = []
        self.position_nats = torch.zeros((), dtype=torch.float64)  # [T - 1] after the first window

    def add(self, chunks: Sequence[Tensor], num_windows: int = 1) -> None:
        """The losses (nats) of all predicted tokens of so many windows, in order, in chunks [C].

        Raises RapError for a loss that is not finite.
        """
        loss = torch.zeros((), dtype=torch.float64)
        for loss_C in chunks:
            loss += loss_C.sum(dtype=torch.float64).cpu()
        if not torch.isfinite(loss):
            first = len(self.window_nats)
            raise RapError(
                f"the loss{self.of} is {float(loss)} in windows {first} to "
                f"{first + num_windows - 1}: the weights hold NaN or inf, or activations overflow; "
                "check the checkpoint, in float32"
            )
        self.total += loss
        loss_BT = torch.cat(list(chunks)).cpu().view(num_windows, -1)
        self.window_nats += loss_BT.mean(1, dtype=torch.float64).tolist()
        self.position_nats = self.position_nats + loss_BT.sum(0, dtype=torch.float64)

    def perplexity(self, window: int, num_left_out: int, bos: int | None) -> Perplexity:
        """That of all windows so far, each of `window` tokens, the first not predicted."""
        count = len(self.window_nats)
        num_tokens = count * (window - 1)
        nats = float(self.total / num_tokens)
        value = exponential(nats)
        mean_T = self.position_nats / count
        positions = [
            PositionLoss(start, stop, float(mean_T[start:stop].mean()))
            for start, stop in position_ranges(len(mean_T))
        ]
        return Perplexity(
            value, nats, count, num_tokens, window, num_left_out, bos, self.window_nats, positions
        )


def position_ranges(length: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) that cover `length` positions: the first of 128, then doubling."""
    edges = [0, FIRST_EDGE]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    edges[-1] = length
    return list(itertools.pairwise(edges))


def check_sizes(
    window: int | None = None, max_windows: int | None = None, batch_size: int = 1
) -> None:
    """RapError for a window of less than two tokens, or less than one window, or one at a time.

    Needs no text, of which a long one takes a minute to read.
    """
    if window is not None and window < 2:
        raise RapError(f"a window of {window} tokens predicts nothing: give 2 or more")
    if max_windows is not None and max_windows < 1:
        raise RapError(f"max_windows must be at least 1, not {max_windows}")
    if batch_size < 1:
        raise RapError(f"batch_size must be at least 1, not {batch_size}")


def evaluation_window(model: Any, window: int | None) -> int:
    """Tokens of a window: those asked for, or 2048, or the model's longest context if less.

    Raises RapError for a window of less than two tokens.
    """
    longest = trained_length(model.config) or EVALUATION_WINDOW
    window = min(EVALUATION_WINDOW, longest) if window is None else window
    check_sizes(window)
    return window


def whole_windows(
    model: Any,
    token_ids: Tensor | Sequence[int],
    window: int,
    max_windows: int | None,
    bos: int | None,
) -> tuple[Tensor, int]:
    """Windows, LongTensor [num_windows, T] on the CPU, and the number of tokens left over.

    With a `bos` each begins with it, once. Raises RapError for a text shorter than a window, less
    than one window, what is no token ids, or ids outside the vocabulary.
    """
    check_sizes(max_windows=max_windows)
    ids = _whole_numbers(token_ids)
    made = bos is None or (len(ids) >= window and bool((_rows(ids, window)[:, 0] == bos).all()))
    if not made and ids[:1].tolist() == [bos]:
        ids = ids[1:]
    size = window if made else window - 1
    if len(ids) < size:
        raise RapError(
            f"the text has {len(ids)} tokens, less than one window of {window}: give a longer text"
            " or a smaller window"
        )
    vocab = vocabulary(model)
    known = [int(ids.min()), int(ids.max()), bos or 0]
    low, high = min(known), max(known)
    if low < 0 or high >= vocab:
        raise RapError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab}:"
            " encode the text with this model's tokenizer"
        )
    rows = _rows(ids, size)[:max_windows]
    return rows if made else with_bos(rows, bos), len(ids) - rows.numel()


def _whole_numbers(token_ids: Tensor | Sequence[int]) -> Tensor:
    try:
        ids = torch.as_tensor(token_ids, device="cpu").flatten()
    except (TypeError, ValueError, RuntimeError):  # a text, or all that a tokenizer returns
        found = type(token_ids).__name__
    else:
        if not ids.numel() or not ids.is_floating_point():
            return ids.long()
        found = str(ids.dtype)
    raise RapError(
        f"a text is given as its token ids, whole numbers, not as {found}: take "
        "tokenizer(text).input_ids of this model's tokenizer"
    )


def _rows(ids_N: Tensor, size: int) -> Tensor:
    return ids_N[: len(ids_N) // size * size].view(-1, size)


def _predicted(model: Any, ids_BT: Tensor) -> list[Tensor]:
    """Losses (nats) of the B (T - 1) predicted tokens, in chunks [C]."""
    ids_BT = ids_BT.to(model.get_input_embeddings().weight.device)
    _, decoder = decoder_of(model)
    output = decoder(input_ids=ids_BT, use_cache=False)
    hidden_NE = output.last_hidden_state[:, :-1].flatten(0, 1)
    targets_N = ids_BT[:, 1:].flatten()
    step = chunk_tokens(model)
    chunks = Head(model).chunks(output, hidden_NE, step)
    return [token_losses(*pair) for pair in zip(chunks, targets_N.split(step), strict=True)]


def token_losses(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Losses [C] in nats, float32 or better."""
    if logits_CV.dtype != torch.float64:
        logits_CV = logits_CV.float()
    return F.cross_entropy(logits_CV, targets_C.to(logits_CV.device), reduction="none")
