"""`rap bench`: from which context on a pruned checkpoint is faster than its dense model."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.device import AUTO, placement, say_device, working_device
from ..checkpoint.files import check_output_file
from ..checkpoint.load import check_dtype, is_pruned, load, load_config
from ..checkpoint.provenance import provenance
from ..checkpoint.source import resolve_source
from ..evaluation.cost.latency import (
    PLAIN,
    LatencyPoint,
    attend_by,
    default_variants,
    if_it_fits,
    measure_point,
    time_prefill,
)
from ..evaluation.cost.random_models import dense_config, random_model, uniform_config
from ..methods import Rap, parse_method
from ..methods.merged import Merge
from ..model.errors import RapError
from ..runtime.progress import track
from . import options
from .options import console, print_json, print_table, write_result


def bench_command(
    model: options.Model,
    dense: Annotated[
        str | None,
        typer.Option(help="Dense checkpoint to compare with [random weights]."),
    ] = None,
    retain: Annotated[
        float | None,
        typer.Option(help="For a dense MODEL: retain ratio of a pruned model with random weights."),
    ] = None,
    merge: Annotated[
        str,
        typer.Option(help="With --retain: KV heads per cached head: a number, all, or auto."),
    ] = AUTO,
    contexts: Annotated[
        list[int], typer.Option("--context", help="Tokens in the cache; repeatable.")
    ] = [512, 2048, 8192],  # noqa: B006 - typer copies it
    batch: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 1,
    rounds: Annotated[int, typer.Option(help="Timed steps per model, interleaved.")] = 9,
    prefill: Annotated[
        bool,
        typer.Option("--prefill", help="Also time prefill of the context."),
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = AUTO,
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="Measure CPU time of the process, for shared machines."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file to write.")
    ] = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Time decode steps of MODEL, pruned and dense interleaved, over a growing context.

    Both are timed with SDPA and with this package's attention, and the faster one counts. Time does
    not depend on weights, so the dense model needs no checkpoint.
    """
    _check(output, (rounds, batch, *contexts))
    placed, device = placement(device), str(working_device(device))
    settings = {"rounds": rounds, "dtype": dtype, "device": device, "cpu_time": cpu_time}
    settings |= {} if retain is None else {"retain": retain, "merge": merge}
    timed: dict[str, Any] = {"batch": batch, "rounds": rounds}
    timed["clock"] = time.process_time if cpu_time else time.perf_counter
    models = _models(resolve_source(model), dense, retain, merge, dtype, device, placed)
    say_device(models["pruned"])
    rows = _rows(models, contexts, prefill, device, timed, shown=not as_json)
    verdict = conclusion([(row["context"], row["ratio"]) for row in rows])
    result = {"model": model, "batch": batch, "points": rows, "verdict": verdict}
    result["provenance"] = provenance(**settings)
    if output is not None:
        write_result(output, result)
    if as_json:
        print_json(result)
    else:
        _print(f"Decode step of {model}, batch {batch}", rows)
        console.print(verdict)


def _rows(
    models: dict[str, Any],
    contexts: list[int],
    prefill: bool,
    device: str,
    timed: dict[str, Any],
    *,
    shown: bool,
) -> list[dict[str, Any]]:
    """What is printed of every context, shortest first."""
    rows = []
    for context in track(sorted(contexts), "timing", "contexts", shown=shown):
        variants = default_variants(device)
        rows.append(_row(measure_point(models, context=context, variants=variants, **timed)))
        if prefill:
            rows[-1]["prefill"] = _prefill(models, tokens=context, **timed)
    return rows


