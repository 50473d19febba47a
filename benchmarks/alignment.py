"""Decode attention against head width: which widths are fast, and what `align` should be.

    python benchmarks/alignment.py [--device cuda] [--context 8192] [--batch 4]

One attention call over a full cache for widths from 80 to 128. A width is worth its bytes if its
time over that of 128 is near width / 128. On a GPU SDPA, flex and this package's kernel; on a CPU
SDPA, with the queries of a group as rows, and as transformers calls it.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from speed import clock_note, clock_of, dtype_of, figure, is_cuda, parser, write
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rap.evaluation.cost.latency import captured, interleaved, synchronize
from rap.model.kernels.decode_attention import decode_attention

WIDTHS = [80, 84, 88, 90, 92, 96, 104, 112, 128]
HEADS = {"cpu": (8, 2), "cuda": (32, 8)}


def calls(width: int, arguments: Any, flex: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Every way to attend at one width."""
    cuda = is_cuda(arguments.device)
    heads, groups = HEADS["cuda" if cuda else "cpu"]
    made: dict[str, Any] = {"device": arguments.device, "dtype": dtype_of(arguments.device)}
    q = torch.randn(arguments.batch, heads, 1, width, **made)
    k, v = torch.randn(2, arguments.batch, groups, arguments.context, width, **made)
    rows, scale = q.view(arguments.batch, groups, heads // groups, width), 128**-0.5
    found: dict[str, Callable[[], Any]] = {
        "sdpa, grouped": lambda: sdpa(rows, k, v, scale=scale),
        "sdpa": lambda: sdpa(q, k, v, scale=scale, enable_gqa=True),
    }
    if cuda:
        found["flex"] = lambda: flex(q, k, v, scale=scale, enable_gqa=True)
        found["kernel"] = lambda: decode_attention(q[:, :, 0], k, v, scale=scale)
    return found


def main() -> None:
    """Measure all widths in turns, print, write."""
    options = parser(__doc__, rounds=25)
    options.add_argument("--context", type=int, default=8192)
    options.add_argument("--batch", type=int, default=4)
    arguments = options.parse_args()
    kind = "cuda" if is_cuda(arguments.device) else "cpu"
    # One compilation for each width: dynamic shapes would be slower than what a model runs.
    flex = torch.compile(flex_attention, dynamic=False)
    torch._dynamo.config.recompile_limit = 64
    device = torch.device(arguments.device)

    def waited(call: Callable[[], Any]) -> Callable[[], None]:
        # A graph, as in a decode step: Python would take longer than the kernels.
        launch = captured(call) if kind == "cuda" else call

        def run() -> None:
            launch()
            synchronize(device)

        return run

    with torch.no_grad():
        every = {
            (way, width): waited(call)
            for width in WIDTHS
            for way, call in calls(width, arguments, flex).items()
        }
        seconds = interleaved(every, arguments.rounds, clock=clock_of(arguments))
    ways = list(dict.fromkeys(way for way, _ in every))
    widest = WIDTHS[-1]
    rows = [
        {
            "width": width,
            "bytes": width / widest,
            "microseconds": {way: 1e6 * statistics.median(seconds[way, width]) for way in ways},
            "of_widest": {
                way: statistics.median(
                    a / b for a, b in zip(seconds[way, width], seconds[way, widest], strict=True)
                )
                for way in ways
            },
        }
        for width in WIDTHS
    ]
    table = {
        "title": f"Decode attention against head width ({kind.upper()})",
        "note": f"Batch {arguments.batch}, {arguments.context:,} tokens; time over that of width "
        f"{widest}, medians of interleaved rounds; {clock_note(arguments)}. `bytes` is what the "
        "time would be if reading the cache were all.",
        "header": ["width", "bytes", *ways],
        "rows": [
            [
                row["width"],
                figure(row["bytes"], ".2f"),
                *(figure(row["of_widest"][way], ".2f") for way in ways),
            ]
            for row in rows
        ],
    }
    write("alignment", {"rows": rows, "table": table}, arguments)


if __name__ == "__main__":
    main()
