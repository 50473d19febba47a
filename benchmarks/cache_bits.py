"""Decode steps of pruned models and under a quantized cache, interleaved: bytes and time.

    python benchmarks/cache_bits.py [--contexts 512 2048 8192] [--rounds 9]
        [--entries dense dense+hqq4 rap:merge=all:profile=stock@0.5 ...] [--dtype float32]
        [--output FILE]

SmolLM2's shape, random weights and a cache filled at random. An entry is `dense` or METHOD@RETAIN,
and `+BITS` for a quantized cache of Transformers, which makes full keys and values of all of it at
every step. Quantizing itself, once in 128 tokens, is not in a step. All run by SDPA; what this
package's attention gains is in roofline.py. Needs hqq.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from layouts import pruned_config
from speed import SMOLLM2, clock_note, clock_of, figure, parser, write
from transformers import DynamicCache, LlamaConfig

from rap.checkpoint.provenance import installed_version
from rap.evaluation.cache.compressed import held_bytes
from rap.evaluation.cache.quantized_cache import RESIDUAL, quantized_cache
from rap.evaluation.cost.latency import WARM_UP, fill_cache, interleaved
from rap.evaluation.cost.random_models import random_model

PLAIN = "rap:merge=all:profile=stock@0.5"
ENTRIES = ["dense", "dense+hqq8", "dense+hqq4", PLAIN, f"{PLAIN}+hqq4", "rap:merge=1@0.5"]
ENTRIES += ["palu@0.5"]
CONTEXTS = [512, 2048, 8192]


def step(model: Any, bits: str, context: int) -> tuple[Callable[[], None], int]:
    """A decode step after `context` tokens, and the bytes of its cache before the first."""
    cache = quantized_cache(model, bits) if bits else DynamicCache(config=model.config)
    fill_cache(model, cache, 1, context)
    ids_11 = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    @torch.no_grad()
    def decode() -> None:
        model(input_ids=ids_11, past_key_values=cache, use_cache=True)

    return decode, held_bytes(cache)


def measure(
    models: dict[str, Any], entries: list[str], context: int, rounds: int, clock: Any
) -> list[dict[str, Any]]:
    """A row an entry: bytes of the cache, seconds of every round, and time over dense."""
    steps = {
        entry: step(models[entry.partition("+")[0]], entry.partition("+")[2], context)
        for entry in entries
    }
    tasks = {entry: decode for entry, (decode, _) in steps.items()}
    seconds = interleaved(tasks, rounds, clock=clock)
    dense = seconds[entries[0]]
    return [
        {
            "entry": entry,
            "context": context,
            "cache_bytes": held,
            "times_smaller": steps[entries[0]][1] / held,
            "seconds": seconds[entry],
            "over_dense": statistics.median(
                mine / whole for mine, whole in zip(seconds[entry], dense, strict=True)
            ),
        }
        for entry, (_, held) in steps.items()
    ]


def table(rows: list[dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """Time of a step over dense, a row an entry and a column a context."""
    found = {(row["entry"], row["context"]): row for row in rows}
    longest = arguments.contexts[-1]
    return {
        "title": "Decode time against bytes of the cache (CPU)",
        "note": (
            f"Time of a decode step over dense with SDPA, SmolLM2's shape in {arguments.dtype}, "
            f"random weights; medians of {arguments.rounds} interleaved rounds, "
            f"{clock_note(arguments)}. Fewer bytes: of the cache at {longest:,} tokens."
        ),
        "header": ["model + cache", "fewer bytes", *(f"{n:,} tokens" for n in arguments.contexts)],
        "rows": [
            [
                entry,
                figure(found[entry, longest]["times_smaller"], ".1f", "x"),
                *(figure(found[entry, n]["over_dense"], ".0%") for n in arguments.contexts),
            ]
            for entry in arguments.entries
        ],
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    options = parser(__doc__, rounds=9)
    options.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options.add_argument("--entries", nargs="+", default=ENTRIES, help="the first is the reference")
    options.add_argument("--dtype", default="bfloat16", help="of weights, and of what is cached")
    options.add_argument("--layers", type=int, default=SMOLLM2["num_hidden_layers"])
    arguments = options.parse_args()
    if arguments.rounds + WARM_UP >= RESIDUAL:
        options.error(f"--rounds {arguments.rounds} would quantize the cache again; give fewer")
    config = LlamaConfig(**SMOLLM2 | {"num_hidden_layers": arguments.layers})
    names = dict.fromkeys(entry.partition("+")[0] for entry in arguments.entries)
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    models = {
        name: random_model(pruned_config(config, name), dtype=dtype, device=device)
        for name in names
    }
    for model in models.values():
        model.set_attn_implementation("sdpa")
    rows = []
    for context in arguments.contexts:
        rows += measure(models, arguments.entries, context, arguments.rounds, clock_of(arguments))
    made = {"hqq": installed_version("hqq"), "rows": rows, "table": table(rows, arguments)}
    write("cache_bits", made, arguments)


if __name__ == "__main__":
    main()
