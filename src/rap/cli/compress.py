"""`rap compress`, and its stages alone: `rap plan` and `rap apply`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calibration.text import check_sources
from ..calibration.workbench import Workbench
from ..checkpoint.card import comparison
from ..checkpoint.files import check_output, check_output_file
from ..checkpoint.load import is_pruned, load_config, load_dense
from ..checkpoint.provenance import provenance
from ..checkpoint.source import check_apart, resolve_source
from ..methods import Method, apply_plan, traits_of
from ..model.errors import RapError
from ..model.layers import attention_spec, check_dense, text_config
from ..pipeline import compress, compress_streamed, forward_only, save
from ..planning.plan import Plan, write_shapes
from ..recovery.stages import RECOVERIES, check_recovery
from ..serving.capacity import Held, held_by_engines
from ..serving.layout import dense_head_dims
from ..surgery.replace import Replacement, load_plan
from ..surgery.stream import apply_streamed, check_config
from . import dry_run as dry
from . import options
from .groups import Cut, Reading, Streaming, grouped
from .next_steps import next_steps, say_next
from .options import console, print_json, print_table

Recover = Annotated[str, typer.Option("--recover", help=f"One of: {', '.join(RECOVERIES)}.")]


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("compress")(compress_command)
    app.command("plan")(plan_command)
    app.command("apply")(apply_command)


@grouped
def compress_command(
    model: options.Model,
    output: options.Output,
    cut: Cut,
    read: Reading,
    streamed: Streaming,
    recover: Recover = "none",
    evaluate: options.Evaluate = "bundled",
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Compress MODEL to a fraction of its KV cache and write a checkpoint that loads anywhere."""
    _check_placing(read, streamed)
    if dry_run and streamed.stream:
        raise RapError("--stream says what it will hold before it starts: leave --dry-run out")
    if streamed.stream:
        shown = None if evaluate == "none" else evaluate
        report = _streamed(model, output, cut, read, streamed, recover, shown, force)
        return _say_report(report, model, output, cut, load_config(output), recover, as_json)
    method = cut.build(resolve_source(model), read.seed)
    if dry_run:
        check_recovery(recover, method.name)
        check_output(output, force=force)
        check_apart(output, model)
        return _tell(model, output, method, read, recover, evaluate, as_json)
    result = compress(
        model,
        output=output,
        method=method,
        calibration=read.calibration,
        num_windows=read.windows,
        window=read.window,
        evaluate=None if evaluate == "none" else evaluate,
        dtype=read.dtype,
        device_map=read.device_map,
        recover=recover,
        bos=read.bos,
        seed=read.seed,
        force=force,
        progress=True,
    )
    _say_report(result.report, model, output, cut, result.model.config, recover, as_json)


def _check_placing(read: Reading, streamed: Streaming) -> None:
    """Raise RapError for options that the other way of working has no use for."""
    if streamed.stream and (read.dtype != "auto" or read.device_map is not None):
        raise RapError(
            "--stream keeps the types that are stored and works on --device: leave --dtype and "
            "--device-map out"
        )
    if not streamed.stream and (streamed.device != "cpu" or streamed.statistics is not None):
        raise RapError("--device and --statistics go with --stream: add it, or leave them out")


def _streamed(
    model: str,
    output: Path,
    cut: Cut,
    read: Reading,
    streamed: Streaming,
    recover: str,
    evaluate: str | None,
    force: bool,
) -> dict[str, Any]:
    """Compress layer by layer; the report."""
    source = resolve_source(model)
    return compress_streamed(
        model,
        cut.retain,
        output,
        method=cut.build(source, read.seed),
        instead=forward_only(lambda **more: cut.build(source, read.seed, **more)),
        statistics=streamed.statistics,
        calibration=read.calibration,
        num_windows=read.windows,
        window=read.window,
        evaluate=evaluate,
        device=streamed.device,
        recover=recover,
        bos=read.bos,
        seed=read.seed,
        force=force,
        progress=True,
    )


def _say_report(
    report: dict[str, Any],
    model: str,
    output: Path,
    cut: Cut,
    config: Any,
    recover: str,
    as_json: bool,
) -> None:
    if as_json:
        return print_json(report)
    table = comparison(report)
    print_table(f"{model} at retain {cut.retain}", ["", "dense", "pruned"], table)
    rows = held_by_engines(config) if is_pruned(config) else []
    _say_held(rows)
    if cut.target in ("llamacpp", "mlx") and {*dense_head_dims(text_config(config))} == {64}:
        console.print(
            f"heads of 64 channels have one width below that suits {cut.target}, 32: half the "
            "cache whatever --retain says, at the cost in quality above (docs/serving.md compares "
            "it with a quantized cache)",
            style="yellow",
        )
    console.print(f"wrote {output}; `rap inspect {output}` shows every layer")
    say_next(next_steps(model, output, config, rows, recover, cut.target))


