"""How close a pruned model stays to its dense one: the distributions themselves, not a label.

Perplexity can stay while every answer changes. The KL divergence from the dense model needs no
labels, and its error over a given text is far smaller than that of perplexity.

Shapes: N tokens of text, T tokens of a window, W windows, C tokens of a chunk, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...data.bos import Bos, bos_token
from ...model.errors import RapError
from ...runtime.logits import Head, chunk_tokens, decoder_of, vocabulary
from ...runtime.memory import in_precision
from ...runtime.progress import Progress
from ...runtime.state import evaluating
from .intervals import Interval, mean_interval, perplexity_ratio_interval
from .perplexity import (
    Losses,
    Perplexity,
    evaluation_window,
    position_ranges,
    token_losses,
    whole_windows,
)

PIECES = 4  # of a chunk of logits


@dataclass(frozen=True)
class PositionRange:
    """KL and agreement of predictions made after `start + 1` to `stop` tokens of context."""

    start: int
    stop: int
    kl: float
    top1: float


@dataclass(frozen=True)
class Fidelity:
    """Mean KL(dense || pruned) in nats/token with its interval over windows, and its tail.

    `kl_p99` is the 99th percentile over tokens; `top1` the share of tokens at which both models
    think the same one most likely. `perplexity_ratio` is that of the pruned model as a multiple of
    the dense one's, its interval over pairs of windows.
    """

    kl: Interval
    kl_p99: float
    top1: Interval
    perplexity: Perplexity
    dense_perplexity: Perplexity
    perplexity_ratio: Interval
    positions: tuple[PositionRange, ...]
    num_windows: int
    window: int

    def figures(self) -> dict[str, Any]:
        """Entries of a result for a pruned model in addition to perplexity, as JSON-able data."""
        kept = ("kl", "kl_p99", "top1", "perplexity_ratio", "positions")
        return {name: value for name, value in asdict(self).items() if name in kept}


def fidelity(
    model: Any,
    dense: Any,
    token_ids: Tensor | Sequence[int],
    *,
    window: int | None = None,
    max_windows: int | None = None,
    bos: Bos = "auto",
    dtype: torch.dtype | None = torch.float32,
    progress: bool = False,
) -> Fidelity:
    """Compare the next-token distributions of `model` and `dense` on whole windows of a text.

    `token_ids` [N] are the text, of which `max_windows` windows of `window` tokens are read (None:
    all), each with `bos` in front if there is one. Both models run in `dtype` (None: as they are),
    one after the other; distributions are float32, divergences in nats a token, sums float64.
    Windows are those of `perplexity`, and so are the perplexities, to the last digit.
    The first token of a window predicts from nothing but itself and counts like any other in the
    divergence, as does the last. Raises RapError for a text shorter than a window, models of
    different vocabularies, or a loss or divergence that is not finite.
    """
    check_vocabularies(vocabulary(model), vocabulary(dense))
    sizes: dict[str, Any] = {"window": window, "max_windows": max_windows}
    states = DenseStates(dense, token_ids, **sizes, bos=bos, dtype=dtype, progress=progress)
    return states.compare(model, progress=progress)


class DenseStates:
    """A dense model's states below its head on windows of a text: one pass, many comparisons.

    Held are the head, and on the CPU one number a token and hidden channel; not the decoder.
    Arguments are those of `fidelity`.
    """

    @torch.no_grad()
    def __init__(
        self,
        dense: Any,
        token_ids: Tensor | Sequence[int],
        *,
        window: int | None = None,
        max_windows: int | None = None,
        bos: Bos = "auto",
        dtype: torch.dtype | None = torch.float32,
        progress: bool = False,
    ) -> None:
        self.window, self.dtype = evaluation_window(dense, window), dtype
        self.bos = bos_token(bos, config=dense.config)
        self.windows_WT, self.num_left_out = whole_windows(
            dense, token_ids, self.window, max_windows, self.bos
        )
        self.vocabulary = vocabulary(dense)
        dense = in_precision(dense, dtype)
        self._states = []
        with evaluating(dense), self._bar("dense model", progress) as bar:
            self._head = Head(dense)
            for ids_T in self.windows_WT:
                output = _decoded(dense, ids_T)
                self._device = output.last_hidden_state.device
                output.last_hidden_state = output.last_hidden_state.cpu()
                self._states.append((output, output.last_hidden_state[0]))
                bar.advance(self.window)

    @torch.no_grad()
    def compare(self, model: Any, *, progress: bool = False) -> Fidelity:
        """KL of `model` to the dense model, and the perplexities of both.

        Raises RapError for another vocabulary, or a loss or divergence that is not finite.
        """
        check_vocabularies(vocabulary(model), self.vocabulary)
        model = in_precision(model, self.dtype)
        kl_WT, same_WT = torch.empty(self.windows_WT.shape), torch.empty(self.windows_WT.shape)
        losses = Losses(" of the pruned model"), Losses(" of the dense model")
        with evaluating(model), self._bar("fidelity", progress) as bar:
            for number in range(len(self.windows_WT)):
                kl_WT[number], same_WT[number] = self._compare_window(model, number, losses)
                bar.advance(self.window)
        if not torch.isfinite(kl_WT).all():
            bad = int((~torch.isfinite(kl_WT)).any(1).nonzero()[0])
            raise RapError(f"the KL is not finite in window {bad}; check the checkpoint")
        ours, theirs = (
            part.perplexity(self.window, self.num_left_out, self.bos) for part in losses
        )
        return Fidelity(
            kl=mean_interval(kl_WT.double().mean(1).tolist()),
            kl_p99=float(kl_WT.flatten().kthvalue(max(1, round(0.99 * kl_WT.numel()))).values),
            top1=mean_interval(same_WT.double().mean(1).tolist()),
            perplexity=ours,
            dense_perplexity=theirs,
            perplexity_ratio=perplexity_ratio_interval(ours.window_nats, theirs.window_nats),
            positions=tuple(_by_position(kl_WT, same_WT)),
            num_windows=len(self.windows_WT),
            window=self.window,
        )

    def _compare_window(
        self, model: Any, number: int, losses: tuple[Losses, Losses]
    ) -> tuple[Tensor, Tensor]:
        """KL and agreement, both [T]; the losses of the two models are added to theirs."""
        ids_T = self.windows_WT[number]
        step = chunk_tokens(model)
        output, (kept, kept_TE) = _decoded(model, ids_T), self._states[number]
        ours = _chunks(Head(model), output, output.last_hidden_state[0], step)
        # A head leaves what it reads in its output, which would keep a window on the device.
        theirs = _chunks(self._head, copy.copy(kept), kept_TE.to(self._device), step)
        nats: tuple[list[Tensor], list[Tensor]] = [], []
        found: list[tuple[Tensor, Tensor]] = []
        targets = [*ids_T[1:].split(step), None]  # nothing is known of what follows the last token
        for targets_C, logits_CV, dense_CV in zip(targets, ours, theirs, strict=True):
            pair = logits_CV, dense_CV.to(logits_CV.device)
            if targets_C is not None:
                for chunks, part_CV in zip(nats, pair, strict=True):
                    chunks.append(token_losses(part_CV, targets_C))
            # In pieces: a divergence takes several times the memory of the logits.
            pieces = (part_CV.split(max(1, step // PIECES)) for part_CV in pair)
            found += [divergence(other, one) for one, other in zip(*pieces, strict=True)]
        for part, chunks in zip(losses, nats, strict=True):
            part.add(chunks)
        kl, same = zip(*found, strict=True)
        return torch.cat(kl).cpu(), torch.cat(same).cpu()

    def _bar(self, what: str, shown: bool) -> Progress:
        size = self.windows_WT.numel()
        return Progress(what, size, "tokens", tokens=1, shown=shown, transient=True)


def check_vocabularies(ours: int, theirs: int) -> None:
    """RapError unless both models have as many tokens."""
    if ours != theirs:
        raise RapError(
            f"the models have vocabularies of {ours} and {theirs}; give the dense model of this "
            "pruned model"
        )


def divergence(dense_CV: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(dense || model) [C] in nats, and whether both have the same most likely token [C]."""
    expected, found = dense_CV.float().log_softmax(-1), logits_CV.float().log_softmax(-1)
    # Rounding can leave a sum of many small terms just below zero.
    kl_C = (expected.exp() * (expected - found)).sum(-1, dtype=torch.float64).clamp_min(0.0)
    return kl_C.float(), (expected.argmax(-1) == found.argmax(-1)).float()


def _decoded(model: Any, ids_T: Tensor) -> Any:
    ids_BT = ids_T[None].to(model.get_input_embeddings().weight.device)
    return decoder_of(model)[1](input_ids=ids_BT, use_cache=False)


def _chunks(head: Head, output: Any, hidden_TE: Tensor, step: int) -> Iterator[Tensor]:
    """Logits of all tokens, cut as `perplexity` cuts them, so that losses have the same digits."""
    yield from head.chunks(output, hidden_TE[:-1], step)
    yield from head.chunks(output, hidden_TE[-1:], step)


def _by_position(kl_WT: Tensor, same_WT: Tensor) -> list[PositionRange]:
    ranges = []
    for start, stop in position_ranges(kl_WT.shape[1]):
        kl, top1 = (float(x_WT[:, start:stop].double().mean()) for x_WT in (kl_WT, same_WT))
        ranges.append(PositionRange(start, stop, kl, top1))
    return ranges
