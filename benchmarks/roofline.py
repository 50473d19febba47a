"""Decode steps against memory bandwidth: time, ratio to dense, bytes read, share of a copy's rate.

    python benchmarks/roofline.py [--device cpu] [--threads 2] [--minutes 10] [--quick]
        [--shapes smollm2 llama-1b-layer llama-8b-layer] [--dtype float32 bfloat16]
        [--contexts 512 2048 8192 16384] [--batches 1] [--methods dense rap@0.5 palu@0.5]

Random weights, a cache filled at random, all models interleaved with a copy of a large tensor,
which gives the bandwidth. The dense model counts at the better of SDPA with transformers' dynamic
cache and this package's attention and growing cache; pruned models run with the latter. On a GPU
all also run as CUDA graphs over a static cache, but PaLU, which reads the cache's length on the
host. The result is written after every point; what `--minutes` leaves no time for is recorded.
"""

import argparse
import gc
import statistics
import time
from itertools import product
from typing import Any

import torch
from layouts import DENSE, pruned_config
from speed import LLAMA_3_8B, SMOLLM2, clock_note, clock_of, figure, is_cuda, parser, write
from transformers import LlamaConfig

from rap.evaluation.cost.latency import (
    WARM_UP,
    DecodeStep,
    LatencyPoint,
    Variant,
    default_variants,
    if_it_fits,
    interleaved,
    synchronize,
    weight_bytes,
)
from rap.evaluation.cost.random_models import random_model

ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 512}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": SMOLLM2,
    "llama-1b-layer": LLAMA_1B | ONE_LAYER,
    "llama-8b-layer": LLAMA_3_8B | ONE_LAYER,
    # Next to no feed-forward: what remains is the attention.
    "llama-8b-attention": LLAMA_3_8B | ONE_LAYER | {"intermediate_size": 128},
}
TITLES = {
    "smollm2": "SmolLM2-135M, whole model",
    "llama-1b-layer": "Llama-3.2-1B, one layer",
    "llama-8b-layer": "Llama-3-8B, one layer",
    "llama-8b-attention": "Llama-3-8B, one attention",
}
RATIOS = ("0.7", "0.5")
PLAIN_FORM = "rap:profile=stock:merge=auto"  # merged heads as `--target plain` writes them
METHODS = {
    "cpu": [DENSE]
    + [f"{name}@{x}" for name in ("rap:merge=1", "rap", PLAIN_FORM, "palu") for x in RATIOS],
    "cuda": [DENSE]
    + [f"{name}@{x}" for name in ("rap:merge=1", "rap:merge=2", "palu") for x in RATIOS]
    + ["rap:merge=4@0.5", "rap:profile=stock:merge=2@0.5", "rap:profile=stock:merge=4@0.5"],
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "shapes": ["smollm2", "llama-1b-layer", "llama-8b-layer"],
        "dtype": ["float32", "bfloat16"],
        "contexts": [512, 2048, 8192, 16384],
        "batches": [1],
    },
    "cuda": {
        "shapes": ["llama-8b-attention"],
        "dtype": ["bfloat16"],
        "contexts": [4096, 8192, 16384, 32768],
        "batches": [1, 4, 16],
    },
}
QUICK = {"contexts": [9, 16], "rounds": 2}
TINY = {"hidden_size": 288, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
COPY = "copy"


class Copy:
    """A copy of a tensor that no cache holds: twice its bytes pass the memory bus."""

    def __init__(self, device: str, numbytes: int):
        self.device, self.bytes = torch.device(device), 2 * numbytes
        self.source = torch.ones(numbytes, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def __call__(self) -> None:
        """Copy it once and wait."""
        self.target.copy_(self.source)
        synchronize(self.device)


def variants_of(name: str, device: str) -> list[Variant]:
    """How a model is run: the best one counts."""
    found = default_variants(device)
    if name == DENSE:
        return list(found)
    eager = name.startswith("palu")
    return [v for v in found if v.attention == "rap" and (v.launch == "eager" or not eager)]


def measure(
    models: dict[str, Any], copy: Copy, batch: int, context: int, arguments: argparse.Namespace
) -> tuple[LatencyPoint, list[float]]:
    """Seconds of every model in every variant, and of the copy, interleaved."""
    steps = {
        (name, variant): DecodeStep(
            model, variant, batch=batch, context=context, steps=arguments.rounds + WARM_UP
        )
        for name, model in models.items()
        for variant in variants_of(name, arguments.device)
    }

    def prepare(key: Any) -> None:
        if key != COPY:
            steps[key].choose()

    tasks: dict[Any, Any] = {**steps, COPY: copy}
    found = interleaved(tasks, arguments.rounds, prepare, clock_of(arguments))
    seconds: dict[str, dict[str, list[float] | None]] = {name: {} for name in models}
    kv_bytes, transient = {}, {name: {} for name in models}
    for (name, variant), step in steps.items():
        seconds[name][variant.name] = found[name, variant]
        kv_bytes[name] = step.kv_bytes
        transient[name][variant.name] = step.transient_bytes
    read = {name: weight_bytes(models[name], batch) + kv_bytes[name] for name in models}
    return LatencyPoint(batch, context, seconds, transient, kv_bytes, read), found[COPY]


def rows_of(point: LatencyPoint, copied: list[float], copy: Copy) -> list[dict[str, Any]]:
    """One JSON-able row of every model."""
    bandwidth = copy.bytes / statistics.median(copied)
    rows = []
    for name, ways in point.seconds.items():
        median = point.median(name)
        assert median is not None
        rows.append(
            {
                "model": name,
                "batch": point.batch,
                "context": point.context,
                "milliseconds": 1e3 * median,
                "variant": point.best(name),
                "ratio": point.ratio(name),
                "roofline": point.roofline(name),
                "read_bytes": point.read_bytes[name],
                "kv_bytes": point.kv_bytes[name],
                "bandwidth": bandwidth,
                "share_of_bandwidth": point.read_bytes[name] / median / bandwidth,
                "rounds_ms": {way: [1e3 * x for x in spent or ()] for way, spent in ways.items()},
                "copy_rounds_ms": [1e3 * x for x in copied],
            }
        )
    return rows


def table(shape: str, dtype: str, rows: list[dict[str, Any]], arguments: Any) -> dict[str, Any]:
    """The rows of one shape and dtype: a model's points side by side."""
    points = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    cells = {(row["model"], row["batch"], row["context"]): row for row in rows}
    names = list(dict.fromkeys(row["model"] for row in rows))
    first = {row["model"]: row for row in reversed(rows)}
    bandwidth = statistics.median(row["bandwidth"] for row in rows)
    several = len({batch for batch, _ in points}) > 1

    def cell(row: dict[str, Any]) -> str:
        share = figure(row["share_of_bandwidth"], ".0%")
        if row["model"] == DENSE:
            return f"{row['milliseconds']:.3g} ms, {share}"
        return f"{row['ratio']:.2f}x of {row['roofline']:.2f}x, {share}"

    return {
        "title": f"Decode step, {TITLES[shape]}, {dtype}",
        "note": f"Dense over pruned time, the ratio of the bytes read, and the share of the "
        f"bandwidth of a copy, {bandwidth / 1e9:.1f} GB/s. Random weights; medians of "
        f"{arguments.rounds} interleaved rounds; {clock_note(arguments)}.",
        "header": [
            *("model", "cache"),
            *(f"{batch} x {tokens:,}" if several else f"{tokens:,}" for batch, tokens in points),
        ],
        "rows": [
            [
                name,
                figure(first[name]["kv_bytes"] / first[DENSE]["kv_bytes"], ".0%"),
                *(cell(cells[name, *point]) for point in points),
            ]
            for name in names
        ],
    }


def build(shape: str, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every model of a shape; all but the attention is the dense model's own."""
    fields = SHAPES[shape] | (TINY if arguments.quick else {})
    made: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": arguments.device}
    dense = random_model(LlamaConfig(**fields), **made)
    models = {DENSE: dense}
    # What the dense model's replaces is made small: random numbers take longest.
    config = LlamaConfig(**fields | {"intermediate_size": 8, "vocab_size": 8})
    for name in arguments.methods[1:]:
        models[name] = random_model(pruned_config(config, name), **made)
        models[name].set_input_embeddings(dense.get_input_embeddings())
        models[name].set_output_embeddings(dense.get_output_embeddings())
        for mine, theirs in zip(models[name].model.layers, dense.model.layers, strict=True):
            mine.mlp = theirs.mlp
    return models


def settings() -> argparse.Namespace:
    """The arguments, with the defaults of the device."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    options.add_argument("--minutes", type=float, default=10, help="begin no point after this")
    options.add_argument("--shapes", nargs="+", choices=tuple(SHAPES))
    options.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"))
    options.add_argument("--contexts", type=int, nargs="+")
    options.add_argument("--batches", type=int, nargs="+")
    options.add_argument("--methods", nargs="+", help="dense, and METHOD@RETAIN")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    given = options.parse_args()
    kind = "cuda" if is_cuda(given.device) else "cpu"
    for name, value in (DEFAULTS[kind] | {"methods": METHODS[kind]}).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.quick:
        vars(given).update(QUICK)
    given.methods = [DENSE, *(name for name in given.methods if name != DENSE)]
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def main() -> None:
    """Measure every shape and dtype at every batch and context; print, and write each time."""
    begun, arguments = time.monotonic(), settings()
    copy = Copy(arguments.device, 2**20 if arguments.quick else 2**28)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    left_out: list[dict[str, Any]] = []
    for dtype, shape in product(arguments.dtype, arguments.shapes):
        models: dict[str, Any] = {}
        for batch, context in product(arguments.batches, arguments.contexts):
            place = {"shape": shape, "dtype": dtype, "batch": batch, "context": context}
            if time.monotonic() - begun > 60 * arguments.minutes:
                left_out.append(place | {"reason": "time"})
                continue
            models = models or build(shape, dtype, arguments)
            found = if_it_fits(measure, models, copy, batch, context, arguments)
            gc.collect()
            if found is None:
                left_out.append(place | {"reason": "memory"})
                continue
            rows.setdefault((shape, dtype), []).extend(place | row for row in rows_of(*found, copy))
            seconds = time.monotonic() - begun
            print(f"{seconds:.0f} s: {shape}, {dtype}, {batch} x {context:,}", flush=True)
            save(rows, left_out, seconds, arguments, show=False)
    save(rows, left_out, time.monotonic() - begun, arguments, show=True)
    for place in left_out:
        print("left out:", place)


def save(
    rows: dict[tuple[str, str], list[dict[str, Any]]],
    left_out: list[dict[str, Any]],
    seconds: float,
    arguments: argparse.Namespace,
    *,
    show: bool,
) -> None:
    """Write all that has been measured, and print it if `show`."""
    result = {
        "title": "Decode steps against memory bandwidth",
        "rows": [row for found in rows.values() for row in found],
        "left_out": left_out,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "tables": [table(*place, found, arguments) for place, found in rows.items()],
    }
    write("roofline", result, arguments, show=show)


if __name__ == "__main__":
    main()
