"""Text that a model writes after prompts of any lengths, token by token with its cache.

Prompts of a batch are padded on the left, which neither mask nor positions show to the model. A
text ends with the first of the end tokens; its row then leaves the batch.

Shapes: B rows of a batch, P tokens of a prompt, T tokens of a text, S tokens in the cache, E model
dim, V vocabulary, N tokens of it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from ...data.protocol import evaluation_rng
from ...data.sampling import nucleus
from ...model.kernels.growing_cache import grow
from ...runtime.logits import Head, decoder_of
from ...runtime.progress import Progress
from ...runtime.settings import Positive, Share, check_fields
from ...runtime.state import evaluating, shared_reads

_TINY = float(np.finfo(np.float32).tiny)  # an exponential can be 0, by which nothing is divided

NewCache = Callable[[Any], Any]  # makes an empty cache for a model


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn at `temperature` from the fewest most likely that have `top_p` of probability.

    Every prompt has random numbers of its own from `seed`, an exponential for each token of the
    vocabulary at each step, the same for every model. What is drawn is the token whose probability
    divided by its number is the largest (the Gumbel-max trick), so two models that think alike draw
    alike.
    """

    temperature: Positive = 0.7
    top_p: Share = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Text:
    """Tokens [T] that a model wrote, and the states [T, E] that its head chose each of them from.

    Both are on the CPU. An end token is the last of them, if there is one.
    """

    tokens: Tensor
    states: Tensor


@torch.no_grad()
def write(
    model: Any,
    prompts: Sequence[Tensor],
    num_tokens: int,
    *,
    ends: Collection[int] = (),
    sampling: Sampling | None = None,
    new_cache: NewCache | None = None,
    batch_size: int = 16,
    bar: Progress | None = None,
) -> list[Text]:
    """What the model writes after each prompt [P]: `num_tokens` tokens, or up to one of `ends`.

    Greedily, or as `sampling` says, with a cache of its own or a `new_cache` of each batch. Batches
    are of prompts of similar length, and change a text only by rounding. Attention in SDPA runs as
    `rap`, which copies no cache; it is put back. `bar` is in tokens, and counts those that an end
    leaves out when it comes.
    """
    chosen = _Chosen(frozenset(ends), sampling)
    return _in_batches(model, prompts, num_tokens, chosen, new_cache, batch_size, bar)


@torch.no_grad()
def write_again(
    model: Any,
    prompts: Sequence[Tensor],
    texts: Sequence[Tensor],
    *,
    new_cache: NewCache | None = None,
    batch_size: int = 16,
    bar: Progress | None = None,
) -> list[Text]:
    """Given `texts` [T] token by token, as if the model had chosen them: what matters are states.

    As `write` in all else. No text may be empty.
    """
    longest = max(len(text_T) for text_T in texts)
    chosen = _Given([text_T.tolist() for text_T in texts])
    return _in_batches(model, prompts, longest, chosen, new_cache, batch_size, bar)


def _in_batches(
    model: Any,
    prompts: Sequence[Tensor],
    num_tokens: int,
    chosen: "_Chosen",
    new_cache: NewCache | None,
    batch_size: int,
    bar: Progress | None,
) -> list[Text]:
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    found: dict[int, Text] = {}
    with evaluating(model), shared_reads(model):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            cache = new_cache(model) if new_cache is not None else None
            found |= _Batch(model, prompts, rows, chosen, cache).write(num_tokens, bar)
    return [found[row] for row in range(len(prompts))]


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens by which a model ends its answer, from its generation config."""
    config = getattr(model, "generation_config", None) or model.config
    found = config.eos_token_id
    return frozenset([found] if isinstance(found, int) else found or ())


def padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts [P] padded on their left, and 1 where a token is theirs, 0 elsewhere; both [B, P]."""
    ids_BP = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    ones = [torch.ones_like(prompt) for prompt in prompts]
    return ids_BP, pad_sequence(ones, batch_first=True, padding_side="left")


class _Chosen:
    """Tokens as a model chooses them: the most likely ones, or drawn; a text has an end token."""

    def __init__(self, ends: frozenset[int], sampling: Sampling | None) -> None:
        self.ends, self.sampling = ends, sampling
        self.draws: dict[int, np.random.Generator] = {}

    def tokens(self, head: Head, hidden_BE: Tensor, rows: Sequence[int], step: int) -> Tensor:
        """A token for every row, [B]."""
        logits_BV = next(head.chunks(BaseModelOutput(), hidden_BE, len(hidden_BE)))
        if self.sampling is None:
            return logits_BV.argmax(-1)
        probabilities_BV = (logits_BV.float() / self.sampling.temperature).softmax(-1)
        size, seed = logits_BV.shape[-1], self.sampling.seed
        for row in rows:
            self.draws.setdefault(row, evaluation_rng(seed, row))
        draws = [self.draws[row].standard_exponential(size, np.float32) for row in rows]
        race_BV = torch.from_numpy(np.stack(draws)).to(logits_BV.device).clamp_min(_TINY)
        token_BN, likely_BN = nucleus(probabilities_BV, self.sampling.top_p)
        winner_B1 = (likely_BN / race_BV.gather(-1, token_BN)).argmax(-1, keepdim=True)
        return token_BN.gather(-1, winner_B1)[:, 0]

    def is_last(self, row: int, step: int, token: int) -> bool:
        """Whether a row's text ends with this token."""
        return token in self.ends


