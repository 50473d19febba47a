"""`rap evaluate generation`: long continuations beside those of the dense model."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ..calibration.text import evaluation_tokens
from ..checkpoint.card import interval_text
from ..checkpoint.provenance import provenance
from ..evaluation.quality.generation import Generation, generation
from ..model.fingerprint import fingerprint_model
from . import options
from .checkpoints import HELD_OUT, Dense, ResultFile, deliver, label, open_checkpoint, open_dense
from .groups import grouped
from .options import print_table


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """What is continued, and how far."""

    prompts: Annotated[int, typer.Option(help="Prompts to continue.")] = 64
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 64
    tokens: Annotated[int, typer.Option(help="Tokens of a continuation.")] = 512
    batch_size: Annotated[int, typer.Option(help="Prompts per forward pass.")] = 16


@grouped
def generation_command(
    pruned: Annotated[str, typer.Argument(help="Pruned checkpoint, or any of that vocabulary.")],
    dense: Dense,
    *,
    text: Annotated[
        str, typer.Option(help="What prompts are cut from: 'bundled', a file, or a dataset.")
    ] = "bundled",
    asked: Continuations,
    device_map: options.DeviceMap = None,
    bos: options.Bos = "auto",
    seed: options.Seed = 0,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Greedy continuations by PRUNED and by its dense model: agreement, common prefix, repetition.

    Both run in float32 with their own cache. Intervals are bootstrap intervals over prompts.
    """
    opened = open_checkpoint(pruned, device_map, [output], dtype="float32", bos=bos)
    original = open_dense(dense, device_map)
    compared = generation(
        opened.model,
        original,
        evaluation_tokens(HELD_OUT.get(text, text), opened.tokenizer),
        num_prompts=asked.prompts,
        prompt_tokens=asked.prompt_tokens,
        num_tokens=asked.tokens,
        batch_size=asked.batch_size,
        seed=seed,
        bos=opened.bos,
        progress=not as_json,
    )
    title = f"Greedy continuations by {label(opened)} beside {dense}"
    table, made = _table(title, compared), provenance(seed=seed, batch_size=asked.batch_size)
    result = {
        **opened.record,
        "dense": dense,
        "dense_fingerprint": fingerprint_model(original),
        "text": text,
        "bos": opened.bos,
        **asdict(compared),
        "table": table,
        "command": made["command"],
        "provenance": made,
    }
    deliver(result, output, as_json)
    if not as_json:
        print_table(title, table["header"], table["rows"])


def _table(title: str, compared: Generation) -> dict[str, Any]:
    rows = [
        ["same token at the same place", interval_text(vars(compared.agreement), ".1%")],
        ["tokens before the first difference", interval_text(vars(compared.common_prefix), ".1f")],
        ["4-grams that occurred before", interval_text(vars(compared.repetition), ".1%")],
        ["the same of the dense model", interval_text(vars(compared.dense_repetition), ".1%")],
    ]
    prompts = f"{compared.num_prompts} prompts of {compared.prompt_tokens}"
    asked = f"{prompts}, {compared.num_tokens} tokens after"
    return {"title": title, "header": [asked, "mean (95 % interval)"], "rows": rows}
