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

import themed
from first_page import is_merged
from sources import put, runs

from rap.methods.naming import named_today, result_today
from rap.studies.report.report import markdown_table

REPOSITORY = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("pareto.json")
PAGE = REPOSITORY / "docs/explanation/pruning-vs-quantization.md"
FIGURE = PAGE.with_suffix(".svg")
BEGIN = "<!-- measured: python experiments/smollm2-pareto/page.py -->\n"
END = "<!-- end of what is measured -->\n"
SIZE = (7.6, 7.4)
TICKS = (1, 1.4, 2, 3, 4, 6, 8, 12, 16)
LOSSES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
FLOOR = LOSSES[0]  # what is nearer to dense stands on it
# What matters: the sort of a row, how it is drawn, and how the legend calls it.
SORTS: dict[str, tuple[str, str, str]] = {
    "bits": ("one", "o", "quantized cache"),
    "press": ("three", "s", "50% of the tokens evicted"),
    "press bits": ("six", "s", "50% evicted, quantized"),
    "rap": ("two", "D", "rap, merged heads, recovered"),
    "rap bits": ("seven", "D", "the same, quantized"),
    "rap press": ("four", "^", "the same, 50% evicted (4-bit)"),
    "palu": ("five", "v", "PaLU, no recovery (quantized)"),
    "rest": ("soft", ".", "all others"),
}
FADED = 0.5  # the opacity of the rest
# Where a name begins or ends, in points from its point: below a front that rises to the right.
RIGHT = ((7.0, -3.0), "left", "top")
PLACES = {
    "rap 0.7 + hqq4": ((2.0, -13.0), "left", "top"),
    "rap 0.5 + keydiff:0.5 + hqq4": ((8.0, 1.0), "left", "center"),
    "hqq2": ((-7.0, 0.0), "right", "center"),
    "rap 0.7, align 32": ((7.0, 0.0), "left", "center"),
    "rap 0.5": ((7.0, 2.0), "left", "center"),
    "rap 0.35": ((-4.0, 5.0), "right", "bottom"),
}


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
    """Write the figure."""
    with matplotlib.rc_context(themed.SETTINGS):
        themed.save(figure_of(rows), path)


def figure_of(rows: Sequence[front.Row]) -> Figure:
    """KL against bytes of cache, both logarithmic; the front is a line, its points are named."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    shown = drawn(rows)
    for sort, (color, marker, label) in SORTS.items():
        points = [place(row) for row in shown if sort_of(row) == sort]
        if points:
            rest = sort == "rest"
            look = {"alpha": FADED if rest else None, "zorder": 2 if rest else 3, "linewidth": 0}
            xs, ys = zip(*points, strict=True)
            axes.scatter(
                xs, ys, 60 if rest else 46, themed.COLORS[color], marker=marker, label=label, **look
            )
    best = front.front(shown)
    xs, ys = zip(*map(place, best), strict=True)
    line = {"color": themed.COLORS["ink"], "linewidth": 1.1, "zorder": 1}
    axes.plot(xs, ys, label="Pareto front", **line)
    _scale(axes, shown)
    for row in shown:
        if row in best or sort_of(row) == "rap" or name(row) == "hqq2":
            _name(axes, row, "ink" if row in best else SORTS[sort_of(row)][0])
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=11)
    return figure


def name(row: front.Row) -> str:
    """What a point is called; the legend states which rows were recovered."""
    said = front.name_of(row).replace(row["method"], "rap")
    for recovered in filter(None, front.RECOVERED.values()):
        said = said.replace(recovered, "")
    aligned = row["method"].endswith(":align=32") and not row["bits"]
    return f"{said}, align 32" if aligned else said


def _name(axes: Axes, row: front.Row, color: str) -> None:
    said = name(row)
    offset, ha, va = PLACES.get(said, RIGHT)
    drawn: dict[str, Any] = {"ha": ha, "va": va, "fontsize": 11, "zorder": 4}
    broken = said.replace("0.5 + hqq4", "0.5\n+ hqq4") if said.count("+") > 1 else said
    drawn |= {"textcoords": "offset points", "color": themed.COLORS[color]}
    axes.annotate(broken, place(row), offset, **drawn)


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
        axes.axvline(times, color=themed.COLORS["line"], linestyle=(0, (4, 3)), zorder=0)
    largest = max(row["kl"] for row in rows)
    axes.set(xlim=(1, 2.4 / min(row["share"] for row in rows)), ylim=(0.75 * FLOOR, 1.4 * largest))
    axes.set_xlabel("compression of the KV cache, bytes/token (log)")
    axes.set_ylabel("KL to the dense model, nats/token (log)")
    axes.grid(axis="y", color=themed.COLORS["line"], linewidth=0.6)
    axes.set_axisbelow(True)


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
