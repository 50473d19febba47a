"""Long answers of a pruned model and its dense model: length, loops, KL.

Each model writes on by itself. Along both texts the next-token distributions of the two are then
compared at every token: along the dense model's text they tell how near one step stays far into a
text; along the pruned model's own, whether it leads itself to where it understands less.

Shapes: P tokens of a prompt, T tokens of a text, C tokens of a chunk, E model dim.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ...model.errors import RapError
from ...runtime.logits import Head, chunk_tokens, decoder_of
from ...runtime.progress import Progress
from ...runtime.state import evaluating
from .decoding import Text
from .fidelity import divergence
from .generation import compare, repetition_rate
from .intervals import Interval, mean_interval, share_interval

FIRST_EDGE = 64  # tokens; ranges of positions quadruple from here
LOOP_TOKENS = 256
LONGEST_PERIOD = 64


@dataclass(frozen=True)
class PositionDivergence:
    """Mean KL(dense || pruned), nats/token, of tokens `start` to `stop - 1` of an answer.

    A mean over the `num_texts` texts that are as long, each with its own mean, and its interval.
    """

    start: int
    stop: int
    num_texts: int
    kl: Interval


@dataclass(frozen=True)
class Answers:
    """What one model wrote, over all prompts, with 95% intervals over prompts.

    `length` is in tokens, the end token included. `ended` is the share that came to an end token
    within the tokens asked for, `looping` the share that are in a loop at their end
    (`ends_in_loop`), `repetition` the mean share of 4-grams that occurred before. `kl` is the
    divergence of the pruned model from the dense one along these texts, a mean of means of texts.
    """

    length: Interval
    ended: Interval
    looping: Interval
    repetition: Interval
    kl: Interval
    positions: tuple[PositionDivergence, ...]


@dataclass(frozen=True)
class LongOutput:
    """Answers of a pruned and of its dense model to the same prompts.

    `agreement` is the share of places with the same token, of the places of the longer text, and
    `common_prefix` the tokens before the first difference.
    """

    pruned: Answers
    dense: Answers
    agreement: Interval
    common_prefix: Interval
    num_prompts: int
    num_tokens: int


def compare_answers(
    model: Any,
    dense: Any,
    prompts: Sequence[Tensor],
    texts: Sequence[Text],
    dense_texts: Sequence[Text],
    *,
    num_tokens: int,
    ends: frozenset[int],
    again: Sequence[Text] | None = None,
    progress: bool = False,
) -> LongOutput:
    """Compare the answers of both models to prompts [P], up to `num_tokens` each.

    `again` as of `divergences`. Raises RapError for a divergence that is not finite.
    """
    kl = divergences(model, dense, prompts, texts, dense_texts, again=again, progress=progress)
    return long_output(texts, dense_texts, kl, num_tokens=num_tokens, ends=ends)


@torch.no_grad()
def divergences(
    model: Any,
    dense: Any,
    prompts: Sequence[Tensor],
    texts: Sequence[Text],
    dense_texts: Sequence[Text],
    *,
    again: Sequence[Text] | None = None,
    progress: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """KL(dense || model) in nats at every token of the model's answer [T] and the dense answer [T].

    A pair a prompt. Each model reads the other's texts once; its states along its own are those it
    wrote them from. `again` are the dense answers with the states of a model that wrote them again,
    where it reads with another cache than its own. Raises RapError for a divergence that is not
    finite.
    """
    total = sum(len(text.tokens) for text in (*texts, *dense_texts))
    heads, step = (Head(dense), Head(model)), chunk_tokens(dense)
    found = []
    bar = Progress("divergence", total, "tokens", tokens=1, shown=progress, transient=True)
    with evaluating(model), evaluating(dense), bar:
        for row, (prompt_P, text, dense_text) in enumerate(
            zip(prompts, texts, dense_texts, strict=True)
        ):
            theirs_TE = read(dense, prompt_P, text.tokens)
            # Of what was written again one token is read, to know where states come out.
            ours_TE = read(model, prompt_P, dense_text.tokens[: None if again is None else 1])
            if again is not None:
                ours_TE = again[row].states.to(ours_TE.device)
            # A head works where its model's states come out; what was kept is on the CPU.
            own = theirs_TE, text.states.to(ours_TE.device)
            theirs = dense_text.states.to(theirs_TE.device), ours_TE
            found.append((_along(heads, own, step), _along(heads, theirs, step)))
            bar.advance(len(text.tokens) + len(dense_text.tokens))
    return found


def long_output(
    texts: Sequence[Text],
    dense_texts: Sequence[Text],
    kl: Sequence[tuple[Tensor, Tensor]],
    *,
    num_tokens: int,
    ends: frozenset[int],
) -> LongOutput:
    """The summary of answers of up to `num_tokens` tokens, and of `divergences` along them."""
    ours, theirs = ([one.tokens for one in group] for group in (texts, dense_texts))
    along_ours, along_theirs = zip(*kl, strict=True)
    same = [alike(*pair) for pair in zip(ours, theirs, strict=True)]
    return LongOutput(
        pruned=summary(ours, along_ours, num_tokens, ends),
        dense=summary(theirs, along_theirs, num_tokens, ends),
        agreement=mean_interval([share for share, _ in same]),
        common_prefix=mean_interval([prefix for _, prefix in same]),
        num_prompts=len(texts),
        num_tokens=num_tokens,
    )


def read(model: Any, prompt_P: Tensor, tokens_T: Tensor) -> Tensor:
    """The model's states [T, E] from which it would choose each token of a text, on its device."""
    ids = torch.cat([prompt_P, tokens_T[:-1]])[None]
    device = model.get_input_embeddings().weight.device
    output = decoder_of(model)[1](input_ids=ids.to(device), use_cache=False)
    states_TE: Tensor = output.last_hidden_state[0, len(prompt_P) - 1 :]
    return states_TE


