"""Documents that a model generates, for calibration and distillation.

What a model was trained on is seldom at hand, and a text of one kind teaches a cut model that kind
alone. Documents drawn from the dense model are spread as its own training text was
(self-calibration: https://arxiv.org/abs/2410.17170; LLM-QAT: https://arxiv.org/abs/2305.17888).
Behind the opening of its chat template a model writes what a user asks, and the answer to it
(Magpie: https://arxiv.org/abs/2406.08464).

Shapes: B documents of a batch, P tokens of a prompt, T of a document, V vocabulary, N tokens of it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from jinja2 import TemplateError
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedConfig

from ..checkpoint.files import check_output_file, whole_file
from ..checkpoint.load import fingerprint_tokenizer
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model
from ..model.kernels.growing_cache import grow
from ..model.layers import trained_length
from ..runtime.memory import in_fast_precision
from ..runtime.progress import Progress
from ..runtime.settings import Count, Positive, Share, check_fields
from ..runtime.state import evaluating, shared_reads
from .bos import bos_token

FEW, MORE = 8192, 4  # tokens, and how many times as many are tried next
MESSAGE = "What a user says"  # stands for it in a chat template
# What pretraining has between documents, of families whose chats end with something else.
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a model writes: documents of `tokens` tokens, `batch_size` of them side by side.

    Each token is drawn at `temperature` among the likeliest that have `top_p` together. A share of
    `chats` documents begins in the chat template, where a user's first message would. Raises
    RapError for a count below one, or a temperature or share out of range.
    """

    documents: Count = 256
    tokens: Count = 512
    temperature: Positive = 1.0
    top_p: Share = 0.95
    batch_size: Count = 64
    chats: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "sampling")

    @property
    def num_chats(self) -> int:
        """How many of the documents begin as a chat."""
        return round(self.chats * self.documents)


def write_documents(
    model: Any,
    tokenizer: Any,
    output: Path,
    asked: Corpus,
    *,
    force: bool = False,
    progress: bool = False,
) -> None:
    """Draw documents from a model and write them to a JSONL file, `text` by line.

    Special tokens stay in the text, where the tokenizer finds them again, but for a BOS that it
    adds by itself. Chats are spread evenly among the others. Finished batches are kept beside the
    file until it is whole, and the same call goes on behind them.

    Raises RapError for a tokenizer without a token to begin with, without a chat template where
    chats are asked for, and for documents longer than the model was made for, CheckpointError if
    `output` may not be replaced.
    """
    check_output_file(output, force=force)
    check_length(model.config, asked)
    chat = _chat_prompt(tokenizer, asked) if asked.num_chats else ((), "")
    kept = output.with_name(f".{output.name}.kept")
    first = first_token(tokenizer)
    settings = json.dumps(drawn_with(model, tokenizer, asked), sort_keys=True)
    model = in_fast_precision(model)
    lines = _kept(kept, settings)
    total, done = asked.documents * asked.tokens, len(lines) * asked.tokens
    with Progress("sampling", total, "tokens", tokens=1, done=done, shown=progress) as bar:
        while len(lines) < asked.documents:
            plain = asked.documents - asked.num_chats - len(lines)  # left to draw, before all chats
            prompt, text = ((first,), "") if plain > 0 else chat
            left = plain if plain > 0 else asked.documents - len(lines)
            count = min(asked.batch_size, left)
            documents = draw(model, prompt, count, asked, start=len(lines), bar=bar)
            lines += [json.dumps({"text": text + tokenizer.decode(row)}) for row in documents]
            with whole_file(kept) as partial:
                partial.write_text("\n".join([settings, *lines, ""]), encoding="utf-8")
    with whole_file(output) as partial:
        partial.write_text("\n".join([*_spread(lines, asked), ""]), encoding="utf-8")
    kept.unlink(missing_ok=True)  # processes of one run may write the same


def drawn_with(model: Any, tokenizer: Any, asked: Corpus) -> dict[str, Any]:
    """What the documents depend on: weights, tokenizer, settings, and where chats begin.

    The template as it is written: what it says may have today's date.
    """
    known = {"model": fingerprint_model(model), "tokenizer": fingerprint_tokenizer(tokenizer)}
    if asked.num_chats:
        template = str(getattr(tokenizer, "chat_template", None))
        known["template"] = hashlib.sha256(template.encode()).hexdigest()
    return {**known, "first": first_token(tokenizer), **asdict(asked)}


def _chat_prompt(tokenizer: Any, asked: Corpus) -> tuple[tuple[int, ...], str]:
    """What stands before each chat, and how much of that is in its text."""
    opening = chat_opening(tokenizer)
    if opening is None:
        raise RapError(
            "the tokenizer has no chat template that opens a user's message: leave out chats"
        )
    if len(opening) >= asked.tokens:
        raise RapError(
            f"a chat begins with {len(opening)} tokens of its template, as many as a document's "
            f"{asked.tokens} or more: draw documents of more than {len(opening)} tokens"
        )
    own_bos = opening[0] == bos_token("auto", tokenizer)
    return opening, tokenizer.decode(opening[own_bos:])


