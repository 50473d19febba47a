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
from ..calibration.streamed import StreamedBench, refuse_gradients
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
from .report import EVALUATION_WINDOWS, describe, held_out, made_with, quality

# What --stream takes where nothing is said: the best that needs no gradient of the loss.
WITHOUT_GRADIENTS = {"metric": "output"}
_REMEDY = "leave metric and score out, say metric=output, or give --statistics"


def compress_streamed(
    source: str | Path,
    retain: float,
    output: str | Path,
    *,
    method: Method | str = "rap",
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

    Layers work in float32 on `device`. Statistics come from forward passes, so a method that needs
    gradients of the loss takes a file of `statistics` instead; where the text of a method does not
    set its metric, it is `output`. `recover` is `none` or `fit`, with the settings `fit`. A killed
    run goes on, when it is repeated, after the statistics or after the last fitted layer. Raises a
    RapError for any input that cannot work, before the work it would waste.
    """
    calibration, evaluate = str(calibration), None if evaluate is None else str(evaluate)
    work = work_folder(output)
    stage = StreamedStage(
        recover, work, calibration, config=fit, seed=seed, bos=bos, device=device, progress=progress
    )
    chosen = _method(method, retain, statistics, seed)
    check_output(output, force=force)
    check_apart(output, source)
    check_bos(bos)
    check_device(device)
    check_sources(calibration, evaluate)
    refuse_samples(named_sources(calibration), "which --stream does not hold")
    stored = StoredModel(resolve_source(source))
    given = _given(chosen, stored, statistics)
    reading = CalibrationText(calibration, num_windows, window, seed, bos)
    bench = _bench(stored, str(source), reading, work / STATISTICS_FOLDER, device, progress)
    tokens = held_out(evaluate, bench)

    if progress:
        _say(bench, chosen, stage, tokens is not None)
    found = given or bench.statistics(chosen.needs_for(stored.model))
    plan = plan_stored(chosen, bench.layers, found)
    small, recovery = stage.run(stored, plan, bench.tokenizer)
    report = describe(bench, chosen, plan) | _sizes(stored, small, chosen)
    if tokens is not None:
        _measure(report, small, bench, str(evaluate), tokens)
    report["recovery"] = recovery
    report |= _record(reading, evaluate, device, given, statistics)
    apply_streamed(
        stored, plan, output, changed=small.changed, report=report, force=force, progress=progress
    )
    clear_work(work)
    return report


def _method(
    method: Method | str, retain: float, statistics: str | Path | None, seed: int
) -> PairPruning:
    """One that cuts weights; its text leaves the metric to `WITHOUT_GRADIENTS`."""
    if isinstance(method, str):
        shared: dict[str, Any] = {} if statistics is not None else WITHOUT_GRADIENTS
        method = parse_method(method, retain, seed=seed, **shared)
    return check_streams(method)


def _bench(
    stored: StoredModel,
    name: str,
    reading: CalibrationText,
    kept_in: Path,
    device: str,
    progress: bool,
) -> StreamedBench:
    tokenizer, layers = load_tokenizer(stored.folder), StoredLayers(stored, device)
    return StreamedBench(stored.model, tokenizer, name, reading, kept_in, progress, layers=layers)


def _given(method: PairPruning, stored: StoredModel, file: str | Path | None) -> Statistics | None:
    """The statistics of the file; without one RapError for a method that needs gradients.

    RapError too for a budget that the layers cannot keep.
    """
    method.check_shapes([layer.shape for layer in attention_layers(stored.model)])
    needs, what = method.needs_for(stored.model), f"method {method.name}"
    if file is None:
        refuse_gradients(needs, what, _REMEDY)
        return None
    found = Statistics.load(file)
    found.require(needs, what)
    return found


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


def _say(bench: StreamedBench, method: PairPruning, stage: StreamedStage, measured: bool) -> None:
    """What is cut by, and how much memory it takes, weights included."""
    console = Console(stderr=True, markup=False, soft_wrap=True)
    if getattr(method, "metric", "") == "output":
        console.print(
            f"method {method.name} cuts by metric 'output' here, which needs no gradients of the "
            "loss"
        )
    needs = method.needs_for(bench.model)
    parts = {"calibrating": estimate_layers(bench.model, bench.windows, needs)["total"]}
    if stage.name == "fit":
        models = bench.model, bench.model
        parts["fitting"] = sum(estimate_fit(*models, stage.sizes, stage.settings).values())
    if measured:
        shape = EVALUATION_WINDOWS, evaluation_window(bench.model, None)
        windows = torch.empty(shape, dtype=torch.long, device="meta")
        parts["measuring"] = estimate_layers(bench.model, windows, (), kept=2)["total"]
    estimate = parts | {"total": max(parts.values())}
    console.print(describe_memory(estimate, "layer by layer it takes at most about", "in all"))


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
