"""What a compression begins with: input that can work, the method, and the dense model."""

from pathlib import Path
from typing import Any

import torch

from ..calibration.dense_context import CalibrationText, DenseContext
from ..calibration.statistics import Statistics
from ..checkpoint.files import check_output
from ..checkpoint.source import check_apart
from ..data.text import check_sources
from ..methods import Method, parse_method
from ..model.errors import RapError
from ..planning.plan import Plan
from ..recovery.runs import STATISTICS_FOLDER, clear_work
from ..recovery.stages import check_recovery, work_folder
from .objective import forward_only


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
    check_sources(calibration, evaluate)
    if output is not None:
        check_output(output, force=force)
        check_apart(output, source)


def chosen(
    method: Method | str, instead: Method | None, retain: float, seed: int
) -> tuple[Method, Method | None]:
    """The method, and what prunes instead where it finds no gradients."""
    if not isinstance(method, str):
        return method, instead
    text = method
    instead = forward_only(lambda **more: parse_method(text, retain, seed=seed, **more))
    return parse_method(text, retain, seed=seed), instead


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
    """The plan; where there is none, statistics are not kept for a run that goes on."""
    try:
        plan: Plan = context.plan(method)
        return plan
    except RapError:
        folder = context.kept_in
        if folder is not None and [*folder.parent.glob("*")] == [folder]:
            clear_work(folder.parent)
        raise
