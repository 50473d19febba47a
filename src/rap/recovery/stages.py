"""Everything that may follow the cut, in order: the closed-form refit, then distillation.

Shapes: N windows, T tokens of a window.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.bos import Bos, bos_token
from ..evaluation.quality.perplexity import perplexity
from ..model.errors import RapError
from ..model.layers import trained_length
from .closed_form import refit_outputs
from .config import PRESETS, RecoveryConfig, preset
from .data import recovery_windows
from .projections import SETTINGS, train_projections

RECOVERIES = ("none", "closed-form", "projections", *PRESETS)
REFIT_TOKENS = 2**15  # as many as calibration sees by default


def check_recovery(name: str) -> None:
    """Raise RapError for a name that is not in RECOVERIES."""
    if name not in RECOVERIES:
        raise RapError(f"unknown recovery {name!r}: use one of {', '.join(RECOVERIES)}")


def work_folder(output: str | Path) -> Path:
    """Where a run that will write `output` keeps its checkpoints: hidden, beside it."""
    path = Path(output).absolute()
    return path.with_name(f".{path.name}.recovery")


def recover(
    small: PreTrainedModel,
    teacher: PreTrainedModel,
    windows: Tensor,
    config: RecoveryConfig | None = None,
    *,
    validation: Tensor | None = None,
    work: Path | None = None,
    progress: bool = False,
) -> Any:
    """The model that `distillation.distill` returns (which see), by default of preset `fast`."""
    # Imported here: the trainer and peft take seconds, and only distillation needs them.
    from .distillation import distill

    config = config or preset("fast")
    options: dict[str, Any] = {"validation": validation, "work": work, "progress": progress}
    return distill(small, teacher, windows, config, **options).model


def recover_stage(
    small: PreTrainedModel,
    dense: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    texts: Sequence[str] = ("bundled",),
    config: RecoveryConfig | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    bos: Bos = "auto",
    progress: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """The best of: the pruned model, with its outputs refitted, and distilled after that.

    `name` is one of RECOVERIES: `none` does nothing, `closed-form` only refits, `projections` only
    trains the bases of a model of method matryoshka, which alone has some, the others refit and
    distil by that preset, or by `config`. Better means a lower perplexity on held-out windows
    of `texts`, which begin with `bos`, see `data.recovery_windows`. `small` and `dense` are left
    untouched. The report has the perplexity after each step and what distillation reports; it is
    empty for `none`. With an `output`, checkpoints go to its `work_folder`, from which a killed run
    continues.
    """
    check_recovery(name)
    if name == "none":
        return small, {}
    if config is None:
        chosen = preset(name if name in PRESETS else "fast")
        config = replace(SETTINGS if name == "projections" else chosen, seed=seed)
    bos, longest = bos_token(bos, tokenizer, small.config), trained_length(small.config)
    windows, validation = recovery_windows(texts, tokenizer, config, longest=longest, bos=bos)
    before = _held_out(small, validation)
    report: dict[str, Any] = {"name": name, "texts": list(texts), "bos": bos}
    report["perplexity_before"] = before
    if name == "projections":
        trained = train_projections(small, dense, windows, config, progress=progress)
        report["perplexity_trained"] = _held_out(trained, validation)
        small = trained if report["perplexity_trained"] < before else small
    else:
        small, report["perplexity_refitted"] = _refit(
            small, dense, windows, validation, before, progress
        )
    if name in PRESETS:
        from .distillation import distill

        work = work_folder(output) if output is not None else None
        distilled = distill(
            small, dense, windows, config, validation=validation, work=work, progress=progress
        )
        small, report["distillation"] = distilled.model, distilled.report
        report["perplexity_distilled"] = distilled.report["perplexity_after"]
    report["perplexity_after"] = min(
        value for key, value in report.items() if key.startswith("perplexity_")
    )
    return small, report


def _refit(
    small: PreTrainedModel,
    dense: PreTrainedModel,
    windows: Tensor,
    validation: Tensor,
    before: float,
    progress: bool,
) -> tuple[Any, float]:
    """The refitted model if it is the better one, and the perplexity of the refitted one."""
    count = max(2, REFIT_TOKENS // windows.shape[1])
    refitted = copy.deepcopy(small)
    refit_outputs(refitted, dense, windows[:: max(1, len(windows) // count)], progress=progress)
    after = _held_out(refitted, validation)
    return (refitted if after < before else small), after


def _held_out(model: PreTrainedModel, validation_NT: Tensor) -> float:
    size = validation_NT.shape[1]
    return perplexity(model, validation_NT.flatten(), window=size, bos=None).value
