"""What each stage of compressing a real model takes: seconds, tokens a second, peak memory.

    python benchmarks/compress.py [--model smollm2] [--output benchmarks/results/compress-cpu.json]

The stages are those of `rap compress MODEL --retain 0.7 --recover none` by
`--calibration only:bundled`, one by one in a process that does nothing else. Calibration stands
beside a plain forward and backward of the same model by the same inputs, which is as fast as
reading a text once can be; evaluation beside two plain forward passes. Peak memory is the largest
resident set so far (Linux).
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import resident_peak

from rap.calibration.backward import next_token_loss
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.cli.groups import ReadingOptions
from rap.methods import parse_method
from rap.pipeline import EVALUATION_WINDOWS, measure_against, save
from rap.runtime.logits import decoder_of
from rap.studies.report.report import markdown_table

MIB = 2**20
PLAIN_WINDOWS = 4


class Clock:
    """Stages as they end: seconds, and the peak so far."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def run(self, stage: str, work: Callable[[], Any], tokens: int = 0) -> Any:
        """What `work` returns; `tokens` are those that it reads."""
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        row: dict[str, Any] = {
            "stage": stage,
            "seconds": seconds,
            "peak_mib": resident_peak() / MIB,
        }
        if tokens:
            row["tokens_per_second"] = tokens / seconds
        self.rows.append(row)
        print(f"{stage}: {seconds:.1f} s", flush=True)
        return result


def plain_speeds(model: Any, ids_BT: torch.Tensor) -> dict[str, float]:
    """Tokens a second of the layers alone, of the whole model, and of both directions."""
    speeds = {}
    decoder = decoder_of(model)[1]
    first = next(p for name, p in model.named_parameters() if "k_proj" in name)
    directions: dict[str, Callable[[torch.Tensor], Any]] = {
        "layers": lambda ids: decoder(input_ids=ids, use_cache=False),
        "forward": lambda ids: next_token_loss(model, ids),
        "forward and backward": lambda ids: next_token_loss(model, ids).backward(),
    }
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is first)
    for name, work in directions.items():
        with torch.set_grad_enabled(name == "forward and backward"):
            start = time.perf_counter()
            for ids in ids_BT.split(1):
                work(ids)
            speeds[name] = ids_BT.numel() / (time.perf_counter() - start)
    first.grad = None
    return speeds


def measure(source: str, retain: float, reading: CalibrationText) -> dict[str, Any]:
    """Every stage once, as `rap compress` runs them by default."""
    clock = Clock()
    context = clock.run("load", lambda: DenseContext.open(source, reading=reading))
    held_out = clock.run("read texts", lambda: (context.windows, context.held_out("bundled"))[1])
    method = parse_method("rap", retain)
    read = context.windows.numel()
    clock.run("calibrate", lambda: context.statistics_for([method]), tokens=read)
    plan = clock.run("plan", lambda: context.plan(method))
    small = clock.run("apply", lambda: method.apply(context.model, plan))
    judged: dict[str, Any] = {"tokens": held_out, "bos": context.bos}
    figures = clock.run(
        "evaluate",
        lambda: measure_against(
            context.model, {"pruned": small}, context.tokenizer, "bundled", **judged
        ),
    )
    scored = figures["dense"]["evaluation"]
    clock.rows[-1]["tokens_per_second"] = (
        scored["num_windows"] * scored["window"] / clock.rows[-1]["seconds"]
    )
    with tempfile.TemporaryDirectory() as folder:
        clock.run("save", lambda: save(small, plan, Path(folder) / "out", context.tokenizer))
    model = context.model.float()
    return {
        "rows": clock.rows,
        "seconds": sum(row["seconds"] for row in clock.rows),
        "plain": plain_speeds(model, context.windows[:PLAIN_WINDOWS]),
        "perplexity": {name: row["perplexity"] for name, row in figures.items()},
        "kl": figures["pruned"]["kl"],
        "evaluation_windows": EVALUATION_WINDOWS,
    }


def table(result: dict[str, Any]) -> dict[str, Any]:
    """The rows as `rap report` reads them."""
    rows = [
        [
            row["stage"],
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_second']:.0f}" if "tokens_per_second" in row else "",
            f"{row['peak_mib']:.0f}",
        ]
        for row in result["rows"]
    ]
    rows.append(["all", f"{result['seconds']:.1f}", "", f"{result['rows'][-1]['peak_mib']:.0f}"])
    plain = ", ".join(f"{name} {speed:.0f}" for name, speed in result["plain"].items())
    return {
        "title": f"What compressing {result['model']} takes",
        "note": f"Plain passes of the same model, tokens a second: {plain}.",
        "header": ["stage", "seconds", "tokens/s", "peak MiB"],
        "rows": rows,
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    defaults = ReadingOptions().text
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--retain", type=float, default=0.7)
    parser.add_argument("--windows", type=int, default=defaults.num_windows)
    parser.add_argument("--window", type=int, default=defaults.window)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/compress-cpu.json"))
    arguments = parser.parse_args()
    reading = CalibrationText("bundled", arguments.windows, arguments.window)
    result = measure(arguments.model, arguments.retain, reading) | {"model": arguments.model}
    result["provenance"] = provenance(
        model=arguments.model,
        retain=arguments.retain,
        windows=arguments.windows,
        window=arguments.window,
        threads=torch.get_num_threads(),
    )
    result["table"] = table(result)
    result["command"] = result["provenance"]["command"]
    print(markdown_table(result["table"]))
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
