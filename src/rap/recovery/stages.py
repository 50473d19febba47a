"""Stages after pruning, in order: a refit or layer-wise distillation, then distillation.

Shapes: N windows, T tokens of a window.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.files import whole_file
from ..data.bos import Bos, bos_token, describe_bos
from ..data.own import with_samples
from ..data.protocol import CALIBRATION_TOKENS
from ..data.text import fingerprint_windows, named_sources
from ..evaluation.quality.perplexity import perplexity
from ..model.errors import RapError
from ..model.layers import trained_length
from ..runtime.layerwise import answering, stand_alone
from ..runtime.sources import LayerSource, LoadedLayers, source_of
from .closed_form import refit_outputs
from .config import PRESETS, RecoveryConfig, recovery_config
from .data import apart, recovery_windows
from .fit import fit_layers
from .layer_fit import FitConfig
from .projections import SETTINGS, train_projections
from .runs import FIT_FOLDER, REFIT_FOLDER, begin, processes, take_from_main

RECOVERIES = (
    *("none", "closed-form", "fit", "projections"),
    *PRESETS,
    *(f"fit+{name}" for name in PRESETS),
)
FROM_FILES = ("none", "fit")  # what works layer by layer, without the models in memory
FIT_REPORTS = ("bos", "fit", "perplexity_before", "perplexity_fitted")
REFIT_TOKENS = CALIBRATION_TOKENS


def check_recovery(name: str, method: str | None = None, *, in_memory: bool = True) -> None:
    """Raise RapError for a name that is not in RECOVERIES, or does nothing for such a method.

    And for one that needs the model in memory, where it is not.
    """
    if name not in RECOVERIES:
        raise RapError(f"unknown recovery {name!r}: use one of {', '.join(RECOVERIES)}")
    if not in_memory and name not in FROM_FILES:
        raise RapError(
            f"recovery {name!r} needs the whole model in memory: --stream takes "
            f"{' or '.join(FROM_FILES)}; or recover the checkpoint it writes"
        )
    if name == "projections" and method not in (None, "matryoshka"):
        raise RapError(
            f"recovery 'projections' trains the bases of method matryoshka: {method} has none, use "
            "fit"
        )


def work_folder(output: str | Path) -> Path:
    """Where a run that will write `output` keeps its checkpoints: hidden, next to it."""
    path = Path(output).absolute()
    return path.with_name(f".{path.name}.recovery")


def recover(
    small: PreTrainedModel,
    teacher: PreTrainedModel,
    windows: Tensor,
    config: RecoveryConfig | FitConfig | str = "fit",
    *,
    validation: Tensor | None = None,
    work: Path | None = None,
    progress: bool = False,
) -> Any:
    """A recovered copy of `small`: layer-wise distillation on `windows` [N, T], or a preset.

    "fit" and a FitConfig distil layer by layer (`fit.fit_layers`, which reads no `validation`);
    everything else end to end (`distillation.distill`). Raises RapError as these do, and for an
    unknown preset.
    """
    if config == "fit":
        config = FitConfig()
    if isinstance(config, FitConfig):
        fitted = copy.deepcopy(small)
        fit_layers(fitted, teacher, windows, config, work=work, progress=progress)
        return fitted
    # Imported here: the trainer and peft take seconds, and only distillation needs them.
    from .distillation import distill

    distilled = distill(
        small,
        teacher,
        windows,
        recovery_config(config) if isinstance(config, str) else config,
        validation=validation,
        work=work,
        progress=progress,
    )
    return distilled.model


def recover_stage(
    small: Any,
    dense: Any,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    texts: Sequence[str] = ("bundled",),
    config: RecoveryConfig | FitConfig | None = None,
    fit: FitConfig | None = None,
    fitted: dict[str, Any] | None = None,
    samples: tuple[list[str], dict[str, Any]] | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    bos: Bos = "auto",
    progress: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """The best of: the pruned model, distilled layer by layer, and then distilled end to end.

    `name` is one of RECOVERIES: `none` does nothing, `closed-form` refits outputs, `fit` fits
    layers (see `fit.fit_layers`), `projections` trains the bases of a model of method
    matryoshka, which alone has some; a preset distils by it, after a refit if it says so, and after
    `fit+` fits and distils. `config` replaces the settings of the last of these, `fit` those of a
    fit; RapError for settings of a stage that `name` has not. With the report `fitted` of the `fit`
    on these texts that `small` came out of, only what follows it is done, and nothing is refitted.
    Better means a lower perplexity on held-out windows of `texts`,
    which begin with `bos`, see `data.recovery_windows`; no stage trains on them. `small` and
    `dense` are left untouched, and may be LayerSources: then the best is one, and of weights in
    files `name` is one of FROM_FILES. The report has the perplexity after each step and what
    distillation reports; it is empty for `none`.
    The source `own` is what `dense` wrote (`data.own`); `samples` is what `read_texts` gave, where
    that was another form of the model, before its weights were rounded.
    With an `output`, checkpoints go to its `work_folder`, from which a killed run continues.
    """
    sources = source_of(small), source_of(dense)
    check_recovery(name, in_memory=sources[0].in_memory)
    _check_settings(name, config, fit)
    if name == "none":
        return small, {}
    report: dict[str, Any] = {"name": name, "texts": list(texts)}
    read, drawn = samples or read_texts(texts, sources[1].model, tokenizer, progress=progress)
    report |= drawn
    run = _Run(*sources, tokenizer, read, seed, output, bos, progress, report)
    first, _, last = name.rpartition("+")
    if fitted is not None:
        run.go_on(fitted)
    elif (first or last) == "fit":
        run.fit(config if isinstance(config, FitConfig) else fit)
    changed = config if isinstance(config, RecoveryConfig) else None
    if last in PRESETS:
        run.distil(changed or recovery_config(last, seed=seed))
    elif last == "projections":
        run.train_bases(changed or replace(SETTINGS, seed=seed))
    elif last == "closed-form":
        run.refit(changed or recovery_config("fast", seed=seed))
    measured = (value for key, value in report.items() if key.startswith("perplexity_"))
    report["perplexity_after"] = min(measured)
    return run.small if small is sources[0] else run.small.model, report


def read_texts(
    texts: Sequence[str], dense: PreTrainedModel, tokenizer: Any, *, progress: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """The sources of all datasets, as `own.with_samples`; several processes draw samples once."""
    names = [name for text in texts for name in named_sources(text)]
    with processes().main_process_first():
        return with_samples(names, dense, tokenizer, progress=progress)


def _check_settings(name: str, config: Any, fit: FitConfig | None) -> None:
    """Raise RapError for settings of a stage that the recovery `name` does not have."""
    first, _, last = name.rpartition("+")
    own = FitConfig if last == "fit" else RecoveryConfig
    if config is not None and (name == "none" or not isinstance(config, own)):
        raise RapError(f"recovery {name!r} has no stage with a {type(config).__name__}")
    if fit is not None and "fit" not in (first, last):
        raise RapError(f"recovery {name!r} has no layer-wise distillation; remove its settings")


@dataclass
class _Run:
    """A recovery under way: the best model so far, and what the report says of it."""

    small: LayerSource
    dense: LayerSource
    tokenizer: PreTrainedTokenizerBase
    texts: Sequence[str]
    seed: int
    output: str | Path | None
    bos: Bos
    progress: bool
    report: dict[str, Any]
    validation: Tensor | None = None  # the same windows for every stage

    def windows(self, config: RecoveryConfig | FitConfig) -> Tensor:
        """Training windows [N, T]; the first stage to ask also measures the pruned model."""
        first = bos_token(self.bos, self.tokenizer, self.small.model.config)
        longest = trained_length(self.small.model.config)
        windows, validation = recovery_windows(
            self.texts, self.tokenizer, config, longest=longest, bos=first
        )
        if self.validation is not None:
            same = torch.equal(validation, self.validation)
            return windows if same else apart(windows, self.validation)
        self.validation = validation
        if "perplexity_before" not in self.report:
            before = self.held_out(self.small, "pruned")
            self.report |= {"bos": first, "perplexity_before": before}
        return windows

    def _fingerprint(self, windows: Tensor) -> str:
        """Of the training windows [N, T], and those held out."""
        assert self.validation is not None
        return fingerprint_windows(torch.cat([windows, self.validation]))

    def held_out(self, small: LayerSource, done: str) -> float:
        """Perplexity on the validation windows."""
        assert self.validation is not None
        ids, what, size = self.validation, f"{done} model", self.validation.shape[1]
        with answering(small, ids, what, folder=self.work, progress=self.progress) as model:
            return perplexity(model, ids.flatten(), window=size, bos=None).value

    @property
    def work(self) -> Path | None:
        """Where checkpoints go, if anywhere."""
        return work_folder(self.output) if self.output is not None else None

    def offer(self, small: LayerSource, done: str) -> None:
        """Go on with a model, the main process's, if it is better than the one there is."""
        if small.in_memory:
            take_from_main(small.model)
        best = min(value for key, value in self.report.items() if key.startswith("perplexity_"))
        self.report[f"perplexity_{done}"] = self.held_out(small, done)
        if self.report[f"perplexity_{done}"] < best:
            self.small = small

    def go_on(self, fitted: dict[str, Any]) -> None:
        """Take a fit for done, whose report is given: what it held out stays held out.

        Raises RapError if its windows began otherwise, for they would be others.
        """
        first = bos_token(self.bos, self.tokenizer, self.small.model.config)
        if fitted["bos"] != first:
            was, now = (describe_bos(token) for token in (fitted["bos"], first))
            raise RapError(
                f"the model was distilled on windows {was}, but these are {now}; keep the same bos"
            )
        self.report |= {key: fitted[key] for key in FIT_REPORTS}
        read = self._fingerprint(self.windows(FitConfig(**fitted["fit"]["config"])))
        if fitted["fit"].get("windows", read) != read:  # older reports do not say
            raise RapError(
                "the training text has changed since the layers were distilled, so that what was "
                "held out would be trained on; give the text of then, or another one, with --text"
            )

    def fit(self, config: FitConfig | None) -> None:
        """Fit every layer."""
        config = config or FitConfig(seed=self.seed)
        windows, fitted = self.windows(config), self.small.copy()
        work = self.work / FIT_FOLDER if self.work is not None else None
        layers = fit_layers(fitted, self.dense, windows, config, work=work, progress=self.progress)
        self.report["fit"] = {"config": asdict(config), "layers": [asdict(x) for x in layers]}
        self.report["fit"]["windows"] = self._fingerprint(windows)
        self.report["fit"] |= self._counts(windows, config.num_windows)
        self.offer(fitted, "fitted")

    def _counts(self, windows: Tensor, asked: int) -> dict[str, int]:
        """How many windows were read, and held out: of short data fewer than asked for."""
        assert self.validation is not None
        if len(windows) + len(self.validation) < asked and self.progress:
            Console(stderr=True).print(
                f"the training data have {len(windows)} of {asked} windows of "
                f"{windows.shape[1]} tokens, and {len(self.validation)} that are held out",
                soft_wrap=True,
            )
        return {"num_windows": len(windows), "num_held_out": len(self.validation)}

    def refit(self, config: RecoveryConfig) -> None:
        """Refit the outputs of every layer in closed form."""
        windows, refitted = self.windows(config), copy.deepcopy(self.small.model)
        count = max(2, REFIT_TOKENS // windows.shape[1])
        # Drawn, for windows of several texts come in turns: every fourth may be of one alone.
        drawn = torch.randperm(len(windows), generator=torch.Generator().manual_seed(self.seed))
        self._refit_kept(refitted, windows[drawn[:count].sort().values])
        self.offer(LoadedLayers(refitted), "refitted")

    def _refit_kept(self, model: PreTrainedModel, windows: Tensor) -> None:
        """Refit `model` in place, or as a killed run did: sums of another CPU or GPU may differ."""
        if self.work is None:
            refit_outputs(model, self.dense.model, windows, progress=self.progress)
            return
        folder, old = self.work / REFIT_FOLDER, self.small.model.state_dict()
        read = {"pruned": self.small.fingerprint, "dense": self.dense.fingerprint}
        with processes().main_process_first():
            begin(folder, {**read, "windows": fingerprint_windows(windows)})
        if (file := folder / "outputs.safetensors").is_file():
            model.load_state_dict(load_file(file), strict=False)
            return
        refit_outputs(model, self.dense.model, windows, progress=self.progress)
        if processes().is_main_process:
            new = model.state_dict().items()
            with whole_file(file) as partial:
                save_file({n: x.contiguous() for n, x in new if not x.equal(old[n])}, partial)

    def train_bases(self, config: RecoveryConfig) -> None:
        """Train the bases of a projected model."""
        windows, models = self.windows(config), (self.small.model, self.dense.model)
        trained = train_projections(*models, windows, config, progress=self.progress)
        self.offer(LoadedLayers(trained), "trained")

    def distil(self, config: RecoveryConfig) -> None:
        """Distil, after a refit if it is asked for, where nothing was fitted.

        Layers that hand values on cannot be worked on one by one, and are not refitted.
        """
        # Imported here: the trainer and peft take seconds, and only distillation needs them.
        from .distillation import distill

        if config.refit and "fit" not in self.report and stand_alone(self.dense.model.config):
            self.refit(config)
        distilled = distill(
            self.small.model,
            self.dense.model,
            self.windows(config),
            config,
            validation=self.validation,
            work=self.work,
            progress=self.progress,
        )
        self.small, self.report["distillation"] = LoadedLayers(distilled.model), distilled.report
        self.report["perplexity_distilled"] = distilled.report["perplexity_after"]
