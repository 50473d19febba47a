"""Where a compression works: beside a model in memory, or from files with one layer in memory.

Both offer the stages of `compress`. What differs is where weights are; the mathematics is shared.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor

from ..calibration.bos import check_bos
from ..calibration.memory import describe_memory, estimate_layers
from ..calibration.own import refuse_samples
from ..calibration.protocol import EVALUATION_WINDOWS
from ..calibration.sources import StoredLayers
from ..calibration.statistics import Statistics
from ..calibration.streamed import StreamedBench
from ..calibration.text import named_sources
from ..calibration.workbench import CalibrationText, Workbench
from ..checkpoint.card import unmeasured
from ..checkpoint.device import say_device, working_device
from ..checkpoint.load import load_tokenizer
from ..checkpoint.source import resolve_source
from ..checkpoint.stored import StoredModel
from ..evaluation.quality.perplexity import evaluation_window
from ..evaluation.quality.streamed import streamed_fidelity
from ..methods import Method
from ..model.errors import RapError
from ..planning.plan import Plan
from ..recovery.fit import estimate_fit
from ..recovery.layer_fit import FitConfig
from ..recovery.runs import STATISTICS_FOLDER, clear_work
from ..recovery.stages import recover_stage, work_folder
from ..recovery.streamed import StreamedStage
from ..surgery.apply import apply
from ..surgery.weights import PrunedWeights
from ..surgery.write import apply_streamed
from .objective import choose, in_memory
from .report import fitting_window, made_with, measure_against, quality, save


class Place(Protocol):
    """The stages of `compress`, in their order; `bench` is the dense model with what it reads.

    `model` is the pruned model, None where it is not in memory.
    """

    @property
    def bench(self) -> Workbench: ...
    @property
    def model(self) -> Any: ...

    def announce(self, method: Method, tokens: Tensor | None) -> Method:
        """The method that prunes here; what the run takes is printed if progress is shown."""
        ...

    def plan(self, method: Method) -> Plan:
        """What the method decides, from statistics that are kept for a run that resumes."""
        ...

    def prune(self, plan: Plan) -> None:
        """Make the pruned model."""
        ...

    def recover(self) -> dict[str, Any]:
        """Replace the pruned model by a better one; the report of it."""
        ...

    def measure(self, evaluate: str | None, tokens: Tensor | None) -> dict[str, dict[str, Any]]:
        """What a report says of both models, on the evaluation dataset if any."""
        ...

    def record(self, evaluate: str | None) -> dict[str, Any]:
        """How the run is repeated."""
        ...

    def save(self, plan: Plan, report: dict[str, Any], *, force: bool) -> None:
        """Write the checkpoint whole or not at all, and clear what the run kept."""
        ...


class InMemory:
    """A loaded model, and the pruned one beside it."""

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        reading: CalibrationText,
        output: str | Path | None,
        recover: str,
        fit: FitConfig | None,
        loading: dict[str, Any],
        progress: bool,
    ):
        self.output, self.recovery, self.fit, self.loading = output, recover, fit, loading
        # Statistics outlive a stopped run: what resumes must prune as it did, and GPUs vary.
        kept = output is not None and recover != "none"
        self.bench = Workbench.open(
            source,
            tokenizer,
            dtype=loading["dtype"],
            device=loading["device"],
            device_map=loading["device_map"],
            reading=reading,
            kept_in=work_folder(output) / STATISTICS_FOLDER if output and kept else None,
            progress=progress,
        )
        self.model: Any = None

    def announce(self, method: Method, tokens: Tensor | None) -> Method:
        """The same; calibration prints what it takes."""
        return method

    def plan(self, method: Method) -> Plan:
        """As of every place; where there is no plan, statistics are not kept for a recovery."""
        try:
            return self.bench.plan(method)
        except RapError:
            folder = self.bench.kept_in
            if folder is not None and [*folder.parent.glob("*")] == [folder]:
                clear_work(folder.parent)
            raise

    def prune(self, plan: Plan) -> None:
        """As of every place."""
        self.model = apply(self.bench.model, plan)

    def recover(self) -> dict[str, Any]:
        """As of every place, on the data that was calibrated on."""
        bench = self.bench
        self.model, report = recover_stage(
            self.model,
            bench.model,
            bench.tokenizer,
            self.recovery,
            texts=[bench.reading.text],
            fit=self.fit,
            seed=bench.reading.seed,
            output=self.output,
            bos=bench.bos,
            progress=bench.progress,
        )
        return report

    def measure(self, evaluate: str | None, tokens: Tensor | None) -> dict[str, dict[str, Any]]:
        """As of every place."""
        bench, models = self.bench, {"pruned": self.model}
        how: dict[str, Any] = {"tokens": tokens, "bos": bench.bos, "progress": bench.progress}
        return measure_against(bench.model, models, bench.tokenizer, evaluate, **how)

    def record(self, evaluate: str | None) -> dict[str, Any]:
        """As of every place."""
        device, dtype = str(self.bench.model.device), self.loading["dtype"]
        return {"provenance": made_with(self.bench.reading, evaluate, dtype, device=device)}

    def save(self, plan: Plan, report: dict[str, Any], *, force: bool) -> None:
        """As of every place."""
        assert self.output is not None
        save(self.model, plan, self.output, self.bench.tokenizer, report=report, force=force)
        clear_work(work_folder(self.output))


class FromFiles:
    """A checkpoint on disk, and the pruned one that is written: every pass reads layer by layer."""

    def __init__(
        self,
        source: str | Path,
        reading: CalibrationText,
        method: Method,
        instead: Method | None,
        output: str | Path | None,
        recover: str,
        fit: FitConfig | None,
        loading: dict[str, Any],
        progress: bool,
    ):
        if output is None:
            raise RapError("--stream writes its result to files: give an output directory")
        refuse_samples(named_sources(reading.text), "which --stream does not hold")
        device = str(working_device(loading["device"]))
        self.output, self.device, self.file = output, device, loading["file"]
        self.work, self.model = work_folder(output), None
        self.stage = StreamedStage(
            recover,
            self.work,
            reading.text,
            config=fit,
            seed=reading.seed,
            bos=reading.bos,
            device=device,
            progress=progress,
        )
        check_bos(reading.bos)
        self.stored = StoredModel(resolve_source(source))
        stored = self.stored
        method.check_model(stored.model)
        given = Statistics.load(self.file) if self.file is not None else None
        self.bench = StreamedBench(
            stored.model,
            load_tokenizer(stored.folder),
            str(source),
            reading,
            self.work / STATISTICS_FOLDER,
            progress,
            layers=StoredLayers(stored, device),
            folder=stored.folder,
            given=given,
        )
        self.objective = choose(method, instead, self.bench, given)
        self.small: PrunedWeights | None = None

    def announce(self, method: Method, tokens: Tensor | None) -> Method:
        """That of the objective; what it keeps small, and the memory it takes, weights included."""
        method = self.objective.method
        if not self.bench.progress:
            return method
        console = Console(stderr=True, markup=False, soft_wrap=True)
        console.print(str(self.objective))
        model, stage = self.bench.model, self.stage
        needs, whole = method.needs_for(model), self.objective.statistics == "in memory"
        parts = {"calibrating": estimate_layers(model, self.bench.windows, needs)["total"]}
        if whole:
            parts["calibrating"] = in_memory(self.bench, needs)
        if stage.name == "fit":
            estimate = estimate_fit(model, model, stage.sizes, stage.settings)
            parts["fitting"] = sum(estimate.values())
        if tokens is not None:
            shape = EVALUATION_WINDOWS, evaluation_window(model, None)
            windows = torch.empty(shape, dtype=torch.long, device="meta")
            parts["measuring"] = estimate_layers(model, windows, (), kept=2)["total"]
        total = parts | {"total": max(parts.values())}
        how = "" if whole else "layer by layer "
        console.print(describe_memory(total, f"{how}it takes at most about", "in all"))
        say_device(self.bench.layers.device)
        return method

    def plan(self, method: Method) -> Plan:
        """As of every place."""
        return self.bench.plan(method)

    def prune(self, plan: Plan) -> None:
        """Nothing is made yet: weights are pruned when they are read."""
        self.small = PrunedWeights(self.stored, plan)

    def recover(self) -> dict[str, Any]:
        """As of every place."""
        assert self.small is not None
        self.small, report = self.stage.run(self.small, self.bench.tokenizer)
        return report

    def measure(self, evaluate: str | None, tokens: Tensor | None) -> dict[str, dict[str, Any]]:
        """Sizes by what tensors say, without loading any; figures layer by layer."""
        small, stored, bench = self.small, self.stored, self.bench
        assert small is not None
        found = unmeasured(small.plan, stored.name, stored.model, small.model)
        report = {name: found[name] for name in ("dense", "pruned")}
        report["dense"]["fingerprint"] = stored.fingerprint
        if tokens is None or evaluate is None:
            return report
        compared = streamed_fidelity(
            StoredLayers(small, bench.layers.device),
            bench.layers,
            tokens,
            window=fitting_window(bench.model, tokens, bench.bos),
            max_windows=EVALUATION_WINDOWS,
            bos=bench.bos,
            folder=bench.kept_in,
            progress=bench.progress,
        )
        report["dense"] |= quality(evaluate, compared.dense_perplexity)
        report["pruned"] |= quality(evaluate, compared.perplexity) | compared.figures()
        return report

    def record(self, evaluate: str | None) -> dict[str, Any]:
        """As of every place; with statistics of a file also what was read for those."""
        read, given = self.bench.reading, self.bench.given
        objective = self.objective.record()
        if given is None:
            made = made_with(read, evaluate, "auto", device=self.device)
            return {"objective": objective, "provenance": made}
        read = replace(read, num_windows=given.num_windows, window=given.window)
        text = f"{read.num_windows} windows of {read.window} tokens, from a file of statistics"
        made = made_with(read, evaluate, "auto", device=self.device, statistics=str(self.file))
        return {"objective": objective, "calibration": text, "provenance": made}

    def save(self, plan: Plan, report: dict[str, Any], *, force: bool) -> None:
        """As of every place, tensor by tensor."""
        assert self.small is not None
        apply_streamed(
            self.stored,
            plan,
            self.output,
            changed=self.small.changed,
            report=report,
            force=force,
            progress=self.bench.progress,
        )
        clear_work(self.work)
