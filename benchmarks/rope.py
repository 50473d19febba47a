"""Rotation of queries and keys: contiguous dense against kept pairs, by indexing and by the kernel.

    python benchmarks/rope.py [--device cuda] [--lengths 1 512 4096] [--retains 0.5 0.7 0.9]

Llama 3's heads (32 queries, 8 KV, 128 channels; a quarter of them on a CPU). Above 1x is faster
than the dense rotation as transformers does it, measured in turns. The heat map has a panel for
each way; the kernel needs CUDA.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from speed import (
    clock_note,
    clock_of,
    dtype_of,
    figure,
    is_cuda,
    output_path,
    parser,
    write,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rap.evaluation.cost.latency import captured, interleaved, synchronize
from rap.model.kernels.rope_pairs import rope_pairs
from rap.model.rope import gather_pairs, rotate_pairs, rotate_step

LENGTHS = {"cpu": [1, 64, 512, 2048], "cuda": [1, 512, 2048, 8192, 32768]}
HEADS = {"cpu": (8, 2), "cuda": (32, 8)}
PAIRS = 64


def tasks(length: int, retain: float, arguments: Any) -> dict[str, Any]:
    """What is timed, by name: each rotates queries and keys of one sequence once."""
    cuda = is_cuda(arguments.device)
    heads, groups = HEADS["cuda" if cuda else "cpu"]
    made: dict[str, Any] = {"device": arguments.device, "dtype": dtype_of(arguments.device)}
    slots = max(4, round(retain * PAIRS / 4) * 4)

    def states(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(  # type: ignore[return-value]
            torch.randn(1, length, count, width, **made).transpose(1, 2)
            for count in (heads, groups)
        )

    angle = torch.randn(1, length, PAIRS, device=arguments.device).repeat(1, 1, 2)
    cos, sin = angle.cos().to(made["dtype"]), angle.sin().to(made["dtype"])
    pairs = cos[..., :PAIRS], sin[..., :PAIRS]
    rows = [torch.randperm(PAIRS)[:slots].sort().values for _ in range(groups)]
    index = torch.stack(rows).to(arguments.device, torch.int32)
    dense, kept = states(2 * PAIRS), states(2 * slots)

    def indexed() -> None:
        if length == 1:  # as a model does it
            rotate_step(*kept, *pairs, index)
            return
        tables = [gather_pairs(table, index) for table in pairs]
        for x in kept:
            rotate_pairs(x, *tables)

    found = {"dense": lambda: apply_rotary_pos_emb(*dense, cos, sin), "indexing": indexed}
    if cuda:
        found["kernel"] = lambda: rope_pairs(*kept, *pairs, index)
    device = torch.device(arguments.device)

    def waited(task: Any) -> Any:
        # Several in a row, so that waiting for the device does not weigh, and on a GPU as a graph,
        # as in a decode step: Python would take longer than the kernels.
        def several() -> None:
            for _ in range(10):
                task()

        launch = captured(several) if cuda else several

        def run() -> None:
            launch()
            synchronize(device)

        return run

    return {name: waited(task) for name, task in found.items()}


def heat_map(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over the contiguous dense rotation by length and retain, a panel for each way."""
    ways = [name for name in ("indexing", "kernel") if name in rows[0]["ratio"]]
    lengths = sorted({row["length"] for row in rows})
    retains = sorted({row["retain"] for row in rows})
    drawn = Figure(figsize=(4.4 * len(ways), 3.4), layout="constrained")
    axes = drawn.subplots(1, len(ways), squeeze=False)[0]
    largest = max(1.1, *(row["ratio"][way] for row in rows for way in ways))
    for axis, way in zip(axes, ways, strict=True):
        cells = {(row["retain"], row["length"]): row["ratio"][way] for row in rows}
        grid = [[cells[retain, length] for length in lengths] for retain in retains]
        axis.imshow(grid, cmap="RdBu", norm=TwoSlopeNorm(1.0, 0.0, largest), aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(x, y, f"{value:.2f}x", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.set_yticks(range(len(retains)), [str(retain) for retain in retains])
        axis.set_xlabel("tokens")
        axis.set_ylabel("retain")
        axis.set_title(f"{way}, over contiguous dense", fontsize=10)
    drawn.savefig(path, dpi=160)
    print(f"wrote {path}")


def main() -> None:
    """Measure every length and retain, draw, print, write."""
    options = parser(__doc__, rounds=25)
    options.add_argument("--lengths", type=int, nargs="+")
    options.add_argument("--retains", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9])
    arguments = options.parse_args()
    kind = "cuda" if is_cuda(arguments.device) else "cpu"
    rows = []
    for length in arguments.lengths or LENGTHS[kind]:
        for retain in arguments.retains:
            with torch.no_grad():
                seconds = interleaved(
                    tasks(length, retain, arguments), arguments.rounds, clock=clock_of(arguments)
                )
            ratio = {
                way: statistics.median(a / b for a, b in zip(seconds["dense"], found, strict=True))
                for way, found in seconds.items()
                if way != "dense"
            }
            micro = {way: 1e5 * statistics.median(found) for way, found in seconds.items()}
            rows.append({"length": length, "retain": retain, "ratio": ratio, "microseconds": micro})
    path = output_path("rope", arguments).with_suffix(".png")
    heat_map(rows, path)
    table = {
        "title": f"Rotation of kept pairs over contiguous dense rotation ({kind.upper()})",
        "note": f"Medians of interleaved rounds; {clock_note(arguments)}. The dense time is that "
        f"of transformers' own function. Heat map: `benchmarks/results/{path.name}`.",
        "header": ["tokens", "retain", "dense us", "indexing", "kernel"],
        "rows": [
            [
                f"{row['length']:,}",
                row["retain"],
                figure(row["microseconds"]["dense"], ".0f"),
                figure(row["ratio"]["indexing"], ".2f", "x"),
                figure(row["ratio"].get("kernel"), ".2f", "x"),
            ]
            for row in rows
        ],
    }
    write("rope", {"rows": rows, "table": table}, arguments)


if __name__ == "__main__":
    main()
