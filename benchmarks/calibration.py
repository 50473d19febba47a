"""Speed and memory of Fisher calibration beside a plain forward and backward of the same tokens.

    python benchmarks/calibration.py [--rounds 5] [--output benchmarks/results/calibration-cpu.json]

Both take a small random Llama, one window at a time. Rounds are interleaved, medians compared,
so that a change of the machine's load meets both. The plain side keeps the gradients of the same
weights; without checkpointing both do the same forward and backward, with it calibration runs the
forward twice. Peak memory (Linux) is that of a process of its own beside one that only loads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import resident_peak
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

from rap.calibration.memory import estimate_memory
from rap.calibration.run import calibrate
from rap.checkpoint.provenance import provenance
from rap.studies.report.report import markdown_table

WINDOWS, WINDOW = 2, 256
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TASKS = ("load", "plain", "fisher", "fisher, checkpointing")


def model_and_windows() -> tuple[Any, torch.Tensor]:
    """The random model in float32, and its random windows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.float32).eval()
    return model, torch.randint(SHAPE["vocab_size"], (WINDOWS, WINDOW))


def plain(model: Any, windows: torch.Tensor) -> None:
    """Forward and backward of every window, gradients of K and V weights only."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" in name or "v_proj" in name)
    for ids_BT in windows.split(1):
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)


def task(name: str) -> Callable[[Any, torch.Tensor], Any]:
    """What one task does with a model and its windows."""
    if name == "load":
        return lambda model, windows: None
    if name == "plain":
        return plain
    again = name.endswith("checkpointing")
    return lambda model, windows: calibrate(model, windows, {"fisher"}, checkpointing=again)


def peak_bytes(name: str) -> int:
    """Largest resident set of a new process that does one task."""
    command = [sys.executable, __file__, "--task", name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(rounds: int) -> dict[str, Any]:
    """Tokens per second (medians of interleaved rounds), ratios to plain, peaks over loading."""
    model, windows = model_and_windows()
    seconds: dict[str, list[float]] = {name: [] for name in TASKS[1:]}
    for number in range(rounds + 1):
        for name, spent in seconds.items():
            start = time.perf_counter()
            task(name)(model, windows)
            if number:  # the first round warms up
                spent.append(time.perf_counter() - start)
    base = peak_bytes("load")
    median = {name: statistics.median(spent) for name, spent in seconds.items()}
    rows = [
        {
            "task": name,
            "tokens_per_second": windows.numel() / median[name],
            "of_plain": median["plain"] / median[name],
            "peak_bytes_over_loading": peak_bytes(name) - base,
        }
        for name in median
    ]
    estimates = {
        f"checkpointing={again}": estimate_memory(model, windows, {"fisher"}, checkpointing=again)
        for again in (False, True)
    }
    return {"rows": rows, "estimates": estimates, "shape": SHAPE}


def table(result: dict[str, Any]) -> dict[str, Any]:
    """The rows as `rap report` reads them."""
    rows = [
        [
            row["task"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['of_plain']:.2f}",
            f"{row['peak_bytes_over_loading'] / 2**20:.0f}",
        ]
        for row in result["rows"]
    ]
    return {
        "title": "What Fisher calibration costs",
        "note": "A small random Llama on a CPU; interleaved, medians. Memory is beyond loading.",
        "header": ["task", "tokens/s", "of plain", "peak MiB"],
        "rows": rows,
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/calibration-cpu.json")
    )
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task(arguments.task)(*model_and_windows())
        print(resident_peak())
        return
    result = measure(arguments.rounds)
    result["provenance"] = provenance(
        rounds=arguments.rounds, windows=WINDOWS, window=WINDOW, dtype="float32", seed=0
    )
    result["table"] = table(result)
    result["command"] = result["provenance"]["command"]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
