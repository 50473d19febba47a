"""What the figures of several analyses draw alike: the dense model's line, and a curve a group."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes


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
