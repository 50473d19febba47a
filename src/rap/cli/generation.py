"""`rap evaluate generation`: long continuations compared with those of the dense model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer

from ..checkpoint.card import interval_text
from ..checkpoint.device import AUTO
from ..checkpoint.provenance import provenance
from ..data.held_out import evaluation_tokens
from ..evaluation.cache.quantized_cache import CACHE_KINDS, check_cache_kind, quantized_cache
from ..evaluation.quality.answers import Answers, LongOutput, compare_answers
from ..evaluation.quality.decoding import NewCache, Sampling, end_tokens, write, write_again
from ..evaluation.quality.fidelity import check_vocabularies
from ..evaluation.quality.generation import Generation, chat_tokens, generation, read_prompts
from ..model.errors import RapError
from ..runtime.logits import vocabulary
from ..runtime.progress import Progress
from . import options
from .checkpoints import (
    Dense,
    Opened,
    ResultFile,
    deliver,
    known_fingerprint,
    label,
    open_checkpoint,
    open_dense,
)
from .groups import grouped

NUM_PROMPTS, PROMPT_TOKENS = 64, 64


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """What is continued, how far, and how tokens are chosen."""

    text: Annotated[
        str | None,
        typer.Option(help="Source of prompts: 'bundled' (default), a file, or a dataset ID."),
    ] = None
    chat: Annotated[
        str | None,
        typer.Option(
            help="Answer chat prompts instead: 'bundled' (50), a .txt (one per line), or a .jsonl."
        ),
    ] = None
    prompts: Annotated[
        int | None, typer.Option(help="Number of prompts [64; with --chat all].")
    ] = None
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens per prompt [64].")] = None
    tokens: Annotated[int, typer.Option(help="Tokens per continuation.")] = 512
    temperature: Annotated[
        float, typer.Option(help="With --chat: sampling temperature; 0 is greedy.")
    ] = 0.0
    top_p: Annotated[float, typer.Option(help="With --temperature: nucleus (top-p) threshold.")] = (
        1.0
    )
    bits: Annotated[
        str | None,
        typer.Option(
            help=f"Quantize the cache of PRUNED (transformers): {', '.join(CACHE_KINDS)}."
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(help="Prompts per forward pass.")] = 16

    @property
    def new_cache(self) -> NewCache | None:
        """What makes the quantized cache."""
        return partial(quantized_cache, kind=self.bits) if self.bits is not None else None

    def check(self, bos: str) -> None:
        """RapError for options that do not go together, or numbers that cannot be."""
        counts = (self.prompts, self.prompt_tokens, self.tokens, self.batch_size)
        if min(count for count in counts if count is not None) < 1:
            raise RapError(
                "--prompts, --prompt-tokens, --tokens and --batch-size must be at least 1"
            )
        if self.chat is not None:
            idle = {"--text": self.text, "--prompt-tokens": self.prompt_tokens}
            given = [flag for flag, value in idle.items() if value is not None]
            given += ["--bos"] if bos != "auto" else []
            if given:
                raise RapError(f"with --chat the template makes the prompts: remove {given[0]}")
        elif self.temperature:
            raise RapError("stretches of a text are continued greedily: --temperature needs --chat")
        if not self.temperature and self.top_p != 1:
            raise RapError("greedy has no use for --top-p: give a --temperature too")
        if self.temperature:
            Sampling(self.temperature, self.top_p)
        if self.bits is not None:
            check_cache_kind(self.bits)


@grouped
def generation_command(
    pruned: Annotated[
        str, typer.Argument(help="Pruned checkpoint, or any model with the same vocabulary.")
    ],
    dense: Dense,
    *,
    asked: Continuations,
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    bos: options.Bos = "auto",
    seed: options.Seed = 0,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Continuations by PRUNED and by its dense model: agreement, common prefix, repetition.

    With --chat they are answers that may end, and KL along both models' answers is measured too.
    Both models run in float32 with their own cache, or PRUNED with a quantized one (--bits), which
    takes any model, the dense model too. Intervals are over prompts.
    """
    asked.check(bos)
    opened = open_checkpoint(pruned, device, device_map, [output], dtype="float32", bos=bos)
    original = open_dense(dense, device, device_map)
    if asked.chat is None:
        title = f"Greedy continuations by {label(opened)} compared with {dense}"
        compared = _continued(opened, original, asked, seed, shown=not as_json)
        about = {"text": asked.text or "bundled", "bos": opened.bos, **asdict(compared)}
        table = _table(title, compared)
    else:
        title = f"Answers by {label(opened)} compared with {dense}"
        answered = _answered(opened, original, asked, seed, shown=not as_json)
        about = {"chat": asked.chat, **asdict(answered)}
        table = _answers_table(title, answered)
    made = provenance(
        seed=seed,
        batch_size=asked.batch_size,
        temperature=asked.temperature,
        top_p=asked.top_p,
    )
    whose = {"dense": dense, "dense_fingerprint": known_fingerprint(original)}
    figures = {**whose, "bits": asked.bits, **about}
    deliver(opened, figures, table, made, output, as_json)


