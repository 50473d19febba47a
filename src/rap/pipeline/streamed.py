"""The whole story for a checkpoint that does not fit into memory, with one layer there at a time.

Every pass reads the layers from their files in order, and carries the text through them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..calibration.bos import Bos, check_bos
from ..calibration.memory import describe_memory, estimate_layers
from ..calibration.own import refuse_samples
from ..calibration.sources import StoredLayers
from ..calibration.statistics import Statistics
from ..calibration.streamed import StreamedBench
from ..calibration.text import check_sources, named_sources
from ..calibration.workbench import CalibrationText
from ..checkpoint.card import unmeasured
from ..checkpoint.files import check_output
from ..checkpoint.load import check_device, load_tokenizer
from ..checkpoint.source import check_apart, resolve_source
from ..checkpoint.stored import StoredModel
from ..evaluation.quality.perplexity import evaluation_window
from ..evaluation.quality.streamed import streamed_fidelity
from ..methods import Method, parse_method
from ..methods.base import PairPruning, traits
from ..methods.stored import check_streams, plan_stored
from ..model.layers import attention_layers
from ..recovery.fit import estimate_fit
from ..recovery.layer_fit import FitConfig
from ..recovery.runs import STATISTICS_FOLDER, clear_work
from ..recovery.stages import work_folder
from ..recovery.streamed import StreamedStage
from ..surgery.cut_model import CutModel
from ..surgery.stream import apply_streamed
from .objective import Objective, choose, forward_only, in_memory
from .report import EVALUATION_WINDOWS, describe, held_out, made_with, quality


def compress_streamed(
    source: str | Path,
    retain: float,
    output: str | Path,
    *,
    method: Method | str = "rap",
    instead: Method | None = None,
    statistics: str | Path | None = None,
    calibration: str | Path = "bundled",
    num_windows: int = 32,
    window: int = 1024,
    evaluate: str | Path | None = "bundled",
    device: str = "cpu",
    recover: str = "none",
    fit: FitConfig | None = None,
    bos: Bos = "auto",
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """`pipeline.compress` of a checkpoint with one layer in memory at a time; its report.

    Layers work in float32 on `device`. A method that needs gradients of the loss takes a file of
    `statistics`, or reads them with the whole model in memory if it fits there (`objective`); else
    the method `instead` prunes, of a text the same with the metric `output` unless it sets one, and
    the report says which it was. `recover` is `none` or `fit`, with the settings `fit`. A killed
    run goes on, when it is repeated, after the statistics or after the last fitted layer. Raises a
    RapError for any input that cannot work, before the work it would waste.
    """
    calibration, evaluate = str(calibration), None if evaluate is None else str(evaluate)
    work = work_folder(output)
    stage = StreamedStage(
        recover, work, calibration, config=fit, seed=seed, bos=bos, device=device, progress=progress
    )
    asked, instead = _methods(method, instead, retain, seed)
    check_output(output, force=force)
    check_apart(output, source)
    _check_reading(calibration, evaluate, bos, device)
    stored = StoredModel(resolve_source(source))
    asked.check_shapes([layer.shape for layer in attention_layers(stored.model)])
    given = Statistics.load(statistics) if statistics is not None else None
    reading = CalibrationText(calibration, num_windows, window, seed, bos)
    bench = _bench(stored, str(source), reading, work / STATISTICS_FOLDER, device, progress)
    objective = choose(asked, instead, bench, given)
    chosen, tokens = objective.method, held_out(evaluate, bench)
    if progress:
        _say(bench, objective, stage, tokens is not None)
    found = given or bench.statistics(chosen.needs_for(stored.model))
    plan = plan_stored(chosen, bench.layers, found)
    small, recovery = stage.run(stored, plan, bench.tokenizer)
    report = describe(bench, chosen, plan) | _sizes(stored, small, chosen)
    if tokens is not None:
        _measure(report, small, bench, str(evaluate), tokens)
    report |= {"recovery": recovery, "objective": objective.record()}
    report |= _record(reading, evaluate, device, given, statistics)
    apply_streamed(
        stored, plan, output, changed=small.changed, report=report, force=force, progress=progress
    )
    clear_work(work)
    return report


def _check_reading(calibration: str, evaluate: str | None, bos: Bos, device: str) -> None:
    """Raise RapError for what cannot be read so, or where the layers cannot work."""
    check_bos(bos)
    check_device(device)
    check_sources(calibration, evaluate)
    refuse_samples(named_sources(calibration), "which --stream does not hold")


def _methods(
    method: Method | str, instead: Method | None, retain: float, seed: int
) -> tuple[PairPruning, Method | None]:
    """The method, which must cut weights, and what to do instead where it finds no gradients."""
    if isinstance(method, str):
        text = method
        method = parse_method(text, retain, seed=seed)
        instead = forward_only(lambda **more: parse_method(text, retain, seed=seed, **more))
    return check_streams(method), instead


def _bench(
    stored: StoredModel,
    name: str,
    reading: CalibrationText,
    kept_in: Path,
    device: str,
    progress: bool,
) -> StreamedBench:
    tokenizer, layers = load_tokenizer(stored.folder), StoredLayers(stored, device)
    about = stored.model, tokenizer, name, reading, kept_in, progress
    return StreamedBench(*about, layers=layers, folder=stored.folder)


def _record(
    reading: CalibrationText,
    evaluate: str | None,
    device: str,
    given: Statistics | None,
    file: str | Path | None,
) -> dict[str, Any]:
    """How the run is repeated; with statistics of a file also what was read for those."""
    if given is None:
        return {"provenance": made_with(reading, evaluate, "auto", device=device)}
    read = replace(reading, num_windows=given.num_windows, window=given.window)
    text = f"{read.num_windows} windows of {read.window} tokens, from a file of statistics"
    made = made_with(read, evaluate, "auto", device=device, statistics=str(file))
    return {"calibration": text, "provenance": made}


def _say(bench: StreamedBench, objective: Objective, stage: StreamedStage, measured: bool) -> None:
    """What is kept small, and how much memory it takes, weights included."""
    console = Console(stderr=True, markup=False, soft_wrap=True)
    console.print(str(objective))
    needs = objective.method.needs_for(bench.model)
    parts = {"calibrating": estimate_layers(bench.model, bench.windows, needs)["total"]}
    if objective.statistics == "in memory":
        parts["calibrating"] = in_memory(bench, needs)
    if stage.name == "fit":
        models = bench.model, bench.model
        parts["fitting"] = sum(estimate_fit(*models, stage.sizes, stage.settings).values())
    if measured:
        shape = EVALUATION_WINDOWS, evaluation_window(bench.model, None)
        windows = torch.empty(shape, dtype=torch.long, device="meta")
        parts["measuring"] = estimate_layers(bench.model, windows, (), kept=2)["total"]
    estimate = parts | {"total": max(parts.values())}
    how = "" if objective.statistics == "in memory" else "layer by layer "
    console.print(describe_memory(estimate, f"{how}it takes at most about", "in all"))


def _sizes(stored: StoredModel, small: CutModel, method: PairPruning) -> dict[str, Any]:
    """What tensors say of both models, without loading any."""
    found = unmeasured(small.plan, stored.name, stored.model, small.model, traits(method))
    found["dense"]["fingerprint"] = stored.fingerprint
    return {name: found[name] for name in ("dense", "pruned")}


def _measure(
    report: dict[str, Any], small: CutModel, bench: StreamedBench, text: str, tokens: Tensor
) -> None:
    """Add perplexities, and how near the dense model is, to the report."""
    compared = streamed_fidelity(
        StoredLayers(small, bench.layers.device),
        bench.layers,
        tokens,
        max_windows=EVALUATION_WINDOWS,
        bos=bench.bos,
        folder=bench.kept_in,
        progress=bench.progress,
    )
    report["dense"] |= quality(text, compared.dense_perplexity)
    report["pruned"] |= quality(text, compared.perplexity) | compared.figures()
