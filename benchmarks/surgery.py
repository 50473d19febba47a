"""Time and peak memory of applying a plan, streamed and in memory, to a large random checkpoint.

    python benchmarks/surgery.py [--gigabytes 2] [--output benchmarks/results/surgery-cpu.json]

Every application runs in a process of its own. Speed stands beside a plain copy of the same files
in the same run, memory (peak resident set, mapped file pages included) beside a process that only
imports the package and beside the size of the largest shard. Linux only: it reads /proc.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from speed import resident_peak
from transformers import AutoModelForCausalLM, LlamaConfig

from rap.checkpoint.provenance import provenance
from rap.checkpoint.shards import INDEX_FILE
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan
from rap.studies.report.report import markdown_table
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

MIB = 2**20
# Of a Llama-3 shape, scaled down: GQA 4:1, head dim 64, 126 MB a layer, 131 MB an embedding.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, INTERMEDIATE = 2048, 32, 8, 64, 32000, 8192
TASKS = ("baseline", "copy", "stream", "memory")


def dense_config(num_layers: int) -> LlamaConfig:
    """A Llama of that many layers in bfloat16."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def write_checkpoint(folder: Path, num_bytes: int, num_shards: int) -> None:
    """Random weights of about that size, one shard in memory at a time."""
    layer = 2 * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INTERMEDIATE)
    num_layers = max(1, (num_bytes - 4 * VOCABULARY * HIDDEN) // layer)
    config = dense_config(num_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    limit = sum(2 * shape.numel() for shape in shapes.values()) / num_shards
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if shards[-1] and size + 2 * shape.numel() > limit and len(shards) < num_shards:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += 2 * shape.numel()
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.randn(shapes[name]).bfloat16() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    config.save_pretrained(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_plan(folder: Path, path: Path) -> None:
    """Half of the pairs and value channels of every layer, other ones for every head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    shapes = [layer.shape for layer in attention_layers(model)]
    layers = []
    for _ in shapes:
        pairs = [sorted(torch.randperm(HEAD_DIM // 2)[:16].tolist()) for _ in range(KV_HEADS)]
        channels = [sorted(torch.randperm(HEAD_DIM)[:32].tolist()) for _ in range(KV_HEADS)]
        layers.append(PairPlan.of_indices(pairs, channels))
    Plan(tuple(layers), tuple(shapes), "llama", 0.5).save(path)


def perform(task: str, source: Path, plan: Path, output: Path) -> dict[str, float]:
    """One task in this process: wall and CPU seconds, peak resident set before and after."""
    imported = resident_peak()
    start, start_cpu = time.perf_counter(), time.process_time()
    if task == "copy":
        shutil.copytree(source, output, copy_function=_copy_bytes)
    elif task == "stream":
        apply_streamed(source, Plan.load(plan), output)
    elif task == "memory":
        model = AutoModelForCausalLM.from_pretrained(source)
        apply(model, Plan.load(plan)).save_pretrained(output)
    return {
        "seconds": round(time.perf_counter() - start, 3),
        "cpu_seconds": round(time.process_time() - start_cpu, 3),
        "imports_mib": round(imported / MIB, 1),
        "peak_mib": round(resident_peak() / MIB, 1),
    }


def _copy_bytes(source: str, output: str) -> None:
    # Through user space, as any rewriting must go; copyfile could share blocks on some systems.
    with open(source, "rb") as read, open(output, "wb") as write:
        shutil.copyfileobj(read, write, 16 * MIB)


def measure(gigabytes: float, num_shards: int, repeats: int) -> dict:
    """Every task of TASKS, `repeats` times in turn, each in a new process."""
    rows: dict[str, list[dict]] = {task: [] for task in TASKS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "dense").mkdir()
        write_checkpoint(folder / "dense", int(gigabytes * 1e9), num_shards)
        write_plan(folder / "dense", folder / "plan.rap")
        sizes = [path.stat().st_size for path in (folder / "dense").glob("*.safetensors")]
        for _ in range(repeats):
            for task in TASKS:
                names = [str(folder / name) for name in ("dense", "plan.rap", task)]
                command = [sys.executable, __file__, "--perform", task, *names]
                result = subprocess.run(command, check=True, capture_output=True, text=True)
                rows[task].append(json.loads(result.stdout.splitlines()[-1]))
                if task in ("stream", "memory"):
                    output = (folder / task).glob("*.safetensors")
                    rows[task][-1]["written_bytes"] = sum(path.stat().st_size for path in output)
                shutil.rmtree(folder / task, ignore_errors=True)
    return {
        "checkpoint_bytes": sum(sizes),
        "shards": len(sizes),
        "largest_shard_mib": round(max(sizes) / MIB, 1),
        "runs": rows,
        "best": {task: _best(runs, sum(sizes)) for task, runs in rows.items()},
    }


def _best(runs: list[dict], num_bytes: int) -> dict[str, float]:
    """The fastest run, and the largest peak of all runs."""
    seconds = min(run["seconds"] for run in runs)
    cpu_seconds = min(run["cpu_seconds"] for run in runs)
    best = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": max(run["peak_mib"] for run in runs),
    }
    if seconds > 0.01:
        best["mb_per_s"] = round(num_bytes / seconds / 1e6, 1)
    return best


def table(result: dict) -> dict:
    """The best of every task as `rap report` reads it; memory also in largest shards."""
    best, shard = result["best"], result["largest_shard_mib"]
    base = best["baseline"]["peak_mib"]
    rows = []
    for task in TASKS[1:]:
        row = best[task]
        above, share = row["peak_mib"] - base, row["mb_per_s"] / best["copy"]["mb_per_s"]
        times = [f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}", f"{row['mb_per_s']:.0f}"]
        memory = [f"{row['peak_mib']:.0f}", f"{above:.0f}", f"{above / shard:.2f}"]
        rows.append([task, *times, f"{share:.2f}", *memory])
    return {
        "title": "Pruning a checkpoint: streamed, in memory, and a plain copy",
        "note": (
            f"{result['checkpoint_bytes'] / 1e9:.2f} GB in {result['shards']} shards of at most "
            f"{shard:.0f} MiB; imports alone take {base:.0f} MiB, which the last two columns leave "
            "out."
        ),
        "header": [
            *("task", "seconds", "CPU s", "MB/s", "of copy"),
            *("peak MiB", "above imports", "in shards"),
        ],
        "rows": rows,
    }


def main() -> None:
    """Measure and print, or, in a child process, perform one task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--perform", nargs=4, metavar=("TASK", "DENSE", "PLAN", "OUT"))
    options = parser.parse_args()
    if options.perform:
        task, *paths = options.perform
        print(json.dumps(perform(task, *map(Path, paths))))
        return
    result = measure(options.gigabytes, options.shards, options.repeats)
    result["provenance"] = provenance()
    result["command"] = result["provenance"]["command"]
    result["table"] = table(result)
    print(markdown_table(result["table"]))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
