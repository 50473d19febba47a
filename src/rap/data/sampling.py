"""Documents that a model generates, for calibration and distillation.

What a model was trained on is seldom at hand, and a text of one kind teaches a cut model that kind
alone. Documents drawn from the dense model are spread as its own training text was
(self-calibration: https://arxiv.org/abs/2410.17170; LLM-QAT: https://arxiv.org/abs/2305.17888).

Shapes: B documents of a batch, T tokens of a document, V vocabulary, N tokens of it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..checkpoint.files import check_output_file, whole_file
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model
from ..model.layers import trained_length
from ..runtime.progress import Progress
from ..runtime.settings import Count, Positive, Share, check_fields
from ..runtime.state import evaluating

FEW = 2048  # tokens


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a model writes: documents of `tokens` tokens, `batch_size` of them side by side.

    Each token is drawn at `temperature` among the likeliest that have `top_p` together. Raises
    RapError for a count below one, or a temperature or `top_p` out of range.
    """

    documents: Count = 256
    tokens: Count = 512
    temperature: Positive = 1.0
    top_p: Share = 0.95
    batch_size: Count = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "sampling")


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

    Special tokens stay in the text, where the tokenizer finds them again. Finished batches are kept
    beside the file until it is whole, and the same call goes on behind them.

    Raises RapError for a tokenizer without a token to begin with, and for documents longer than the
    model was made for, CheckpointError if `output` may not be replaced.
    """
    check_output_file(output, force=force)
    check_length(model.config, asked)
    first, kept = first_token(tokenizer), output.with_name(f".{output.name}.kept")
    record = {"model": fingerprint_model(model), "first": first, **asdict(asked)}
    settings = json.dumps(record, sort_keys=True)
    lines = _kept(kept, settings)
    total, done = asked.documents * asked.tokens, len(lines) * asked.tokens
    with Progress("sampling", total, "tokens", tokens=1, done=done, shown=progress) as bar:
        while len(lines) < asked.documents:
            count = min(asked.batch_size, asked.documents - len(lines))
            documents = draw(model, first, count, asked, start=len(lines), bar=bar)
            lines += [json.dumps({"text": tokenizer.decode(row)}) for row in documents]
            with whole_file(kept) as partial:
                partial.write_text("\n".join([settings, *lines, ""]), encoding="utf-8")
    with whole_file(output) as partial:
        partial.write_text("\n".join([*lines, ""]), encoding="utf-8")
    kept.unlink(missing_ok=True)  # processes of one run may write the same


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

    Raises RapError for a tokenizer that has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise RapError(
        "the tokenizer has neither BOS nor EOS, so no document can begin; give a text file"
    )


@torch.no_grad()
def draw(
    model: Any,
    first: int,
    count: int,
    asked: Corpus,
    *,
    start: int = 0,
    bar: Progress | None = None,
) -> Tensor:
    """Documents [B, T] behind the token `first`, which is no part of them, B = `count`.

    `start` is the number of the first, so that batches drawn by themselves are those of one run. An
    end of text is a token like any other: the model goes on with what it knows to stand behind it.
    """
    device = model.get_input_embeddings().weight.device
    # Drawn on the CPU, whose generator gives the same numbers on every machine.
    generator = torch.Generator().manual_seed(asked.seed * 2**32 + start)
    ids, cache, drawn = torch.full((count, 1), first), None, []
    with evaluating(model):
        for _ in range(asked.tokens):
            output = model(
                input_ids=ids.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = output.past_key_values
            logits = output.logits[:, -1].float().cpu() / asked.temperature
            token_BN, likely_BN = nucleus(logits.softmax(-1), asked.top_p)
            ids = token_BN.gather(1, torch.multinomial(likely_BN, 1, generator=generator))
            drawn.append(ids)
            if bar is not None:
                bar.advance(count)
    return torch.cat(drawn, 1)


def nucleus(probabilities_BV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens [B, N] and their probabilities, 0 outside the fewest with `top_p`.

    Both are sorted by probability; what is left does not sum to 1.
    Nucleus sampling, https://arxiv.org/abs/1904.09751, section 3.1.
    """
    vocabulary = probabilities_BV.shape[-1]
    # Few tokens are nearly always enough, and a whole vocabulary is slow to sort.
    for count in (min(FEW, vocabulary), vocabulary):
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
