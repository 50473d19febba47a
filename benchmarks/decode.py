"""Decode steps of a full model, dense and pruned in turns: ms, tokens/s, memory, ratios.

    python benchmarks/decode.py [--device cuda] [--contexts 4096 8192] [--batches 1 8]
        [--retains 0.7] [--rounds 20] [--compile]

Llama-3-8B's shape in bfloat16 on a GPU, a scaled-down shape in float32 on a CPU, random weights and
a cache filled at random. Dense and pruned both run in every variant (SDPA with the dynamic cache of
transformers, a static cache in a CUDA graph, this package's attention; with --compile also
torch.compile) and each is judged by its best. The roofline ratio is that of the bytes that a step
must read.
"""

import statistics
from typing import Any

import torch
from speed import clock_note, clock_of, config_of, dtype_of, figure, is_cuda, parser, write

from rap.evaluation.cost.latency import (
    COMPILED,
    PLAIN,
    LatencyPoint,
    default_variants,
    measure_point,
    weight_bytes,
)
from rap.evaluation.cost.random_models import random_model, uniform_config

CONTEXTS = {"cpu": [512, 2048, 4096, 8192, 16384], "cuda": [4096, 8192, 16384, 32768]}
BATCHES = {"cpu": [1, 8], "cuda": [1, 4, 8, 16]}
RETAINS = {"cpu": [0.9, 0.7, 0.5], "cuda": [0.7, 0.5]}


def rows_of(point: LatencyPoint, weights: dict[str, int]) -> list[dict[str, Any]]:
    """One JSON-able row per pruned model of a point."""
    dense = point.median("dense")
    rows = []
    for name in (name for name in point.seconds if name != "dense"):
        pruned, ratio = point.median(name), point.ratio(name)
        rows.append(
            {
                "batch": point.batch,
                "context": point.context,
                "retain": float(name),
                "dense_ms": dense and 1e3 * dense,
                "pruned_ms": pruned and 1e3 * pruned,
                "dense_variant": point.best("dense"),
                "pruned_variant": point.best(name),
                "ratio": ratio,
                "roofline": point.roofline(name),
                "plain_ratio": point.ratio(name, variant=PLAIN.name),
                "tokens_per_second": pruned and point.batch / pruned,
                "kv_bytes": {"dense": point.kv_bytes["dense"], "pruned": point.kv_bytes[name]},
                "peak_bytes": {
                    "dense": _peak(point, "dense", weights),
                    "pruned": _peak(point, name, weights),
                },
                "medians_ms": {
                    model: {
                        variant: found and 1e3 * statistics.median(found)
                        for variant, found in point.seconds[model].items()
                    }
                    for model in ("dense", name)
                },
            }
        )
    return rows


def _peak(point: LatencyPoint, name: str, weights: dict[str, int]) -> int | None:
    """Weights, cache and what the step of the best variant takes besides; None off CUDA."""
    extra = point.transient_bytes[name].get(point.best(name) or "")
    return weights[name] + point.kv_bytes[name] + extra if extra else None


def table(rows: list[dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """The rows as `rap report` reads them."""
    gpu = is_cuda(arguments.device)
    shape = "Llama-3-8B's shape, bfloat16" if gpu else "A scaled-down Llama, float32"
    header = "batch, context|retain|dense ms|pruned ms|tokens/s|ratio|roofline|of roofline|plain"
    return {
        "title": f"Decode step, dense over pruned ({'GPU' if gpu else 'CPU'})",
        "note": f"{shape}, random weights; {clock_note(arguments)}. Medians of interleaved rounds, "
        "dense and pruned each at its best; `plain` is the ratio with SDPA and transformers' "
        "dynamic cache on both sides. `roofline` is the ratio of the bytes a step must read.",
        "header": [*header.split("|"), "KV MiB", "peak MiB"],
        "rows": [
            [
                f"{row['batch']}, {row['context']:,}",
                row["retain"],
                figure(row["dense_ms"], ".1f"),
                figure(row["pruned_ms"], ".1f"),
                figure(row["tokens_per_second"], ".0f"),
                figure(row["ratio"], ".2f", "x"),
                figure(row["roofline"], ".2f", "x"),
                figure(row["ratio"] and row["ratio"] / row["roofline"], ".0%"),
                figure(row["plain_ratio"], ".2f", "x"),
                f"{row['kv_bytes']['pruned'] / 2**20:.0f} / {row['kv_bytes']['dense'] / 2**20:.0f}",
                _peaks(row["peak_bytes"]),
            ]
            for row in rows
        ],
    }


def _peaks(peaks: dict[str, int | None]) -> str:
    both = [figure(peaks[name] and peaks[name] / 2**20, ".0f") for name in ("pruned", "dense")]
    return "-" if both == ["-", "-"] else " / ".join(both)


def main() -> None:
    """Measure every batch and context, print, write."""
    options = parser(__doc__, rounds=9)
    options.add_argument("--contexts", type=int, nargs="+")
    options.add_argument("--batches", type=int, nargs="+")
    options.add_argument("--retains", type=float, nargs="+")
    options.add_argument("--compile", action="store_true", help="time torch.compile as well")
    arguments = options.parse_args()
    kind = "cuda" if is_cuda(arguments.device) else "cpu"
    config, dtype = config_of(arguments.device), dtype_of(arguments.device)
    configs = {"dense": config} | {
        str(retain): uniform_config(config, retain) for retain in arguments.retains or RETAINS[kind]
    }
    models = {
        name: random_model(each, dtype=dtype, device=arguments.device)
        for name, each in configs.items()
    }
    weights = {name: sum(p.nbytes for p in model.parameters()) for name, model in models.items()}
    variants = default_variants(arguments.device) + (COMPILED if arguments.compile else ())
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches or BATCHES[kind]:
        for context in arguments.contexts or CONTEXTS[kind]:
            # Where a step takes seconds on a CPU, noise is small and rounds are dear.
            short = kind == "cuda" or batch * context <= 32768
            point = measure_point(
                models,
                batch=batch,
                context=context,
                rounds=arguments.rounds if short else max(3, arguments.rounds // 3),
                variants=variants,
                clock=clock_of(arguments),
            )
            found = rows_of(point, weights)
            rows += found
            for row in found:
                print(batch, context, row["retain"], row["medians_ms"], row["ratio"], flush=True)
            # Written point by point: a long run on a lent GPU may be cut short.
            write(
                "decode",
                {
                    "rows": rows,
                    "step_weight_bytes": {name: weight_bytes(m) for name, m in models.items()},
                    "table": table(rows, arguments),
                },
                arguments,
            )
            if kind == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
