"""The figure and the table of docs/explanation/pruning-vs-quantization.md, from pareto.json.

python experiments/smollm2-pareto/page.py
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import front
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from first_page import is_merged
from sources import put, runs

from rap.methods.naming import named_today, result_today
from rap.studies.report.report import markdown_table

REPOSITORY = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("pareto.json")
PAGE = REPOSITORY / "docs/explanation/pruning-vs-quantization.md"
FIGURE = PAGE.with_suffix(".png")
BEGIN = "<!-- measured: python experiments/smollm2-pareto/page.py -->\n"
END = "<!-- end of what is measured -->\n"
SIZE, DPI = (8.0, 6.0), 160  # inches: readable at 800 pixels
TICKS = (1, 1.4, 2, 3, 4, 6, 8, 12, 16)
LOSSES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
FLOOR = LOSSES[0]  # what is nearer to dense stands on it
GREY = "#b9b9b9"
# What matters: the sort of a row, how it is drawn, and how the legend calls it.
SORTS: dict[str, tuple[str, str, str]] = {
    "bits": ("#1f5fa8", "o", "quantized cache"),
    "press": ("#2c8a4b", "s", "50% of the tokens evicted"),
    "press bits": ("#7cc08f", "s", "50% evicted, quantized (4 or 3 bits)"),
    "rap": ("#d9480f", "D", "rap, merged heads, recovered"),
    "rap bits": ("#f08c00", "D", "the same, quantized"),
    "rap press": ("#9c36b5", "^", "the same, 50% evicted (4-bit)"),
    "palu": ("#7a4a21", "v", "PaLU, no recovery (quantized)"),
    "rest": (GREY, ".", "all others"),
}
LABEL = (7, -3)  # where the name of a point on the front begins, in points from it
NAMED = ("rap", "rap bits")  # sorts whose points are named beside the front too
RIGHT: dict[str, Any] = {"xytext": (7, 0), "ha": "left", "va": "center"}
ABOVE: dict[str, Any] = {"xytext": (0, 6), "ha": "center", "va": "bottom"}


def sort_of(row: front.Row) -> str:
    """A key of SORTS."""
    pruned = row["method"] != "dense"
    if row["method"] == "palu":
        return "palu"
    if (pruned and not is_merged(named_today(row["method"]))) or (row["bits"] or "").startswith(
        "quanto"
    ):
        return "rest"
    if row["press"] and not row["press"].endswith(":0.5"):
        return "rest"
    if pruned:
        return "rap press" if row["press"] else "rap bits" if row["bits"] else "rap"
    if row["press"]:
        return "press bits" if row["bits"] else "press"
    return "bits"


def place(row: front.Row) -> tuple[float, float]:
    """Where a row is drawn: how many times smaller, and KL."""
    return 1 / row["share"], max(row["kl"], FLOOR)


def drawn(rows: Sequence[front.Row]) -> list[front.Row]:
    """Rows with a place on two logarithmic axes: dense itself has none."""
    return [row for row in front.cache_rows(rows) if row["kl"] > 0]


def draw(rows: Sequence[front.Row], path: Path) -> None:
    """KL against bytes of cache, both logarithmic; the front is a line, its points are named."""
    with matplotlib.rc_context({"font.size": 10.5}):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        axes = figure.subplots()
        shown = drawn(rows)
        for sort, (color, marker, label) in SORTS.items():
            points = [place(row) for row in shown if sort_of(row) == sort]
            if points:
                size = 60 if sort == "rest" else 46
                order = 2 if sort == "rest" else 3
                xs, ys = zip(*points, strict=True)
                axes.scatter(
                    xs, ys, size, color, marker=marker, label=label, zorder=order, linewidth=0
                )
        best = front.front(shown)
        _draw_front(axes, best)
        _name(axes, [row for row in shown if row not in best])
        _scale(axes, shown)
        axes.legend(framealpha=1, edgecolor="none", fontsize=9, loc="lower right")
        figure.savefig(path, metadata={"Software": None})


def _draw_front(axes: Axes, best: Sequence[front.Row]) -> None:
    xs, ys = zip(*map(place, best), strict=True)
    axes.plot(xs, ys, color="0.25", linewidth=1.1, zorder=1, label="Pareto front")
    for row in best:
        said = front.name_of(row).replace(row["method"], "rap")
        for recovered in front.RECOVERED.values():  # the legend states it
            said = said.replace(recovered, "")
        named = {"textcoords": "offset points", "fontsize": 8.5, "va": "top", "zorder": 4}
        axes.annotate(said, place(row), LABEL, **named)


def _name(axes: Axes, rows: Sequence[front.Row]) -> None:
    """Name the points of some sorts, in their colour."""
    for row in rows:
        # Two bits are far above everything else, and odd widths gain nothing by fewer.
        gains = not row["bits"] or row["share"] < 0.8 * row["retain"]
        if (sort := sort_of(row)) in NAMED and row["bits"] != "hqq2" and gains:
            beside = ABOVE if row["bits"] and row["retain"] == 0.5 else RIGHT
            drawn = {"textcoords": "offset points", "fontsize": 7.5, "zorder": 4}
            said = " + ".join(filter(None, (f"{row['retain']:g}", row["bits"])))
            axes.annotate(said, place(row), color=SORTS[sort][0], **drawn, **beside)


def _scale(axes: Axes, rows: Sequence[front.Row]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, ticks, labels in (
        (axes.xaxis, TICKS, [f"{times:g}x" for times in TICKS]),
        (axes.yaxis, LOSSES, [f"<= {FLOOR:g}", *(f"{loss:g}" for loss in LOSSES[1:])]),
    ):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FixedFormatter(labels))
        axis.set_minor_locator(NullLocator())
    for times in front.BUDGETS:
        axes.axvline(times, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    largest = max(row["kl"] for row in rows)
    axes.set(xlim=(1, 2.4 / min(row["share"] for row in rows)), ylim=(0.75 * FLOOR, 1.4 * largest))
    axes.set_xlabel("compression of the KV cache, bytes/token (log)")
    axes.set_ylabel("KL to the dense model, nats/token (log)")
    axes.grid(axis="y", color="0.93")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def measured(result: dict[str, Any]) -> str:
    """What the page says of a result."""
    table = result_today(result)["tables"][0]
    made = runs([RESULT.parent.name], str(PAGE.relative_to(REPOSITORY)))
    return f"{table['note']}\n\n{markdown_table(table)}\n\n{made}\n"


def with_measured(text: str, result: dict[str, Any]) -> str:
    """The page with what was measured."""
    return put(text, BEGIN, END, measured(result), PAGE)


def main() -> None:
    """Write the figure, and what it says into the page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    draw(result["rows"], FIGURE)
    text = with_measured(PAGE.read_text(encoding="utf-8"), result)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