def _spread(lines: list[str], asked: Corpus) -> list[str]:
    """Chats in even steps among the other documents, behind which they were drawn."""
    chats = asked.num_chats
    plain = asked.documents - chats
    places = [n / max(plain, 1) for n in range(plain)] + [(n + 0.5) / chats for n in range(chats)]
    return [lines[n] for n in sorted(range(len(lines)), key=places.__getitem__)]


def chat_opening(tokenizer: Any) -> tuple[int, ...] | None:
    """The tokens [P] of the chat template before a user's first message; None without one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    before, found, _ = _chat(tokenizer, "user").partition(MESSAGE)
    ids = tokenizer(before, add_special_tokens=False).input_ids if found else []
    return tuple(ids) or None


def _chat(tokenizer: Any, *roles: str) -> str:
    """A chat of as many messages by its template; empty for a template that refuses it."""
    turns = [{"role": role, "content": MESSAGE} for role in roles]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))
    except TemplateError:
        return ""


def check_length(config: PreTrainedConfig, asked: Corpus) -> None:
    """Raise RapError for documents of more tokens than a model of this config was made for."""
    longest = trained_length(config)
    # The first token takes a position, and the last one drawn none: nothing reads it.
    if longest is not None and asked.tokens > longest:
        raise RapError(
            f"documents of {asked.tokens} tokens are longer than the {longest} that the model was "
            f"made for: use at most {longest} tokens"
        )


def first_token(tokenizer: Any) -> int:
    """The token behind which a model begins a document: BOS, else the end of the one before.

    Not a BOS that a chat has between its turns, where the vocabulary has an end of text: behind
    such a token a chat model goes on in the middle of a sentence. Raises RapError for a tokenizer
    without any of them.
    """
    bos = tokenizer.bos_token_id
    begins = bos is not None and not _between_turns(tokenizer, bos)
    ends = [] if begins else map(tokenizer.get_added_vocab().get, ENDS_OF_TEXT)
    for token in (*ends, bos, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise RapError(
        "the tokenizer has neither BOS nor EOS, so no document can begin; give a text file"
    )


def _between_turns(tokenizer: Any, token: int) -> bool:
    """Whether the chat template writes a token more than once in a chat of three messages."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    chat = _chat(tokenizer, "user", "assistant", "user")
    return tokenizer(chat, add_special_tokens=False).input_ids.count(token) > 1


@torch.no_grad()
def draw(
    model: Any,
    prompt_P: Sequence[int],
    count: int,
    asked: Corpus,
    *,
    start: int = 0,
    bar: Progress | None = None,
) -> Tensor:
    """Documents [B, T + 1 - P] behind the tokens of a prompt, B = `count`.

    `start` is the number of the first, so that batches drawn by themselves are those of one run. An
    end of text is a token like any other: the model goes on with what it knows to stand behind it.
    """
    device = model.get_input_embeddings().weight.device
    # Drawn on the CPU, whose generator gives the same numbers on every machine.
    generator = torch.Generator().manual_seed(asked.seed * 2**32 + start)
    ids, cache, drawn = torch.tensor([list(prompt_P)] * count), None, []
    with evaluating(model), shared_reads(model):
        for _ in range(asked.tokens + 1 - len(prompt_P)):
            output = model(
                input_ids=ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            made = output.past_key_values
            cache = made if cache is not None else grow(made, asked.tokens)
            logits = output.logits[:, -1].float() / asked.temperature
            token_BN, likely_BN = nucleus(logits.softmax(-1), asked.top_p)
            chosen_B1 = torch.multinomial(likely_BN.cpu(), 1, generator=generator)
            ids = token_BN.cpu().gather(1, chosen_B1)
            drawn.append(ids)
            if bar is not None:
                bar.advance(count)
    if bar is not None:
        bar.advance(count * (len(prompt_P) - 1))
    return torch.cat(drawn, 1)


def nucleus(probabilities_BV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens [B, N] and their probabilities, 0 outside the fewest with `top_p`.

    Both are sorted by probability; what is left does not sum to 1.
    Nucleus sampling, https://arxiv.org/abs/1904.09751, section 3.1.
    """
    vocabulary = probabilities_BV.shape[-1]
    # Few tokens are nearly always enough, and a whole vocabulary is slow to sort.
    for count in sorted({min(FEW, vocabulary), min(MORE * FEW, vocabulary), vocabulary}):
        likely_BN, token_BN = probabilities_BV.topk(count)
        if bool((likely_BN.sum(-1) >= top_p).all()):
            break
    before_BN = likely_BN.cumsum(-1) - likely_BN
    return token_BN, likely_BN.masked_fill(before_BN >= top_p, 0.0)


def _kept(path: Path, settings: str) -> list[str]:
    """The finished lines of a run with these settings."""
    if not path.is_file():
        return []
    found, _, lines = path.read_text(encoding="utf-8").partition("\n")
    return lines.splitlines() if found == settings else []
