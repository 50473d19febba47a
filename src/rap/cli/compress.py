"""`rap compress`, its stages alone (`rap plan`, `rap apply`), and the commands that follow it."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calibration.dense_context import DenseContext
from ..calibration.run import check_length
from ..checkpoint.card import comparison
from ..checkpoint.device import AUTO, placement, say_device
from ..checkpoint.files import check_output, check_output_file
from ..checkpoint.gguf import is_gguf
from ..checkpoint.load import is_pruned, load_config, load_dense
from ..checkpoint.provenance import provenance
from ..checkpoint.source import BUNDLED, check_apart, resolve_source
from ..data.held_out import HELD_OUT, split
from ..data.protocol import EVALUATION_WINDOW, EVALUATION_WINDOWS
from ..data.text import check_sources, check_windows, named_sources
from ..methods import Method, traits_of
from ..model.errors import CalibrationError, RapError
from ..model.layers import attention_spec, check_dense, text_config
from ..pipeline import DEFAULT, PRETRAINED, Defaults, check_placing, compress, forward_only, save
from ..planning.plan import Plan, write_shapes
from ..recovery.layer_fit import FitConfig, fit_config
from ..recovery.stages import RECOVERIES, check_recovery
from ..runtime.layerwise import stand_alone
from ..runtime.settings import read_settings
from ..serving.capacity import EngineCapacity, held_by_engines
from ..serving.layout import dense_head_dims
from ..serving.stock import export_stock
from ..surgery.apply import apply
from ..surgery.weights import check_config
from ..surgery.write import apply_streamed
from . import dry_run as dry
from . import options
from .groups import CompletedOptions, PruningOptions, StreamingOptions, grouped
from .options import console, print_json, print_table

BUNDLED_PRE = "smollm"  # the bundled tokenizer splits text alike, in llama.cpp's words


@dataclass(frozen=True, kw_only=True)
class CompressionRun:
    """A run of `rap compress`: what was made of which model, with the data that was read.

    `evaluate` is the option as it was given, `text` the dataset that was evaluated, if any, and
    `window` the tokens per evaluation window where they are fewer than by default.
    """

    model: str
    output: Path
    read: CompletedOptions
    recover: str = "none"
    evaluate: str = HELD_OUT
    target: str | None = None
    text: str | None = None
    window: int | None = None

    def next_steps(self, config: Any, rows: Sequence[EngineCapacity]) -> list[str]:
        """Three commands, in the order in which they make sense; the last is of the target."""
        return [
            f"evaluate: {shlex.join(self._evaluate())}",
            f"recover:  {shlex.join(self._recover(stand_alone(config)))}",
            f"serve:    {self._serve(config, rows)}",
        ]

    def _evaluate(self) -> list[str]:
        """The measurement of the report again."""
        data = "bundled" if self.read.calibration == DEFAULT else self.read.calibration
        asked = HELD_OUT if self.evaluate == "none" else self.evaluate
        try:
            dataset = self.text or split(data, asked)[1]
        except CalibrationError:  # nothing of it is held out
            dataset = "bundled"
        command = ["rap", "evaluate", "fidelity", str(self.output), "--dense", self.model]
        command += ["--text", str(dataset), "--max-windows", str(EVALUATION_WINDOWS)]
        command += [] if self.window is None else ["--window", str(self.window)]
        return command + self._shared()

    def _recover(self, alone: bool) -> list[str]:
        """Recovery on the data of calibration, with the same part of it held out.

        Layer by layer, if that was not done and they stand `alone`.
        """
        preset = "fit" if alone and self.recover in ("none", "closed-form") else "full"
        command = ["rap", "recover", str(self.output), "--teacher", self.model]
        command += ["--preset", preset]
        text = self.read.calibration
        command += [] if text == DEFAULT else ["--text", text]
        command += [] if self.evaluate == HELD_OUT else ["--evaluate", self.evaluate]
        command += [] if self.read.seed == 0 else ["--seed", str(self.read.seed)]
        command += [] if self.read.dtype == "auto" else ["--teacher-dtype", self.read.dtype]
        better = self.output.with_name(f"{self.output.name}-recovered")
        return [*command, *self._shared(), "-o", str(better)]

    def _serve(self, config: Any, rows: Sequence[EngineCapacity]) -> str:
        """To a server, or to the form that the target reads."""
        output = str(self.output)
        if self.target == "llamacpp":
            export = ["rap", "export", "gguf", output, "-o", f"{output}.gguf"]
            return shlex.join([*export, *self._tokenizer()])
        if self.target in ("mlx", "stock"):
            return shlex.join(["rap", "export", "stock", output, "-o", f"{output}-plain"])
        if not is_pruned(config):
            served = shlex.join(["vllm", "serve", output])
            return f"{served}  # a plain checkpoint: any engine loads it"
        if any(row.ratio is not None for row in rows):
            return shlex.join(["rap", "serve", output])
        return "no engine loads this checkpoint; use transformers after `import rap`"

    def _tokenizer(self) -> list[str]:
        """Flags of a tokenizer that llama.cpp's table may lack."""
        if is_gguf(self.model):
            return ["--tokenizer-from", self.model]
        return ["--pre", BUNDLED_PRE] if self.model == BUNDLED else []

    def _shared(self) -> list[str]:
        """What both read alike, where it is not the default."""
        default = CompletedOptions()
        flags = {"--bos": "bos", "--device": "device", "--device-map": "device_map"}
        changed = {
            flag: getattr(self.read, name)
            for flag, name in flags.items()
            if getattr(self.read, name) != getattr(default, name)
        }
        return [word for pair in changed.items() for word in pair]


