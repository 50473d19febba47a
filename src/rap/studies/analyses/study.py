"""What every analysis starts from, and what it is: data, a table and a figure.

Beside it what several of them draw or compare alike: the dense model's line, a curve a group, and
how alike two orderings are.

Shapes: N items that are ordered, leading dimensions are batches.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from ...calibration.dense_context import DenseContext
from ...calibration.statistics import Statistics
from ...data.bos import describe_bos
from ...data.protocol import EVALUATION_WINDOWS
from ...evaluation.quality.perplexity import evaluation_window, perplexity
from ...methods import Method, Rap

RETAINS = (0.9, 0.8, 0.7, 0.6, 0.5)

Data = dict[str, Any]


@dataclass(eq=False)
class Study:
    """A dense model in its context, and held-out tokens [N] for evaluation.

    Perplexity is over the first `num_windows` windows of `window` tokens (None: 2,048, or the
    context length if that is less).
    """

    context: DenseContext
    tokens_N: Tensor
    window: int | None = None
    num_windows: int = EVALUATION_WINDOWS

    def __post_init__(self) -> None:
        self.window = evaluation_window(self.model, self.window)

    @property
    def model(self) -> Any:
        """The dense model."""
        return self.context.model

    def on(self, model: PreTrainedModel) -> "Study":
        """The same study of another model with the same tokenizer."""
        return replace(self, context=self.context.on(model))

    def statistics(self, needs: Collection[str]) -> Statistics:
        """Statistics of the model that cover `needs`; collected once, more only when asked."""
        return self.context.statistics(needs)

    def plan(self, method: Method) -> Any:
        """The plan of a method for this model."""
        return self.context.plan(method)

    def perplexity(self, model: PreTrainedModel) -> float:
        """Of any model, on the held-out text."""
        sizes: dict[str, Any] = {"window": self.window, "max_windows": self.num_windows}
        return perplexity(model, self.tokens_N, **sizes, bos=self.context.bos).value

    def after(self, method: Method, plan: Any = None) -> float:
        """Perplexity of the model pruned by `method`, by a separate plan unless one is given."""
        return self.perplexity(method.apply(self.model, plan or self.plan(method)))

    def _read(self) -> int:
        """How many windows the text has, of those that are asked for."""
        assert self.window is not None
        size = self.window if self.context.bos is None else self.window - 1
        return min(self.num_windows, len(self.tokens_N) // size)

    @property
    def note(self) -> str:
        """How perplexity was measured, for the note of a table."""
        bos, (count, length) = self.context.bos, self.context.windows.shape
        begins = f", {describe_bos(bos)}" if bos is not None else ""
        return (
            f"Perplexity over {self._read()} windows of {self.window} tokens{begins}, "
            f"no training; calibrated on {count} windows of {length}."
        )


@dataclass(frozen=True)
class Analysis:
    """One question asked of a model.

    measure: the numbers, JSON-able and not rounded. table: title, note, header and rows made of
    them. draw: the figure, on axes that it labels itself.
    """

    name: str
    question: str
    measure: Callable[[Study], Data]
    table: Callable[[Data], Data]
    draw: Callable[[Data, Axes], None]


def paper_cut(retain: float, **settings: Any) -> Rap:
    """The paper's method in all layers, by one pair, so that ratios are met as nearly as can be."""
    return Rap.paper(**{"retain": retain, "align": 2, "layers": "all"} | settings)


def figure_of(analysis: Analysis, data: Data) -> Figure:
    """The figure of an analysis, drawn from its data alone."""
    # A Figure of its own, not pyplot: no global state, no display.
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    analysis.draw(data, axes)
    axes.set_title(analysis.table(data)["title"], fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    return figure


def percent(share: float) -> str:
    """A share as text, one digit behind the point."""
    return f"{share:.1%}"


def dense_line(axes: Axes, value: float) -> None:
    """The dense model's figure, dashed across."""
    axes.axhline(value, color="0.6", linestyle="--", linewidth=1, label="dense")


def curve_a_group(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    *,
    by: str,
    x: str,
    y: str,
    label: Callable[[Any], str],
) -> None:
    """Field `y` of rows against field `x`, a curve for each value of field `by`."""
    for group in dict.fromkeys(row[by] for row in rows):
        own = [row for row in rows if row[by] == group]
        axes.plot([row[x] for row in own], [row[y] for row in own], "o-", label=label(group))


def ranks(values_N: Tensor) -> Tensor:
    """Average ranks along the last dimension, equal values sharing the mean of theirs."""
    below = (values_N[..., None, :] < values_N[..., :, None]).sum(-1)
    same = (values_N[..., None, :] == values_N[..., :, None]).sum(-1)
    return below.double() + (same.double() - 1) / 2


def spearman(first_N: Tensor, second_N: Tensor) -> Tensor:
    """Spearman's rank correlation along the last dimension; 0 where all values are equal."""
    first, second = ranks(first_N), ranks(second_N)
    first, second = first - first.mean(-1, keepdim=True), second - second.mean(-1, keepdim=True)
    size = (first.square().sum(-1) * second.square().sum(-1)).sqrt()
    return (first * second).sum(-1) / torch.where(size > 0, size, 1.0)


def overlap(first_GN: Tensor, second_GN: Tensor, count: int) -> Tensor:
    """Share of the `count` largest that both have in common, along the last dimension."""
    best = [
        torch.zeros_like(values, dtype=torch.bool).scatter(
            -1, values.argsort(dim=-1, descending=True, stable=True)[..., :count], True
        )
        for values in (first_GN, second_GN)
    ]
    return (best[0] & best[1]).sum(-1) / count