def summary(
    tokens: Sequence[Tensor], kl: Sequence[Tensor], num_tokens: int, ends: frozenset[int]
) -> Answers:
    """The summary of one model's answers [T], with the KL [T] along them."""
    ended = [int(text_T[-1]) in ends for text_T in tokens]
    # An end token belongs to no loop, and is no word that could be repeated.
    words = [
        text_T[: len(text_T) - is_end].tolist()
        for text_T, is_end in zip(tokens, ended, strict=True)
    ]
    return Answers(
        length=mean_interval([len(text_T) for text_T in tokens]),
        ended=_share(ended),
        looping=_share([ends_in_loop(text) for text in words]),
        repetition=mean_interval([repetition_rate(text) for text in words]),
        kl=mean_interval([float(kl_T.double().mean()) for kl_T in kl]),
        positions=by_position(kl, num_tokens),
    )


def by_position(kl: Sequence[Tensor], num_tokens: int) -> tuple[PositionDivergence, ...]:
    """KL [T] along answers in ranges of positions: the first of 64 tokens, then to 256, ...

    A text counts in the ranges that it has a token in; a range without a text is left out.
    """
    edges = [0, FIRST_EDGE]
    while edges[-1] < num_tokens:
        edges.append(4 * edges[-1])
    edges[-1] = num_tokens
    found = []
    for start, stop in itertools.pairwise(edges):
        means = [float(kl_T[start:stop].double().mean()) for kl_T in kl if len(kl_T) > start]
        if means:
            found.append(PositionDivergence(start, stop, len(means), mean_interval(means)))
    return tuple(found)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the last 256 tokens repeat one stretch of at most 64 tokens, so four times or more.

    A shorter text is never in a loop, nor is one in which a repeated line counts on.
    """
    last = list(tokens[-LOOP_TOKENS:])
    return len(last) == LOOP_TOKENS and any(
        last[period:] == last[:-period] for period in range(1, LONGEST_PERIOD + 1)
    )


def alike(ours_T: Tensor, theirs_T: Tensor) -> tuple[float, int]:
    """Share of the longer text's places at which both have the same token, and their prefix."""
    shorter = min(len(ours_T), len(theirs_T))
    found = compare(ours_T[:shorter], theirs_T[:shorter])
    return found.agreement * shorter / max(len(ours_T), len(theirs_T)), found.common_prefix


def _share(values: Sequence[bool]) -> Interval:
    return share_interval(sum(values) / len(values), len(values))


def _along(heads: tuple[Head, Head], states: tuple[Tensor, Tensor], step: int) -> Tensor:
    """KL [T] from what the first head makes of its states [T, E] to what the other makes of its."""
    chunks = (
        head.chunks(BaseModelOutput(), states_TE, step)
        for head, states_TE in zip(heads, states, strict=True)
    )
    kl = [
        divergence(other, one.to(other.device))[0].cpu() for other, one in zip(*chunks, strict=True)
    ]
    kl_T = torch.cat(kl)
    if not torch.isfinite(kl_T).all():
        raise RapError("the KL along an answer is not finite; check the checkpoint")
    return kl_T
