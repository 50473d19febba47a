"""What benchmarks share: shapes, devices, peak memory, and the form of their result files."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from rap.checkpoint.provenance import device_name, installed_version, provenance
from rap.studies.report.report import markdown_table

RESULTS = Path(__file__).parent / "results"
LOAD = os.getloadavg()  # of the machine when the benchmark began

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
# A quarter of the width and an eighth of the layers; heads and their groups as in Llama 3.
SCALED = LLAMA_3_8B | {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options all of them have."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, default=rounds, help="timed rounds, interleaved")
    made.add_argument(
        "--wall",
        action="store_true",
        help="wall time also with one CPU thread, whose own time is counted otherwise",
    )
    made.add_argument("--output", type=Path, help="default: benchmarks/results/NAME-DEVICE.json")
    return made


def is_cuda(device: str) -> bool:
    """Whether a device is a GPU; SystemExit if it is one that is not there."""
    cuda = torch.device(device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        sys.exit("no CUDA device here: run with --device cpu")
    return cuda


def clock_of(arguments: argparse.Namespace) -> Callable[[], float]:
    """Wall time on a GPU or where asked for, else the CPU time of this process."""
    wall = arguments.wall or is_cuda(arguments.device) or torch.get_num_threads() > 1
    return time.perf_counter if wall else time.process_time


def clock_note(arguments: argparse.Namespace) -> str:
    """How the table calls the clock."""
    wall = clock_of(arguments) is time.perf_counter
    return "wall time" if wall else "CPU time of one thread, since others shared the machine"


def dtype_of(device: str) -> torch.dtype:
    """What models are held in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if is_cuda(device) else torch.float32


def config_of(device: str) -> LlamaConfig:
    """Llama 3 8B on a GPU, the scaled-down shape on a CPU."""
    return LlamaConfig(**(LLAMA_3_8B if is_cuda(device) else SCALED))


def slug(device: str) -> str:
    """The device in a file name."""
    name = device_name() if is_cuda(device) else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def output_path(name: str, arguments: argparse.Namespace) -> Path:
    """Where a benchmark's result goes."""
    return arguments.output or RESULTS / f"{name}-{slug(arguments.device)}.json"


def resident_peak() -> int:
    """Most memory this process held, in bytes (Linux). Not ru_maxrss: a child inherits that."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def write(
    name: str, result: dict[str, Any], arguments: argparse.Namespace, *, show: bool = True
) -> None:
    """Write the result with its command and provenance, and print its tables if `show`."""
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    made = provenance(**{"dtype": str(dtype_of(arguments.device))} | settings)
    if is_cuda(arguments.device):
        made["device"] = device_name(arguments.device)  # that of the processes which measured
    else:
        threads = torch.get_num_threads()
        made["device"] = f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    made["packages"]["triton"] = installed_version("triton")
    made["load_average"] = {"begin": LOAD, "end": os.getloadavg()}
    if made["command"]:
        made["command"] = re.sub(r" --output \S+", "", made["command"])  # of one machine
    result = {**result, "provenance": made, "command": made["command"]}
    path = output_path(name, arguments)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if show:
        for table in result["tables"] if "tables" in result else [result["table"]]:
            print(f"\n{table['title']}\n\n{markdown_table(table)}")
        print(f"\nwrote {path}")


def figure(value: float | None, spec: str, unit: str = "") -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:{spec}}{unit}"