def _check(output: Path | None, counts: Sequence[int]) -> None:
    """Raise RapError for what cannot be measured, before a model is loaded."""
    if output is not None:
        check_output_file(output, force=True)
    if min(counts) < 1:
        raise RapError("--rounds, --batch and --context must be at least 1")


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            f"{row['context']:,}",
            *(f"{1e3 * row[name]:.2f}" if row[name] else "-" for name in ("dense", "pruned")),
            f"{row['ratio']:.2f}x" if row["ratio"] else "-",
            f"{row['roofline']:.2f}x" if row["roofline"] else "-",
        ]
        for row in rows
    ]
    header = ["context", "dense ms", "pruned ms", "dense / pruned", "if only bytes counted"]
    if "prefill" in rows[0]:
        header += ["prefill, dense ms", "pruned ms", "dense / pruned"]
        for cell, read in zip(cells, (row["prefill"] for row in rows), strict=True):
            if read is None:
                cell += ["-"] * 3
                continue
            cell += [f"{1e3 * read[name]:.0f}" for name in ("dense", "pruned")]
            cell.append(f"{read['ratio']:.2f}x")
    print_table(title, header, cells)


def _prefill(models: dict[str, Any], **timed: Any) -> dict[str, float] | None:
    """Medians in seconds, and the median over rounds of dense over pruned; None if memory ends."""
    for model in models.values():
        attend_by(model, PLAIN.attention)
    seconds = if_it_fits(time_prefill, models, **timed)
    if seconds is None:
        return None
    return {
        **{name: statistics.median(spent) for name, spent in seconds.items()},
        "ratio": statistics.median(
            dense / pruned
            for dense, pruned in zip(seconds["dense"], seconds["pruned"], strict=True)
        ),
    }


def conclusion(ratios: list[tuple[int, float | None]]) -> str:
    """From which measured context on the pruned model is faster; `ratios` in ascending order.

    A context counts only if all longer ones are faster too; one without a ratio did not fit.
    """
    measured = [(context, ratio) for context, ratio in ratios if ratio is not None]
    if not measured:
        return "nothing could be measured: memory did not suffice"
    start = None
    for context, ratio in reversed(measured):
        if ratio <= 1:
            break
        start = context
    if start is None:
        return f"the pruned model is not faster at the contexts measured, up to {measured[-1][0]:,}"
    return f"the pruned model is faster from {start:,} tokens of context on"


def _models(
    source: str,
    dense: str | None,
    retain: float | None,
    merge: str,
    dtype: str,
    device: str,
    placed: dict[str, Any],
) -> dict[str, Any]:
    """`dense` and `pruned`, loaded or standing in, on a `device` that loading knows as `placed`."""
    check_dtype(dtype)
    config = load_config(source)
    if not is_pruned(config):
        if dense is not None:
            raise RapError(f"{source} is not pruned: remove --dense, and give --retain")
        if retain is None:
            raise RapError(f"{source} is not pruned: give --retain for a pruned stand-in")
        narrow = uniform_config(config, retain, merge=_merge(merge))
        whole = load(source, dtype=dtype, **placed)
        small = random_model(narrow, dtype=whole.dtype, device=device)
        return {"dense": whole, "pruned": small}
    if retain is not None:
        raise RapError(f"{source} is pruned already: remove --retain")
    if merge != AUTO:
        raise RapError(f"{source} is pruned already: remove --merge")
    small = load(source, dtype=dtype, **placed)
    if dense is not None:
        whole = load(dense, dtype=small.dtype, **placed)
    else:
        whole = random_model(dense_config(config), dtype=small.dtype, device=device)
    return {"dense": whole, "pruned": small}


def _merge(asked: str) -> Merge:
    method = parse_method(f"rap:merge={asked}")
    assert isinstance(method, Rap)
    return method.merge


def _row(point: LatencyPoint) -> dict[str, Any]:
    """What is printed of one context, and every variant's median in seconds."""
    variants = {
        name: {variant: point.median(name, variant) for variant in point.seconds[name]}
        for name in point.seconds
    }
    return {
        "context": point.context,
        "dense": point.median("dense"),
        "pruned": point.median("pruned"),
        "ratio": point.ratio("pruned"),
        "roofline": point.roofline("pruned"),
        "kv_bytes": point.kv_bytes,
        "variants": variants,
    }