class _Given(_Chosen):
    """Tokens of texts that are there; of one that is over, its last."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(frozenset(), None)
        self.texts = texts

    def tokens(self, head: Head, hidden_BE: Tensor, rows: Sequence[int], step: int) -> Tensor:
        given = [self.texts[row][min(step, len(self.texts[row]) - 1)] for row in rows]
        return torch.tensor(given, device=hidden_BE.device)

    def is_last(self, row: int, step: int, token: int) -> bool:
        return step + 1 == len(self.texts[row])


class _Batch:
    """Prompts that are continued together; `rows` are those that are still read and written."""

    def __init__(
        self, model: Any, prompts: Sequence[Tensor], rows: list[int], chosen: _Chosen, cache: Any
    ) -> None:
        self.head, self.decoder = Head(model), decoder_of(model)[1]
        self.rows, self.chosen = rows, chosen
        device = model.get_input_embeddings().weight.device
        ids_BP, mask_BP = padded([prompts[row] for row in rows])
        self.ids, self.mask_BS = ids_BP.to(device), mask_BP.to(device)
        # Without padding there is nothing to say, and a mask costs time.
        self.masked = not bool(mask_BP.all())
        self.cache, self.grows = cache, cache is None

    def write(self, num_tokens: int, bar: Progress | None) -> dict[int, Text]:
        """The text of every row."""
        tokens: dict[int, list[int]] = {row: [] for row in self.rows}
        states: dict[int, list[Tensor]] = {row: [] for row in self.rows}
        ended: set[int] = set()
        for step in range(num_tokens):
            hidden_BE = self._step(num_tokens)
            chosen_B = self.chosen.tokens(self.head, hidden_BE, self.rows, step)
            for row, token, state_E in zip(
                self.rows, chosen_B.tolist(), hidden_BE.cpu(), strict=True
            ):
                if row in ended:
                    continue
                tokens[row].append(token)
                states[row].append(state_E)
                last = self.chosen.is_last(row, step, token)
                if last:
                    ended.add(row)
                if bar is not None:
                    bar.advance(num_tokens - step if last else 1)
            if len(ended) == len(tokens):
                break
            self._next(chosen_B, ended)
        return {row: Text(torch.tensor(tokens[row]), torch.stack(states[row])) for row in tokens}

    def _step(self, num_tokens: int) -> Tensor:
        """States [B, E] behind the tokens that were not read yet."""
        new = self.ids.shape[1]
        placed = {}
        if self.masked:
            # A padding's place is any that exists: nothing attends to it.
            positions_BS = (self.mask_BS.cumsum(1) - 1).clamp_min(0)
            placed = {"attention_mask": self.mask_BS, "position_ids": positions_BS[:, -new:]}
        output = self.decoder(
            input_ids=self.ids, past_key_values=self.cache, use_cache=True, **placed
        )
        if self.cache is None:
            self.cache = grow(output.past_key_values, self.mask_BS.shape[1] + num_tokens)
        hidden_BE: Tensor = output.last_hidden_state[:, -1]
        return hidden_BE

    def _next(self, chosen_B: Tensor, ended: Collection[int]) -> None:
        """Take the chosen tokens as read next, and the ended rows out where the cache lets go."""
        chosen_B = chosen_B.to(self.mask_BS.device)  # a model may end on another device
        lasting = [place for place, row in enumerate(self.rows) if row not in ended]
        if len(lasting) < len(self.rows) and self.grows and _selects(self.cache):
            kept = torch.tensor(lasting, device=chosen_B.device)
            self.cache.batch_select_indices(kept)
            chosen_B, self.mask_BS = chosen_B[kept], self.mask_BS[kept]
            self.rows = [self.rows[place] for place in lasting]
        self.ids = chosen_B[:, None]
        self.mask_BS = torch.cat([self.mask_BS, torch.ones_like(self.ids)], 1)


def _selects(cache: Any) -> bool:
    """Whether rows can be taken out of every layer of a cache: of what else it holds as well."""
    layers = getattr(cache, "layers", [None])
    recurrent = any(hasattr(layer, "conv_states") for layer in layers)
    return not recurrent and all(isinstance(layer, DynamicLayer) for layer in layers)
