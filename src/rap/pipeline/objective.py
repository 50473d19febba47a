"""What a streamed compression keeps small, and where the statistics for it come from.

Gradients of the loss take the whole model in memory. Where it fits, a streamed compression reads
them there and prunes as one in memory does; where it does not, by what forward passes say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..calibration.dense_context import DenseContext
from ..calibration.memory import estimate_layers, estimate_memory
from ..calibration.registry import backward_needs
from ..calibration.run import refuse_gradients
from ..checkpoint.device import say_device
from ..data.protocol import EVALUATION_WINDOWS
from ..evaluation.quality.perplexity import evaluation_window
from ..methods import Method
from ..model.errors import RapError
from ..recovery.fit import estimate_fit
from ..recovery.layer_fit import FitConfig
from ..runtime.memory import describe_memory, free_memory

# The best that needs no gradient of the loss, where nothing sets the metric.
WITHOUT_GRADIENTS = {"metric": "output"}
_REMEDY = "remove metric and score, set metric=output, or give --statistics"
MARGIN = 1.25  # an estimate that is too small ends a run


@dataclass(frozen=True)
class Objective:
    """The method that prunes, where its statistics are read, why, and what would change it.

    Nothing but the method of a model in memory, where there is no choice.
    """

    method: Method
    statistics: str = ""
    why: str = ""
    change: str = ""

    @property
    def metric(self) -> str | None:
        """`loss` or `output`; None of a method that reads no such setting."""
        read = self.method.needs & {"pairs", "values"}
        return getattr(self.method, "metric", None) if read else None

    def record(self) -> dict[str, Any]:
        """For a report and a model card, if there was a choice."""
        if not self.why:
            return {}
        about = {"metric": self.metric, "statistics": self.statistics, "why": self.why}
        return {"objective": about}

    def __str__(self) -> str:
        kept = f"metric '{self.metric}'" if self.metric else f"method {self.method.name}"
        change = f"; {self.change}" if self.change else ""
        return f"objective: {kept}, statistics {self.statistics}: {self.why}{change}"


def forward_only(build: Callable[..., Method]) -> Method | None:
    """What `build` makes with `WITHOUT_GRADIENTS` as defaults; None if it still needs gradients."""
    try:
        method = build(**WITHOUT_GRADIENTS)
    except RapError:  # nothing reads a metric
        return None
    return None if backward_needs(method.needs) else method


def choose(asked: Method, instead: Method | None, context: DenseContext) -> Objective:
    """The method `asked` where its statistics are given, need no gradients, or fit in memory.

    `instead` is taken where they do not, and without one CalibrationError says what there is to do.
    A run that goes on keeps to the statistics it has. Raises RapError for a method that
    evaluates the whole model.
    """
    asked.check_model(context.model)
    if context.stored is None:
        return Objective(asked)
    if asked.tries:
        raise RapError(
            f"method {asked.name} evaluates the whole model ({asked.tries}): remove --stream, "
            "or change that setting"
        )
    needs = asked.needs_for(context.model)
    if context.given is not None:
        context.given.require(needs, f"method {asked.name}")
        return Objective(asked, "from a file", "given with --statistics")
    if not backward_needs(needs):
        return Objective(asked, "layer by layer", "it needs no gradients of the loss")
    taken, free = in_memory(context, needs), free_memory(context.stored.device)
    room = f"{taken / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    kept = context.kept_needs()
    if taken <= free if kept is None else needs <= kept:
        why = f"gradients of the loss, as without --stream, fit with the whole model ({room})"
        change = "" if instead is None else "--metric output keeps to one layer in memory"
        return Objective(asked, "in memory", why, change)
    if instead is None:
        remedy = f"{_REMEDY}; the model does not fit ({room})"
        refuse_gradients(needs, f"method {asked.name}", remedy)
    why = f"metric 'loss', as without --stream, needs gradients, and they do not fit ({room})"
    change = "for 'loss' give --statistics of a machine that holds the model"
    return Objective(instead or asked, "layer by layer", why, change)


def announce(
    objective: Objective, context: DenseContext, tokens: Tensor | None, fit: FitConfig | None
) -> None:
    """Print what a compression from files keeps small, and its memory, weights included.

    `tokens` are those that it is measured on, `fit` the settings of the fit, if there are any.
    """
    if context.stored is None or not context.progress:
        return
    console = Console(stderr=True, markup=False, soft_wrap=True)
    console.print(str(objective))
    model = context.model
    needs, whole = objective.method.needs_for(model), objective.statistics == "in memory"
    parts, read = {}, context.reading
    if context.given is None:  # else nothing is calibrated, and the text need not even be there
        layers = estimate_layers(model, _sizes(read.num_windows, read.window), needs)["total"]
        parts["calibrating"] = in_memory(context, needs) if whole else layers
    if fit is not None:
        sizes = _sizes(fit.num_windows, fit.window)
        parts["fitting"] = sum(estimate_fit(model, model, sizes, fit).values())
    if tokens is not None:
        sizes = _sizes(EVALUATION_WINDOWS, evaluation_window(model, None))
        parts["measuring"] = estimate_layers(model, sizes, (), kept=2)["total"]
    how = "" if whole else "layer by layer "
    if parts:
        total = parts | {"total": max(parts.values())}
        console.print(describe_memory(total, f"{how}it takes at most about", "in all"))
    say_device(context.stored.device)


def _sizes(num_windows: int | None, window: int) -> Tensor:
    """As many windows, on the meta device: for estimates."""
    assert num_windows is not None
    return torch.empty(num_windows, window, dtype=torch.long, device="meta")


def in_memory(context: DenseContext, needs: frozenset[str]) -> int:
    """Bytes that gradients of the loss take in float32, with the weights as they are stored."""
    read = context.reading
    windows = _sizes(read.num_windows, read.window)
    weights = list(context.model.parameters())
    stored = sum(p.numel() * p.element_size() for p in weights)
    scale = torch.float32.itemsize / min(p.element_size() for p in weights)
    beside = estimate_memory(context.model, windows, needs)["total"]
    return int(MARGIN * (stored + scale * (stored + beside)))
