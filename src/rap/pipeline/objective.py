"""What a streamed compression keeps small, and where the statistics for it come from.

Gradients of the loss take the whole model in memory. Where it fits, a streamed compression reads
them there and prunes as one in memory does; where it does not, by what forward passes say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..calibration.memory import estimate_memory, free_memory
from ..calibration.registry import backward_needs
from ..calibration.statistics import Statistics
from ..calibration.streamed import StreamedBench, refuse_gradients
from ..methods import Method
from ..model.errors import RapError

# The best that needs no gradient of the loss, where nothing sets the metric.
WITHOUT_GRADIENTS = {"metric": "output"}
_REMEDY = "leave metric and score out, say metric=output, or give --statistics"
MARGIN = 1.25  # an estimate that is too small ends a run


@dataclass(frozen=True)
class Objective:
    """The method that prunes, where its statistics are read, why, and what would change it."""

    method: Method
    statistics: str
    why: str
    change: str = ""

    @property
    def metric(self) -> str | None:
        """`loss` or `output`; None of a method that reads no such setting."""
        read = self.method.needs & {"pairs", "values"}
        return getattr(self.method, "metric", None) if read else None

    def record(self) -> dict[str, Any]:
        """For a report and a model card."""
        return {"metric": self.metric, "statistics": self.statistics, "why": self.why}

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


def choose(
    asked: Method, instead: Method | None, bench: StreamedBench, given: Statistics | None
) -> Objective:
    """The method `asked` where its statistics are `given`, need no gradients, or fit in memory.

    `instead` is taken where they do not, and without one CalibrationError says what there is to do.
    A run that goes on keeps to the statistics it has. Raises RapError for a budget that would try
    cuts on the whole model.
    """
    if getattr(asked, "budget", "") == "search":
        raise RapError(
            "budget 'search' tries cuts on the whole model: leave --stream out, or use budget "
            "'error'"
        )
    needs = asked.needs_for(bench.model)
    if given is not None:
        given.require(needs, f"method {asked.name}")
        return Objective(asked, "from a file", "given with --statistics")
    if not backward_needs(needs):
        return Objective(asked, "layer by layer", "it needs no gradients of the loss")
    taken, free = in_memory(bench, needs), free_memory(bench.layers.device)
    room = f"{taken / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    kept = bench.kept_needs()
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


def in_memory(bench: StreamedBench, needs: frozenset[str]) -> int:
    """Bytes that gradients of the loss take in float32, with the weights as they are stored."""
    read = bench.reading
    windows = torch.empty(read.num_windows, read.window, dtype=torch.long, device="meta")
    weights = list(bench.model.parameters())
    stored = sum(p.numel() * p.element_size() for p in weights)
    scale = torch.float32.itemsize / min(p.element_size() for p in weights)
    beside = estimate_memory(bench.model, windows, needs)["total"]
    return int(MARGIN * (stored + scale * (stored + beside)))
