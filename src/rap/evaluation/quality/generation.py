"""Long greedy continuations of a pruned model compared with its dense model.

Divergence on given text says how near one step is; here every step builds on the model's own. Two
good continuations may part at a tie and never meet again, so the common prefix and the agreement
measure nearness to the dense model, not quality. Repetition shows what they do not: a loop.

Shapes: B prompts in a batch, W prompts, P tokens of a prompt, T tokens of a continuation, N tokens
of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from ... import assets
from ...data.bos import Bos, bos_token, with_bos
from ...data.entries import read_entries
from ...data.protocol import evaluation_rng
from ...model.errors import RapError
from ...runtime.progress import Progress
from .decoding import NewCache, write
from .fidelity import check_vocabularies
from .intervals import Interval, mean_interval
from .perplexity import vocabulary

NGRAM = 4


@dataclass(frozen=True)
class Continuation:
    """One prompt: `agreement` is the share of tokens that both models have at the same place.

    `common_prefix` counts the tokens before the first difference. The repetitions are
    `repetition_rate` of the model's and the dense model's continuation.
    """

    agreement: float
    common_prefix: int
    repetition: float
    dense_repetition: float


@dataclass(frozen=True)
class Generation:
    """Means over `num_prompts` continuations of `num_tokens` tokens, with intervals over prompts.

    `common_prefix` is in tokens, at most `num_tokens`; the others are shares.
    """

    agreement: Interval
    common_prefix: Interval
    repetition: Interval
    dense_repetition: Interval
    num_prompts: int
    prompt_tokens: int
    num_tokens: int
    continuations: tuple[Continuation, ...]


def generation(
    model: Any,
    dense: Any,
    token_ids: Tensor | Sequence[int],
    *,
    num_prompts: int = 64,
    prompt_tokens: int = 64,
    num_tokens: int = 512,
    batch_size: int = 16,
    seed: int = 0,
    bos: Bos = "auto",
    new_cache: NewCache | None = None,
    progress: bool = False,
) -> Generation:
    """Compare greedy continuations of stretches of a text [N] by both models.

    Prompts are stretches that do not overlap, drawn with `seed`; each begins with BOS as
    `bos.bos_token` decides, which is one of its tokens. An end of text is a token like any other:
    all continuations have `num_tokens`. The model reads with a `new_cache`, if one is given, the
    dense one with its own. Raises RapError for a count below one, a text with too few
    prompts, or models of different vocabularies.
    """
    check_vocabularies(vocabulary(model), vocabulary(dense))
    if min(num_prompts, prompt_tokens, num_tokens, batch_size) < 1:
        raise RapError(
            "prompts, their tokens, the tokens to write and the batch size are 1 or more"
        )
    first = bos_token(bos, config=dense.config)
    text = torch.as_tensor(token_ids)
    batches = _prompts(text, num_prompts, prompt_tokens, first, seed).split(batch_size)
    total = 2 * num_prompts * num_tokens
    with Progress("generation", total, "tokens", tokens=1, shown=progress, transient=True) as bar:
        ours_WT, theirs_WT = (
            torch.cat([continue_greedily(one, batch, num_tokens, bar, made) for batch in batches])
            for one, made in ((model, new_cache), (dense, None))
        )
    found = tuple(compare(*pair) for pair in zip(ours_WT, theirs_WT, strict=True))
    return Generation(
        agreement=mean_interval([one.agreement for one in found]),
        common_prefix=mean_interval([one.common_prefix for one in found]),
        repetition=mean_interval([one.repetition for one in found]),
        dense_repetition=mean_interval([one.dense_repetition for one in found]),
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        num_tokens=num_tokens,
        continuations=found,
    )


def continue_greedily(
    model: Any,
    prompts_BP: Tensor,
    num_tokens: int,
    bar: Progress | None = None,
    new_cache: NewCache | None = None,
) -> Tensor:
    """The most likely token after the prompts, again and again with the cache, [B, T]."""
    batch = list(prompts_BP)
    texts = write(model, batch, num_tokens, new_cache=new_cache, batch_size=len(batch), bar=bar)
    return torch.stack([text.tokens for text in texts])


def compare(ours_T: Tensor, theirs_T: Tensor) -> Continuation:
    """The differences between a model's and its dense model's continuation of one prompt."""
    same_T = ours_T == theirs_T
    prefix = int(same_T.cumprod(0).sum())
    ours, theirs = ours_T.tolist(), theirs_T.tolist()
    share = float(same_T.double().mean())
    return Continuation(share, prefix, repetition_rate(ours), repetition_rate(theirs))


def repetition_rate(tokens: Sequence[int]) -> float:
    """Share of n-grams of `NGRAM` tokens that occurred before in the sequence.

    1 - (different n-grams) / (n-grams), the seq-rep-n of Welleck et al. 2020, arXiv 1908.04319,
    section 6.1. Of a sequence that is shorter than an n-gram it is 0.
    """
    grams = list(zip(*(tokens[start:] for start in range(NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _prompts(
    text_N: Tensor, num_prompts: int, prompt_tokens: int, bos: int | None, seed: int
) -> Tensor:
    """Stretches of the text that do not overlap, [W, P] with BOS, in the order of the text."""
    size = prompt_tokens - (bos is not None)
    if size < 1:
        raise RapError(f"a prompt of {prompt_tokens} tokens is BOS alone: use 2 or more")
    found = len(text_N) // size
    if found < num_prompts:
        raise RapError(
            f"the text has {len(text_N)} tokens, enough for {found} prompts of {prompt_tokens}, "
            f"not {num_prompts}: give a longer text, or use fewer or shorter prompts"
        )
    drawn = evaluation_rng(seed, prompt_tokens).choice(found, num_prompts, replace=False)
    return with_bos(text_N[: found * size].view(found, size)[np.sort(drawn)], bos)


def read_prompts(source: str) -> list[str]:
    """The prompts of a file, or the `bundled` fifty, which are of fourteen kinds.

    A .txt has a prompt a line, a .jsonl an object with a `text` a line. Raises RapError for a file
    without a prompt, or one that cannot be read.
    """
    path = assets.prompts_path() if source == "bundled" else source
    prompts = read_entries(path)
    if not prompts:
        raise RapError(f"{source} has no prompt: write one a line")
    return prompts


def chat_tokens(prompts: list[str], tokenizer: Any) -> list[Tensor]:
    """Each prompt as the first message of a user, up to where the model answers: tokens [P].

    Special tokens are those of the template, BOS too. Raises RapError without one, and where it
    refuses such a chat.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RapError("the tokenizer has no chat template: remove --chat, or take a chat model")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    how = {"add_generation_prompt": True, "return_dict": True}
    try:
        found = [tokenizer.apply_chat_template(chat, **how).input_ids for chat in chats]
    except TemplateError as error:
        raise RapError(
            f"the chat template raises an error for a user's first message ({error}): remove --chat"
        ) from error
    return [torch.tensor(ids) for ids in found]
