"""The whole story, one line per stage: checkpoint and ratio in, smaller checkpoint out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.bos import Bos
from ..calibration.held_out import HELD_OUT, split
from ..calibration.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from ..calibration.text import check_sources
from ..calibration.workbench import CalibrationText, Workbench
from ..checkpoint.device import AUTO
from ..checkpoint.files import check_output
from ..checkpoint.source import check_apart
from ..methods import Method, parse_method
from ..model.errors import RapError
from ..planning.plan import Plan
from ..recovery.runs import STATISTICS_FOLDER, clear_work
from ..recovery.stages import check_recovery, recover_stage, work_folder
from ..surgery.replace import Replacement
from .report import describe, held_out, made_with, measure_against, save


@dataclass(frozen=True)
class Compression:
    """What `compress` returns: the pruned model, its plan, and JSON-able measurements."""

    model: Any
    plan: Plan | Replacement
    report: dict[str, Any]


def compress(
    source: Any,
    retain: float = 0.7,
    output: str | Path | None = None,
    *,
    method: Method | str = "rap",
    tokenizer: Any = None,
    calibration: str | Path = "bundled",
    num_windows: int = CALIBRATION_WINDOWS,
    window: int = CALIBRATION_WINDOW,
    evaluate: str | Path | None = HELD_OUT,
    dtype: str | torch.dtype = "auto",
    device: str = AUTO,
    device_map: str | None = None,
    recover: str = "none",
    bos: Bos = "auto",
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> Compression:
    """Compress a model (or checkpoint directory, hub name, `bundled`) to `retain` of its KV cache.

    Calibrates, plans, cuts, recovers (`recover` is one of `recovery.stages.RECOVERIES`), measures
    perplexity, fidelity and footprint (on `evaluate`, by default a held-out split of the
    calibration data, see `held_out.split`; None skips it), and
    writes the checkpoint to `output` if one is given.

    `source` is any of those; a live model needs its `tokenizer`, anything else is loaded in `dtype`
    onto `device` (auto: the GPU if there is one, else the CPU), or one larger than a device by
    `device_map` as transformers does. `method` is a method, which knows its own `retain`, or
    the text of one, `name[:recipe][:setting=value]...`. `calibration` is a text that
    `load_windows` knows, of which `num_windows` windows of `window` tokens are read, drawn by
    `seed`. All windows of text begin as `bos.bos_token` decides.

    Raises a RapError for any input that cannot work, before the work it would waste.
    """
    # As reports are written: paths as text, numbers of NumPy as Python's.
    calibration, evaluate = split(calibration, evaluate)
    if isinstance(method, str):
        method = parse_method(method, float(retain), seed=seed)
    check_recovery(recover, method.name)
    check_sources(calibration, evaluate)
    if output is not None:
        check_output(output, force=force)
        check_apart(output, source)
    reading = CalibrationText(calibration, int(num_windows), int(window), seed, bos)
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map}
    loading |= {"kept_in": _kept_in(output, recover), "progress": progress}
    bench = Workbench.open(source, tokenizer, reading=reading, **loading)
    tokens = held_out(evaluate, bench)

    plan = _planned(bench, method)
    small, recovery = _recovered(method.apply(bench.model, plan), bench, recover, output)
    report = describe(bench, method, plan) | _measured(small, bench, evaluate, tokens)
    report |= {"recovery": recovery, "provenance": _made(bench, evaluate, dtype)}
    if output is not None:
        save(small, plan, output, bench.tokenizer, report=report, force=force)
        clear_work(work_folder(output))
    return Compression(small, plan, report)


def _kept_in(output: str | Path | None, recover: str) -> Path | None:
    """Where statistics outlive a stopped run: what goes on must cut as it did, and GPUs vary."""
    if output is None or recover == "none":
        return None
    return work_folder(output) / STATISTICS_FOLDER


def _planned(bench: Workbench, method: Method) -> Any:
    """What the method decides; where it cannot, statistics are not kept for a recovery."""
    try:
        return bench.plan(method)
    except RapError:
        folder = bench.kept_in
        if folder is not None and [*folder.parent.glob("*")] == [folder]:
            clear_work(folder.parent)
        raise


def _recovered(
    small: Any, bench: Workbench, recover: str, output: str | Path | None
) -> tuple[Any, dict[str, Any]]:
    """The cut model after its recovery on the text that was calibrated on, and the report of it."""
    return recover_stage(
        small,
        bench.model,
        bench.tokenizer,
        recover,
        texts=[bench.reading.text],
        seed=bench.reading.seed,
        output=output,
        bos=bench.bos,
        progress=bench.progress,
    )


def _made(bench: Workbench, evaluate: str | None, dtype: Any) -> dict[str, Any]:
    """What repeats the run."""
    return made_with(bench.reading, evaluate, dtype, device=str(bench.model.device))


def _measured(
    small: Any, bench: Workbench, evaluate: str | None, tokens: Tensor | None
) -> dict[str, dict[str, Any]]:
    """What a report says of the dense model and of the small one, on the held-out text if any."""
    return measure_against(
        bench.model,
        {"pruned": small},
        bench.tokenizer,
        evaluate,
        tokens=tokens,
        bos=bench.bos,
        progress=bench.progress,
    )
