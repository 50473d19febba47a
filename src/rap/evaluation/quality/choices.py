"""Multiple choice for lm-eval in fewer tokens: a question is one row, its context read once.

A row is the prefix that its requests share, then a branch of each: the rest of its context and its
continuation. A branch sees the prefix and itself, and its positions follow the prefix, so it reads
as if it stood alone. Logits are made only where the next token is scored.

Shapes: B rows, T tokens of a row, N scored places, E model dim, V vocabulary, Q scored tokens.
"""

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...model.attention import ATTENTION, RapAttention
from ...model.families import FAMILIES
from ...model.layers import BOUNDED, base_model_type, text_config
from ...runtime.logits import Head, chunk_tokens, decoder_of

# What lm-eval asks: the strings (None: not to be cached), and the tokens of context and answer.
Request = tuple[tuple[str, str] | None, list[int], list[int]]
Answer = tuple[float, bool]

# Their masks may say anything; others build their own, or know causal ones only.
MASKED = ("eager", "sdpa", ATTENTION)
# Scalings whose frequencies do not follow the longest position of a pass.
FIXED_ROPE = {"default", "linear", "llama3", "yarn"}
# Longer rows spend more on masked attention, and on the mask, than a shared context saves.
ROW_TOKENS = 4096
# A request joins a row if that saves this share of its tokens.
WORTH = 1 / 8
PADDING = -1


def packable_tokens(model: Any) -> int:
    """Tokens of the longest request for which rows are exact; 0 where none is.

    Every layer must see all that mask and positions state. A window or chunk does so as long as a
    request is no longer; layers that read their input in order (recurrent, linear), attention that
    takes no mask, and attention that places by slot never do.
    """
    if not isinstance(model, PreTrainedModel):
        return 0
    text = text_config(model.config)
    exact = (
        base_model_type(text) in FAMILIES
        and model.config._attn_implementation in MASKED
        and text._attn_implementation in MASKED
        and set(getattr(text, "layer_types", None) or ()) <= {"full_attention", *BOUNDED}
        and not getattr(text, "attn_temperature_tuning", False)
        and not getattr(text, "use_bidirectional_attention", False)
        and _rope_types(getattr(text, "rope_parameters", None) or {}) <= FIXED_ROPE
        and not any(m.places_by_slot for m in model.modules() if isinstance(m, RapAttention))
    )
    return _shortest_window(text) if exact else 0