def _tell(
    model: str,
    output: Path,
    method: Method,
    read: Reading,
    recover: str,
    evaluate: str,
    as_json: bool,
) -> None:
    """What compressing would do; the model's shapes are those of its config."""
    text = None if evaluate == "none" else evaluate
    check_sources(read.calibration, text)
    config = load_config(model)
    check_dense(config)
    attention_spec(config)
    device = dry.working_device(read.device_map)
    dense = dry.unloaded(config, device)
    needs = method.needs_for(dense)
    calibrate, memory = dry.calibration_step(dense, needs, read.windows, read.window)
    # The cut model is not there yet: the dense one's sizes are the most that it can have.
    recovers, held = dry.recovery_step(recover, dense, dense, None)
    report = dry.described(
        [calibrate, *recovers, dry.evaluation_step(text, dense, dense)],
        {"weights": dry.weight_bytes(config, dense, read.dtype, device), **memory, **held},
        device,
        model=model,
        output=str(output),
        method=method.describe(),
    )
    print_json(report) if as_json else dry.say(report)


def _say_held(held: Sequence[Held]) -> None:
    """What engines will hold: padding is seen here, and not first in a server's capacity."""
    rows = [
        (row.backend, row.widths, f"{row.ratio:.3f}x" if row.ratio else "-", row.advice)
        for row in held
    ]
    if rows:
        header = ["engine", "widths", "tokens it holds", "would do better"]
        print_table("The cache in engines, over the dense model's", header, rows)


@grouped
def plan_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Plan file to write.")],
    cut: Cut,
    read: Reading,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Decide what MODEL keeps, and write the decision to a file without cutting anything."""
    check_output_file(output, force=force)
    chosen = cut.build(resolve_source(model), read.seed)
    bench = Workbench.open(
        model,
        dtype=read.dtype,
        device_map=read.device_map,
        reading=read.text,
        progress=True,
    )
    decision = bench.plan(chosen)
    decision.save(output)
    settings: dict[str, Any] = {
        "calibration": read.calibration,
        "num_windows": read.windows,
        "window": read.window,
        "bos": read.bos,
        "bos_token": bench.bos,
        "seed": read.seed,
    }
    _say_plan(decision, output, as_json, model=model, dtype=read.dtype, **settings)


def apply_command(
    model: options.Model,
    plan: Annotated[Path, typer.Argument(help="Plan file of `rap plan`, or a pruned folder.")],
    output: options.Output,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Rewrite shard by shard, without ever holding the model."),
    ] = False,
    dtype: options.Dtype = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Cut MODEL as PLAN says and write the smaller checkpoint."""
    check_output(output, force=force)
    check_apart(output, model)
    if stream and dtype != "auto":
        raise RapError("--stream keeps the stored types: leave --dtype out")
    decision = load_plan(plan)
    source = resolve_source(model)
    if not stream:
        check_config(load_config(source), decision)
        dense = load_dense(source, dtype=dtype)
        small = apply_plan(dense, decision)
        save(small, decision, output, source=source, dense=dense, force=force)
    elif isinstance(decision, Plan):
        about = traits_of(decision)
        apply_streamed(source, decision, output, traits=about, force=force, progress=True)
    else:
        raise RapError("this plan holds weights of its own and cannot stream: leave --stream out")
    # Whole heads leave a stock checkpoint, which has no such section.
    fingerprint = (getattr(load_config(output), "rap", None) or {}).get("fingerprint", "")
    settings: dict[str, Any] = {"plan_file": str(plan), "stream": stream, "dtype": dtype}
    _say_plan(decision, output, as_json, fingerprint=fingerprint, model=model, **settings)


def _say_plan(
    plan: Plan | Replacement, output: Path, as_json: bool, fingerprint: str = "", **settings: Any
) -> None:
    data: dict[str, Any] = {
        "output": str(output),
        "retain": plan.retain,
        "kept_fraction": plan.kept_fraction,
        "method": plan.method,
        "shapes": write_shapes(plan.shapes),
        "dense_fingerprint": plan.dense_fingerprint,
        "provenance": provenance(**settings),
    }
    if fingerprint:
        data["fingerprint"] = fingerprint
    if as_json:
        print_json(data)
    else:
        console.print(f"wrote {output}: keeps {plan.kept_fraction:.1%} of the KV cache")
