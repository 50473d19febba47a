"""`compress`: every stage in order, over a model in memory or layer by layer from its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..calibration.bos import Bos
from ..calibration.held_out import HELD_OUT, split
from ..calibration.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from ..calibration.text import check_sources
from ..calibration.workbench import CalibrationText
from ..checkpoint.device import AUTO
from ..checkpoint.files import check_output
from ..checkpoint.source import check_apart
from ..methods import Method, parse_method
from ..planning.plan import Plan
from ..recovery.layer_fit import FitConfig
from ..recovery.stages import check_recovery
from .objective import forward_only
from .places import FromFiles, InMemory, Place
from .report import describe, held_out


@dataclass(frozen=True)
class Compression:
    """What `compress` returns: the pruned model, its plan, and JSON-able measurements.

    `model` is None where no model was in memory.
    """

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
    calibration: str | Path = "bundled",
    num_windows: int = CALIBRATION_WINDOWS,
    window: int = CALIBRATION_WINDOW,
    evaluate: str | Path | None = HELD_OUT,
    dtype: str | torch.dtype = "auto",
    device: str = AUTO,
    device_map: str | None = None,
    stream: bool = False,
    statistics: str | Path | None = None,
    recover: str = "none",
    fit: FitConfig | None = None,
    bos: Bos = "auto",
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> Compression:
    """Compress a model to `retain` of its KV cache.

    `source` is a live model with its `tokenizer`, or a checkpoint directory, hub name or `bundled`,
    which is loaded in `dtype` onto `device` (auto: the GPU if there is one), or over several by
    `device_map`. Writes the checkpoint to `output` if one is given,
    over another with `force`. `method` knows its own `retain`, or is the text of one,
    `name[:recipe][:setting=value]...`. `calibration` is a dataset of `load_windows`, of which
    `num_windows` samples of `window` tokens are drawn by `seed`, begun as `bos` says; `evaluate`
    names the evaluation dataset (by default a held-out split, `held_out.split`; None: no figures).
    `recover` is one of `recovery.stages.RECOVERIES`, with the settings `fit` of layer-wise
    distillation. With `stream` layers are read from files, one in memory at a time, and work in
    float32 on `device`: gradients come from a file of `statistics`, or the whole model if it fits,
    else `instead` prunes, by metric `output`. A killed run resumes, when repeated. RapError for
    input that cannot work, before the work it would waste.
    """
    calibration, evaluate = split(calibration, evaluate)
    method, instead = _chosen(method, instead, float(retain), seed)
    _check(source, output, method, calibration, evaluate, recover, force=force)
    reading = CalibrationText(calibration, int(num_windows), int(window), seed, bos)
    loading = {"device": device, "dtype": dtype, "device_map": device_map, "file": statistics}
    place: Place = (
        FromFiles(source, reading, method, instead, output, recover, fit, loading, progress)
        if stream
        else InMemory(source, tokenizer, reading, output, recover, fit, loading, progress)
    )
    tokens = held_out(evaluate, place.bench)
    method = place.announce(method, tokens)

    plan = place.plan(method)
    place.prune(plan)
    recovery = place.recover()
    report = describe(place.bench, method, plan) | place.measure(evaluate, tokens)
    report |= {"recovery": recovery, **place.record(evaluate)}
    if output is not None:
        place.save(plan, report, force=force)
    return Compression(place.model, plan, report)


def _check(
    source: Any,
    output: str | Path | None,
    method: Method,
    calibration: str,
    evaluate: str | None,
    recover: str,
    *,
    force: bool,
) -> None:
    check_recovery(recover, method.name)
    check_sources(calibration, evaluate)
    if output is not None:
        check_output(output, force=force)
        check_apart(output, source)


def _chosen(
    method: Method | str, instead: Method | None, retain: float, seed: int
) -> tuple[Method, Method | None]:
    """The method, and what prunes instead where it finds no gradients."""
    if not isinstance(method, str):
        return method, instead
    text = method
    instead = forward_only(lambda **more: parse_method(text, retain, seed=seed, **more))
    return parse_method(text, retain, seed=seed), instead