def _continued(
    opened: Opened, dense: Any, asked: Continuations, seed: int, *, shown: bool
) -> Generation:
    text = asked.text or "bundled"
    return generation(
        opened.model,
        dense,
        evaluation_tokens(text, opened.tokenizer),
        num_prompts=asked.prompts or NUM_PROMPTS,
        prompt_tokens=asked.prompt_tokens or PROMPT_TOKENS,
        num_tokens=asked.tokens,
        batch_size=asked.batch_size,
        seed=seed,
        bos=opened.bos,
        new_cache=asked.new_cache,
        progress=shown,
    )


def _answered(
    opened: Opened, dense: Any, asked: Continuations, seed: int, *, shown: bool
) -> LongOutput:
    check_vocabularies(vocabulary(opened.model), vocabulary(dense))
    found = chat_tokens(read_prompts(str(asked.chat)), opened.tokenizer)
    prompts = found[: asked.prompts]
    if asked.prompts is not None and len(found) < asked.prompts:
        raise RapError(f"{asked.chat} has {len(found)} prompts, not {asked.prompts}: use fewer")
    ends = end_tokens(dense)
    sampling = Sampling(asked.temperature, asked.top_p, seed) if asked.temperature else None
    written = 3 if asked.bits else 2
    total = written * len(prompts) * asked.tokens
    with Progress("answers", total, "tokens", tokens=1, shown=shown, transient=True) as bar:
        how: dict[str, Any] = {"batch_size": asked.batch_size, "bar": bar}
        chosen: dict[str, Any] = {"ends": ends, "sampling": sampling, **how}
        ours = write(opened.model, prompts, asked.tokens, new_cache=asked.new_cache, **chosen)
        theirs = write(dense, prompts, asked.tokens, **chosen)
        again = None
        if asked.new_cache is not None:
            given = [text.tokens for text in theirs]
            again = write_again(opened.model, prompts, given, new_cache=asked.new_cache, **how)
    return compare_answers(
        opened.model,
        dense,
        prompts,
        ours,
        theirs,
        num_tokens=asked.tokens,
        ends=ends,
        again=again,
        progress=shown,
    )


def _table(title: str, compared: Generation) -> dict[str, Any]:
    rows = [
        ["same token at the same place", interval_text(vars(compared.agreement), ".1%")],
        ["tokens before the first difference", interval_text(vars(compared.common_prefix), ".1f")],
        ["4-grams that occurred before", interval_text(vars(compared.repetition), ".1%")],
        ["the same of the dense model", interval_text(vars(compared.dense_repetition), ".1%")],
    ]
    prompts = f"{compared.num_prompts} prompts of {compared.prompt_tokens}"
    asked = f"{prompts}, {compared.num_tokens} tokens after"
    return {"title": title, "header": [asked, "mean (95% interval)"], "rows": rows}


def _answers_table(title: str, found: LongOutput) -> dict[str, Any]:
    """A row a measure, a column a writer of the answers; KL is always of pruned from dense."""

    def row(name: str, key: str, form: str) -> list[str]:
        return [
            name,
            *(interval_text(vars(vars(who)[key]), form) for who in (found.pruned, found.dense)),
        ]

    parts = [_by_start(who) for who in (found.pruned, found.dense)]
    along = [
        [
            f"KL along it, {start:,} to {stop - 1:,}",
            *(part.get((start, stop), "") for part in parts),
        ]
        for start, stop in sorted(parts[0].keys() | parts[1].keys())
    ]
    rows = [
        row("tokens", "length", ".1f"),
        row("came to an end", "ended", ".0%"),
        row("in a loop at the end", "looping", ".0%"),
        row("4-grams that occurred before", "repetition", ".1%"),
        row("KL along it", "kl", ".4f"),
        *along,
        ["same token at the same place", interval_text(vars(found.agreement), ".1%"), ""],
        ["tokens before the first difference", interval_text(vars(found.common_prefix), ".1f"), ""],
    ]
    asked = f"{found.num_prompts} answers of up to {found.num_tokens:,} tokens"
    return {"title": title, "header": [asked, "pruned (95% interval)", "dense"], "rows": rows}


def _by_start(answers: Answers) -> Mapping[tuple[int, int], str]:
    return {
        (part.start, part.stop): f"{interval_text(vars(part.kl), '.4f')}, {part.num_texts} answers"
        for part in answers.positions
    }