def say_next(steps: Sequence[str]) -> None:
    """Print them on standard error, in plain text that can be copied."""
    for step in steps:
        console.print(step)


Recover = Annotated[
    str,
    typer.Option(
        "--recover",
        help=f"One of: {', '.join(RECOVERIES)}. auto: fit, and none for test models below "
        f"{PRETRAINED:,} parameters and for Gemma 3n and 4.",
    ),
]

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Setting of layer-wise distillation, such as fit.steps=40; repeatable."
    ),
]


@grouped
def compress_command(
    model: options.Model,
    output: options.Output,
    cut: PruningOptions,
    read: CompletedOptions,
    streamed: StreamingOptions,
    recover: Recover = DEFAULT,
    changes: Changes = None,
    evaluate: options.Evaluate = HELD_OUT,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Prune MODEL to a fraction of its KV cache, and write a checkpoint."""
    check_placing(streamed.stream, read.dtype, read.device_map, streamed.statistics)
    if dry_run and streamed.stream:
        raise RapError("--stream prints its memory at start-up; remove --dry-run")
    source = resolve_source(model)
    defaults = Defaults.of(model, in_memory=not streamed.stream)
    method = cut.build(source, read.seed, **defaults.settings)
    instead = forward_only(lambda **x: cut.build(source, read.seed, **defaults.settings, **x))
    recovers = defaults.recovery(recover)
    fit = _changed(recovers, changes or [], read.seed)
    plain = cut.target == "plain"
    if dry_run or plain:
        _check_output(output, model, force)
    written = output.with_name(f".{output.name}.pruned") if plain else output
    if dry_run:
        check_recovery(recovers, method.name)
        read = replace(read, calibration=defaults.calibration(read.calibration, read.windows))
        return _tell(model, output, method, read, recovers, fit, evaluate, as_json)
    _say_recovery(recover, recovers, defaults)
    result = compress(
        model,
        output=written,
        method=method,
        instead=instead if streamed.stream else None,
        calibration=read.calibration,
        num_windows=read.windows,
        window=read.window,
        evaluate=None if evaluate == "none" else evaluate,
        dtype=read.dtype,
        device=read.device,
        device_map=read.device_map,
        stream=streamed.stream,
        statistics=streamed.statistics,
        recover=recovers,
        fit=fit,
        bos=read.bos,
        seed=read.seed,
        force=force or plain,
        progress=True,
    )
    if plain:
        _export_plain(written, output, force)
    config = load_config(output) if plain or result.model is None else result.model.config
    about: dict[str, Any] = {"evaluate": evaluate, "target": cut.target, "recover": recovers}
    made = CompressionRun(model=model, output=output, read=_as_read(read, defaults), **about)
    say_report(result.report, made, cut, config, as_json)


def _as_read(read: CompletedOptions, defaults: Defaults) -> CompletedOptions:
    """The data by name where the model wrote none: `rap recover` loads it, and would add some."""
    if not defaults.pretrained or defaults.writes:
        return read
    return replace(read, calibration=defaults.calibration(read.calibration, read.windows))


def _check_output(output: Path, model: str, force: bool) -> None:
    """Raise RapError where nothing can be written, before anything is computed."""
    check_output(output, force=force)
    check_apart(output, model)


def _say_recovery(asked: str, recovers: str, defaults: Defaults) -> None:
    """That the model will be distilled, or cannot be by default, where nobody asked for it."""
    if asked == DEFAULT and recovers != "none":
        console.print("recovery: layer-wise distillation; --recover none is a quick look without")
    elif asked == DEFAULT and defaults.pretrained:
        console.print(
            "recovery: none, because layers of this family cannot be distilled one by one; "
            "--recover full distills end to end, on a GPU"
        )


def _export_plain(written: Path, output: Path, force: bool) -> None:
    """The plain checkpoint of the pruned one, which nobody asked for and which is removed.

    What was pruned and recovered stays where it cannot be written.
    """
    try:
        export_stock(written, output, force=force)
    except (RapError, OSError) as error:
        rest = shlex.join(["rap", "export", "stock", str(written), "-o", str(output)])
        raise RapError(f"{error}; the model is in {written}, and `{rest}` finishes") from error
    shutil.rmtree(written)


def _changed(recover: str, changes: list[str], seed: int) -> FitConfig | None:
    """Layer-wise distillation with `fit.NAME=VALUE` changes; None without any."""
    values = read_settings(changes)
    if not values:
        return None
    if "fit" not in recover.split("+"):
        raise RapError(f"--set changes --recover fit, not {recover}; add that, or remove --set")
    if wrong := [name for name in values if not name.startswith("fit.")]:
        raise RapError(f"cannot set {', '.join(wrong)}; write fit.NAME=VALUE, such as fit.steps=40")
    changed = {name.removeprefix("fit."): value for name, value in values.items()}
    return fit_config(**{"seed": seed, **changed})


def say_report(
    report: dict[str, Any], made: CompressionRun, cut: PruningOptions, config: Any, as_json: bool
) -> None:
    """Print what was made: figures, what engines hold, what to do next; or the report alone."""
    if as_json:
        return print_json(report)
    table, recovery = comparison(report), report.get("recovery") or {}
    refused = recovery and not recovery["perplexity_after"] < recovery["perplexity_before"]
    after = "pruned" if made.recover == "none" or refused else "recovered"
    print_table(f"{made.model} at retain {cut.retain}", ["", "dense", after], table)
    if refused:
        console.print(
            f"the pruned model is kept: no recovery lowered its perplexity on held-out samples, "
            f"{recovery['perplexity_before']:.3f}; try other --calibration data",
            style="yellow",
        )
    rows = held_by_engines(config) if is_pruned(config) else []
    _say_held(rows)
    if cut.target in ("llamacpp", "mlx") and {*dense_head_dims(text_config(config))} == {64}:
        console.print(
            f"--target {cut.target} supports only head_dim 32 for heads of 64 channels: half of "
            "the cache, at the quality above; compare with --target plain and a quantized cache",
            style="yellow",
        )
    for line in report.get("attention", ()):
        console.print(line)
    inspected = shlex.join(["rap", "inspect", str(made.output)])
    console.print(f"wrote {made.output}; `{inspected}` shows every layer")
    seconds = report["provenance"]["seconds"]
    stages = ", ".join(f"{stage} {timedelta(seconds=round(x))}" for stage, x in seconds.items())
    console.print(f"time: {timedelta(seconds=round(sum(seconds.values())))} ({stages})")
    scored = report["dense"].get("evaluation")
    if scored is not None:
        fewer = scored["window"] if scored["window"] < EVALUATION_WINDOW else None
        made = replace(made, text=scored["text"], window=fewer)
    say_next(made.next_steps(config, rows))


def _tell(
    model: str,
    output: Path,
    method: Method,
    read: CompletedOptions,
    recover: str,
    fit: FitConfig | None,
    evaluate: str,
    as_json: bool,
) -> None:
    """What compressing would do; the model's shapes are those of its config."""
    data, text = split(read.calibration, None if evaluate == "none" else evaluate)
    check_sources(data, text)
    check_windows(read.windows, read.window)
    config = load_config(model)
    check_dense(config)
    attention_spec(config)
    device = dry.device_of(read.device, read.device_map)
    dense = dry.unloaded(config, device)
    needs = method.needs_for(dense)
    if needs:
        check_length(dense, read.window)
    calibrate, memory = dry.calibration_step(dense, needs, read.windows, read.window)
    # The cut model is not there yet: the dense one's sizes are the most that it can have.
    recovers, held = dry.recovery_step(recover, dense, dense, fit)
    report = dry.described(
        [
            *dry.sampling_steps(named_sources(data)),
            calibrate,
            *recovers,
            dry.evaluation_step(text, dense),
        ],
        {"weights": dry.weight_bytes(config, dense, read.dtype, device), **memory, **held},
        device,
        model=model,
        output=str(output),
        method=method.describe(),
    )
    print_json(report) if as_json else dry.say(report)


def _say_held(held: Sequence[EngineCapacity]) -> None:
    """What engines will hold: padding is seen here, and not first in a server's capacity."""
    rows = [
        (row.backend, row.widths, f"{row.ratio:.3f}x" if row.ratio else "-", row.advice)
        for row in held
    ]
    if rows:
        header = ["engine", "head dimensions", "tokens, over dense", "suggested option"]
        print_table("KV cache capacity by engine", header, rows)


@grouped
def plan_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Plan file to write.")],
    cut: PruningOptions,
    read: CompletedOptions,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Compute what MODEL keeps, and write the plan to a file."""
    check_output_file(output, force=force)
    defaults = Defaults.of(model)
    chosen = cut.build(resolve_source(model), read.seed, **defaults.settings)
    # Without the held-out tail, as `rap compress` calibrates.
    asked = defaults.calibration(read.calibration, read.windows)
    data, _ = split(asked, None)
    context = DenseContext.open(
        model,
        dtype=read.dtype,
        device=read.device,
        device_map=read.device_map,
        reading=replace(read.text, text=data),
        progress=True,
    )
    decision = context.plan(chosen)
    decision.save(output)
    settings: dict[str, Any] = {
        "calibration": data,
        "num_windows": read.windows,
        "window": read.window,
        "bos": read.bos,
        "bos_token": context.bos,
        "seed": read.seed,
        "device": str(context.model.device),
    }
    _say_plan(decision, output, as_json, model=model, dtype=read.dtype, **settings)


def apply_command(
    model: options.Model,
    plan: Annotated[Path, typer.Argument(help="Plan file of `rap plan`, or a pruned checkpoint.")],
    output: options.Output,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Process the checkpoint layer by layer, without loading the model."
        ),
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = AUTO,
    device_map: options.DeviceMap = None,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Apply PLAN to MODEL, and write the pruned checkpoint."""
    _check_output(output, model, force)
    if stream and (dtype != "auto" or device_map is not None):
        raise RapError("--stream keeps the stored data types; remove --dtype and --device-map")
    if stream and device != AUTO:
        raise RapError("--stream copies weights without a device; remove --device")
    placed = placement(device, device_map)
    decision = Plan.load(plan)
    source = resolve_source(model)
    if not stream:
        check_config(load_config(source), decision)
        dense = load_dense(source, dtype=dtype, **placed)
        say_device(dense)
        small = apply(dense, decision)
        save(small, decision, output, source=source, dense=dense, force=force)
    else:
        about = traits_of(decision)
        apply_streamed(source, decision, output, traits=about, force=force, progress=True)
    # Whole heads leave a stock checkpoint, which has no such section.
    fingerprint = (getattr(load_config(output), "rap", None) or {}).get("fingerprint", "")
    settings: dict[str, Any] = {"plan_file": str(plan), "stream": stream, "dtype": dtype}
    settings["device"] = "cpu" if stream else str(small.device)
    _say_plan(decision, output, as_json, fingerprint=fingerprint, model=model, **settings)


def _say_plan(
    plan: Plan, output: Path, as_json: bool, fingerprint: str = "", **settings: Any
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
        for line in plan.about():
            console.print(line)
        console.print(f"wrote {output}: keeps {plan.kept_fraction:.1%} of the KV cache")
