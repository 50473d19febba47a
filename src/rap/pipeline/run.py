"""`compress`: every stage in order, over a model in memory or one whose weights are in files.

It begins with input that can work, the method, and the dense model (`opened`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..calibration.dense_context import CalibrationText, DenseContext
from ..calibration.statistics import Statistics
from ..checkpoint.device import AUTO
from ..checkpoint.files import check_output
from ..checkpoint.load import load_config
from ..checkpoint.source import check_apart
from ..data.bos import Bos
from ..data.held_out import HELD_OUT, split
from ..data.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from ..data.text import check_sources
from ..methods import Method, parse_method
from ..model.errors import RapError
from ..planning.plan import Plan
from ..recovery.layer_fit import FitConfig
from ..recovery.runs import STATISTICS_FOLDER, clear_work
from ..recovery.stages import check_recovery, recover_stage, work_folder
from ..runtime.layerwise import check_layers
from ..runtime.progress import Stopwatch
from ..surgery.apply import prune
from .defaults import DEFAULT, Defaults
from .objective import Objective, announce, choose, forward_only
from .report import describe, held_out, made_with, measure_pruned, write


@dataclass(frozen=True)
class Compression:
    """The pruned model (None if it was not in memory), its plan, and JSON-able measurements."""

    model: Any
    plan: Plan
    report: dict[str, Any]


def compress(
    source: Any,
    retain: float = 0.7,
    output: str | Path | None = None,
    *,
    method: Method | str = "rap",
    instead: Method | None = None,
    tokenizer: Any = None,
    calibration: str | Path = DEFAULT,
    num_windows: int = CALIBRATION_WINDOWS,
    window: int = CALIBRATION_WINDOW,
    evaluate: str | Path | None = HELD_OUT,
    dtype: str | torch.dtype = "auto",
    device: str = AUTO,
    device_map: str | None = None,
    stream: bool = False,
    statistics: str | Path | None = None,
    recover: str = DEFAULT,
    fit: FitConfig | None = None,
    bos: Bos = "auto",
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> Compression:
    """Compress a model to `retain` of its KV cache.

    `source` is a live model with its `tokenizer`, or a checkpoint directory, hub name or `bundled`,
    loaded in `dtype` onto `device` (auto: the GPU if there is one), or over several by
    `device_map`. Writes the checkpoint to `output` if given, over another with `force`. `method`
    knows its own `retain`, or is the text of one, `name[:recipe][:setting=value]...`. `calibration`
    is a dataset of `load_windows`, of which `num_windows` samples of `window` tokens are drawn by
    `seed`, begun as `bos` says; `evaluate` names the evaluation dataset (by default a held-out
    split, `held_out.split`; None: no figures). `recover` is one of `recovery.stages.RECOVERIES`,
    with the settings `fit` of layer-wise distillation. Both are by default as `Defaults` says: a
    single source is completed, and a pretrained model recovered. With `stream` layers are read
    from files, one in memory at a time, and work in float32 on `device`: gradients come from a file
    of `statistics`, or the whole model if it fits, else `instead` prunes, by metric `output`. A
    killed run resumes, when repeated. RapError for input that cannot work, before wasted work.
    """
    defaults = Defaults.of(source, tokenizer, in_memory=not stream)
    recover = defaults.recovery(recover)
    calibration, evaluate = split(defaults.calibration(calibration, num_windows), evaluate)
    method, instead = chosen(method, instead, float(retain), seed, defaults.settings)
    check_placing(stream, dtype, device_map, statistics, tokenizer)
    check(source, output, method, calibration, evaluate, recover, stream=stream, force=force)
    reading = CalibrationText(calibration, int(num_windows), int(window), seed, bos)
    placed = (dtype, device, device_map)
    context = opened(
        source, tokenizer, reading, placed, statistics, output, recover, stream, progress
    )
    objective = choose(method, instead, context)
    made = {"dtype": str(dtype), "statistics": str(statistics) if statistics else None}
    return _stages(context, objective, evaluate, output, recover, fit, made, force)


def _stages(
    context: DenseContext,
    objective: Objective,
    evaluate: str | None,
    output: str | Path | None,
    recover: str,
    fit: FitConfig | None,
    made: dict[str, str | None],
    force: bool,
) -> Compression:
    watch = Stopwatch()
    method, read = objective.method, context.reading
    tokens = held_out(evaluate, context.tokenizer, context.model, context.bos)
    announce(objective, context, tokens, fit or FitConfig() if recover == "fit" else None)
    watch.end("read")
    plan = planned(context, method)
    watch.end("calibrate")
    small = prune(context.source, plan)
    watch.end("prune")
    small, recovery = recover_stage(
        small,
        context.source,
        context.tokenizer,
        recover,
        texts=[read.text],
        fit=fit,
        seed=read.seed,
        output=output,
        bos=context.bos,
        progress=context.progress,
    )
    watch.end("recover")
    report = describe(context, method, plan) | {"recovery": recovery}
    report |= measure_pruned(context, small, plan, evaluate, tokens)
    watch.end("evaluate")
    report |= made_with(context, evaluate, **made) | objective.record()
    report["provenance"]["seconds"] = watch.seconds
    if output is not None:
        write(small, context, plan, output, report, force=force)
        clear_work(work_folder(output))
    return Compression(small.model if small.in_memory else None, plan, report)


def check(
    source: Any,
    output: str | Path | None,
    method: Method,
    calibration: str,
    evaluate: str | None,
    recover: str,
    *,
    stream: bool,
    force: bool,
) -> None:
    """Raise RapError for input that cannot work, before any weight is read."""
    if stream and output is None:
        raise RapError("--stream writes its result to files: give an output directory")
    check_recovery(recover, method.name, in_memory=not stream)
    if stream or recover.partition("+")[0] in ("fit", "closed-form"):
        check_layers(load_config(source) if isinstance(source, (str, Path)) else source.config)
    check_sources(calibration, evaluate)
    if output is not None:
        check_output(output, force=force)
        check_apart(output, source)


def check_placing(
    stream: bool,
    dtype: str | torch.dtype,
    device_map: str | None,
    statistics: str | Path | None,
    tokenizer: Any = None,
) -> None:
    """Raise RapError for settings that the other way of working, from files or not, never reads."""
    if stream and (dtype != "auto" or device_map is not None):
        raise RapError(
            "--stream keeps the stored data types and runs on --device; remove --dtype and "
            "--device-map"
        )
    if stream and tokenizer is not None:
        raise RapError("--stream reads the tokenizer of the checkpoint; remove tokenizer")
    if not stream and statistics is not None:
        raise RapError("--statistics requires --stream; add it, or remove --statistics")


def chosen(
    method: Method | str,
    instead: Method | None,
    retain: float,
    seed: int,
    defaults: Mapping[str, Any],
) -> tuple[Method, Method | None]:
    """The method, and what prunes instead where it finds no gradients; `defaults` of its text."""
    if not isinstance(method, str):
        return method, instead
    text = method
    instead = forward_only(lambda **more: parse_method(text, retain, seed=seed, **defaults, **more))
    return parse_method(text, retain, seed=seed, **defaults), instead


def opened(
    source: Any,
    tokenizer: Any,
    reading: CalibrationText,
    placed: tuple[str | torch.dtype, str, str | None],
    statistics: str | Path | None,
    output: str | Path | None,
    recover: str,
    stream: bool,
    progress: bool,
) -> DenseContext:
    """The dense model with what is read of it: in memory, `placed` so, or with `stream` in files.

    `placed` are dtype, device and device map. Statistics outlive a stopped run where it recovers or
    streams: what resumes must prune as it did, and GPUs vary.
    """
    dtype, device, device_map = placed
    keeps = output is not None and (stream or recover != "none")
    kept_in = work_folder(output) / STATISTICS_FOLDER if output is not None and keeps else None
    if not stream:
        return DenseContext.open(
            source,
            tokenizer,
            dtype=dtype,
            device=device,
            device_map=device_map,
            reading=reading,
            kept_in=kept_in,
            progress=progress,
        )
    given = Statistics.load(statistics) if statistics is not None else None
    return DenseContext.from_files(
        source, device=device, reading=reading, kept_in=kept_in, given=given, progress=progress
    )


def planned(context: DenseContext, method: Method) -> Plan:
    """The plan; without one, no statistics are kept for a run that resumes."""
    try:
        plan: Plan = context.plan(method)
        return plan
    except RapError:
        folder = context.kept_in
        if folder is not None and [*folder.parent.glob("*")] == [folder]:
            clear_work(folder.parent)
        raise
