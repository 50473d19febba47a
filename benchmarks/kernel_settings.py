"""The decode kernel alone under other launch settings, at the shapes of Llama-3-8B's attention.

    python benchmarks/kernel_settings.py [--seconds 30] [--output FILE]

Needs a CUDA device. Settings are stages and bytes of blocks in flight, warps of a program, and
programs per multiprocessor; the first of them are the kernel's own. PyTorch's SDPA stands beside
it where a key and a value are as wide as it wants them. Microseconds of CUDA graphs, bfloat16.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from speed import is_cuda, parser, write

from rap.model.kernels.decode_attention import triton as kernel

# KV heads, and channels of a key and of a value, of 32 query heads.
SHAPES = {
    "dense": (8, 128, 128),
    "rap:merge=1@0.7": (8, 88, 92),
    "rap:merge=1@0.5": (8, 64, 64),
    "rap:merge=2@0.7": (4, 180, 180),
    "rap:merge=2@0.5": (4, 128, 128),
    "rap:merge=4@0.5": (2, 256, 256),
}
QUERIES, REPEATS = 32, 4
POINTS = ((16, 8192), (1, 32768), (1, 8192))
NAMES = ("_STAGES", "_BLOCK_BYTES", "_WARPS", "_PROGRAMS_PER_PROCESSOR")
OWN = tuple(getattr(kernel, name) for name in NAMES)
SETTINGS = (OWN, (3, 2**16, 4, 4), (4, 2**17, 4, 4), (3, 98304, 4, 4), (2, 2**16, 4, 8))


def microseconds(call: Callable[[], Any], rounds: int) -> float:
    """The median of replays of a graph of several calls, a call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    graph.replay()
    spent = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spent.append(1e3 * begin.elapsed_time(end) / REPEATS)
    return statistics.median(spent)


def measure(shape: str, batch: int, context: int, rounds: int) -> dict[str, Any]:
    """Every setting, and SDPA, at one point."""
    groups, width, value_width = SHAPES[shape]
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(batch, QUERIES, width, **made)
    cache = tuple(torch.randn(batch, groups, context, w, **made) for w in (width, value_width))
    spent = {}
    for settings in SETTINGS:
        for name, value in zip(NAMES, settings, strict=True):
            setattr(kernel, name, value)
        call = lambda: kernel.launch(query, cache, scale=width**-0.5)  # noqa: E731
        spent[",".join(map(str, settings))] = microseconds(call, rounds)
    for name, value in zip(NAMES, OWN, strict=True):
        setattr(kernel, name, value)
    attend = torch.nn.functional.scaled_dot_product_attention
    if width == value_width == 128:
        call = lambda: attend(query[:, :, None], *cache, enable_gqa=True)  # noqa: E731
        spent["SDPA"] = microseconds(call, rounds)
    return {"shape": shape, "batch": batch, "context": context, "microseconds": spent}


def table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row of every point, a column of every setting."""
    names = [",".join(map(str, settings)) for settings in SETTINGS] + ["SDPA"]
    shown = [
        [row["shape"], f"{row['batch']} x {row['context']:,}"]
        + [f"{row['microseconds'][n]:.0f}" if n in row["microseconds"] else "" for n in names]
        for row in rows
    ]
    return {
        "title": "The decode kernel under other launch settings",
        "note": "Microseconds; settings are stages, bytes, warps, programs per multiprocessor. "
        f"Medians of {arguments.rounds} replays.",
        "header": ["cache", "batch x context", *names],
        "rows": shown,
    }


def main() -> None:
    """Measure until the time is over; print, and write the result."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--seconds", type=float, default=60, help="begin no point after this")
    arguments = options.parse_args()
    if not is_cuda(arguments.device):
        raise SystemExit("kernels are timed on a CUDA device: run it there")
    begun, rows = time.monotonic(), []
    for shape in SHAPES:
        for batch, context in POINTS:
            if time.monotonic() - begun < arguments.seconds:
                rows.append(measure(shape, batch, context, arguments.rounds))
    write("kernel_settings", {"rows": rows, "table": table(rows, arguments)}, arguments)


if __name__ == "__main__":
    main()