def _shortest_window(text: Any) -> int:
    """Tokens that every layer sees of those before, itself included."""
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min(size or sys.maxsize for size in sizes)


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Of one set of rope parameters, or of one for each type of layer."""
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    return {part.get("rope_type", "default") for part in nested or [parameters]}


@dataclass(frozen=True)
class Row:
    """Requests `members` as one sequence, the first `prefix` tokens being shared.

    `branches` tells whose a token is, 0 being the prefix; `slots` has for every member the places
    in the row after which its continuation's tokens are scored.
    """

    members: list[int]
    tokens: list[int]
    positions: list[int]
    branches: list[int]
    slots: list[list[int]]

    @classmethod
    def of(cls, requests: Sequence[Request], members: list[int], prefix: int) -> "Row":
        """Lay out requests that share their first `prefix` tokens of context."""
        _, context, _ = requests[members[0]]
        row = cls(members, context[:prefix], list(range(prefix)), [0] * prefix, [])
        for member in members:
            _, context, continuation = requests[member]
            rest, start = model_input(requests[member])[prefix:], len(row.tokens)
            # An empty branch has no number, so that one branch alone is a plain causal row.
            branch = max(row.branches) + 1
            row.tokens.extend(rest)
            row.positions.extend(range(prefix, prefix + len(rest)))
            row.branches.extend([branch] * len(rest))
            before = range(len(context) - 1, len(context) + len(continuation) - 1)
            row.slots.append([j if j < prefix else start + j - prefix for j in before])
        return row


def model_input(request: Request) -> list[int]:
    """The tokens that are read: the last one is only scored."""
    return (request[1] + request[2])[:-1]


def pack(requests: Sequence[Request], limit: int) -> list[Row]:
    """Rows of at most `limit` tokens, longest first; a request joins the row of the one before.

    No request may itself be longer than the limit.
    """
    groups: list[tuple[list[int], int]] = []
    for index, request in enumerate(requests):
        joined = _join(requests, *groups[-1], index, limit) if groups else None
        if joined is None:
            groups.append(([index], len(request[1])))
        else:
            groups[-1] = joined
    rows = [Row.of(requests, members, prefix) for members, prefix in groups]
    return sorted(rows, key=lambda row: -len(row.tokens))


def _join(
    requests: Sequence[Request], members: list[int], prefix: int, index: int, limit: int
) -> tuple[list[int], int] | None:
    """A group with one more member and the prefix they share then, or None if not worth it."""
    shared = _common(requests[members[0]][1][:prefix], requests[index][1])
    lengths = [len(model_input(requests[member])) for member in (*members, index)]
    before = prefix + sum(length - prefix for length in lengths[:-1]) + lengths[-1]
    after = shared + sum(length - shared for length in lengths)
    if before - after < WORTH * lengths[-1] or after > min(limit, max(ROW_TOKENS, *lengths)):
        return None
    return [*members, index], shared


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences begin with together."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def packed_inputs(rows: Sequence[Row], like: Tensor) -> dict[str, Any]:
    """Keyword arguments of a decoder for rows padded on the right; `like` has dtype and device.

    Branches are kept apart by an additive mask [B, 1, T, T], which is left out where every row has
    at most one: causal attention does not see what is on the right.
    """
    longest = max(len(row.tokens) for row in rows)

    def padded(parts: list[list[int]], value: int) -> Tensor:
        filled = [part + [value] * (longest - len(part)) for part in parts]
        return torch.tensor(filled, device=like.device)

    inputs: dict[str, Any] = {
        "input_ids": padded([row.tokens for row in rows], 0),
        "position_ids": padded([row.positions for row in rows], 0),
        "use_cache": False,
    }
    if any(max(row.branches) > 1 for row in rows):
        keep_BTT = visible(padded([row.branches for row in rows], PADDING))
        mask_BTT = torch.zeros(keep_BTT.shape, dtype=like.dtype, device=like.device)
        mask_BTT = mask_BTT.masked_fill(~keep_BTT, torch.finfo(like.dtype).min)
        inputs["attention_mask"] = mask_BTT[:, None]
    return inputs


def visible(branches_BT: Tensor) -> Tensor:
    """Whether a token [., T, .] sees another [., ., T]: earlier, and shared or of its branch."""
    same = branches_BT[:, :, None] == branches_BT[:, None, :]
    return (same | (branches_BT == 0)[:, None, :]).tril()


@torch.no_grad()
def score_rows(
    model: Any, requests: Sequence[Request], rows: Sequence[Row], softmax_dtype: Any = None
) -> Iterator[tuple[int, Answer]]:
    """Every member of the rows with its log-likelihood, and whether it is the greedy one."""
    _, decoder = decoder_of(model)
    output = decoder(**packed_inputs(rows, model.get_input_embeddings().weight[:0]))
    # A place that several members score, such as the end of their context, has its logits once.
    places: dict[tuple[int, int], int] = {}
    wanted = [
        (places.setdefault((b, slot), len(places)), token)
        for b, row in enumerate(rows)
        for member, slots in zip(row.members, row.slots, strict=True)
        for slot, token in zip(slots, requests[member][2], strict=True)
    ]
    b_N, t_N = torch.tensor(list(places), device=output.last_hidden_state.device).unbind(1)
    hidden_NE = output.last_hidden_state[b_N, t_N]
    values_Q, greedy_Q = _token_scores(model, output, hidden_NE, wanted, softmax_dtype)
    start = 0
    for member in (member for row in rows for member in row.members):
        stop = start + len(requests[member][2])
        yield member, (float(values_Q[start:stop].sum()), bool(greedy_Q[start:stop].all()))
        start = stop


def _token_scores(
    model: Any, output: Any, hidden_NE: Tensor, wanted: list[tuple[int, int]], dtype: Any
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [Q] of (place, token), and whether the token is the likeliest there."""
    place_Q, token_Q = torch.tensor(wanted).unbind(1)
    step = chunk_tokens(model)
    parts, at = [], []
    for number, logits_CV in enumerate(Head(model).chunks(output, hidden_NE, step)):
        here = (place_Q // step == number).nonzero().squeeze(1)
        log_CV = torch.log_softmax(logits_CV, dim=-1, dtype=dtype)
        place, token = (x[here].to(log_CV.device) for x in (place_Q % step, token_Q))
        greedy = log_CV.argmax(-1)[place] == token
        parts.append((log_CV[place, token].cpu(), greedy.cpu()))
        at.append(here)
    back = torch.cat(at).argsort()
    values, greedy = (torch.cat(part)[back] for part in zip(*parts, strict=True))
    return values, greedy


@functools.cache
def choice_scorer() -> Any:
    """lm-eval's model of transformers, which scores choices in rows; made late, for it is optional.

    Log-likelihoods are HFLM's up to rounding. HFLM itself scores requests longer than the model
    or than rows are exact for (`packable_tokens`), and windows of running text.
    """
    base: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    progress = importlib.import_module("tqdm").tqdm

    class ChoiceScorer(base):
        def _loglikelihood_tokens(
            self,
            requests: list[Request],
            disable_tqdm: bool = False,
            override_bs: int | None = None,
        ) -> list[Answer]:
            limit = min(self.max_length, self._packable_tokens())
            packed: list[int] = []
            others: list[int] = []
            for index, request in enumerate(requests):
                fits = request[0] is not None and len(model_input(request)) <= limit
                (packed if fits else others).append(index)
            answers: dict[int, Answer] = {}
            if others:
                asked = [requests[index] for index in others]
                plain = super()._loglikelihood_tokens(asked, disable_tqdm, override_bs)
                answers |= zip(others, plain, strict=True)
            asked = [requests[index] for index in packed]
            quiet = disable_tqdm or self.rank != 0 or not packed
            with progress(total=len(packed), disable=quiet, desc="Scoring choices") as bar:
                for index, answer in self._scored(asked):
                    answers[packed[index]] = answer
                    self.cache_hook.add_partial("loglikelihood", asked[index][0], answer)
                    bar.update(1)
            return [answers[index] for index in range(len(requests))]

        def _scored(self, requests: list[Request]) -> Iterator[tuple[int, Answer]]:
            rows, size = pack(requests, self.max_length), int(self.batch_size)
            for start in range(0, len(rows), size):
                batch = rows[start : start + size]
                yield from score_rows(self.model, requests, batch, self.softmax_dtype)

        def _packable_tokens(self) -> int:
            plain = self.backend == "causal" and self.mixed_precision_dtype is None
            return packable_tokens(self.model) if plain and self.batch_size != "auto" else 0

    return ChoiceScorer
