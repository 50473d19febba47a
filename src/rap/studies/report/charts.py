"""Line charts drawn by matplotlib, as inline SVG whose colors are CSS variables of the page.

matplotlib is given a placeholder for each colour of page.css; the variable stands in its place in
the SVG, so that a dark page or a printed one themes its charts. The figure of `rap demo` is a file
of its own, with colors of its own.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    PercentFormatter,
)

SIZE = (7.6, 5.2)  # inches of 72 units in the SVG, which takes the width it is given
KEY_SIZE = (0.34, 0.2)
# Shares are on a logarithmic axis from this ratio of the largest to the smallest on.
SHARES_LOG_FROM = 5.0
LEAST_ROOM = 0.02  # beside shares that are alike: enough for ticks of whole percent
STEPS, COARSE = (1, 2, 5, 10), (1, 3, 10)  # of a logarithmic axis, within a decade
NUM_COLORS = 7  # --series-0 ... of page.css; --series-rest is grey
MARKERS = "osD^v<>*dx+PX1234"
_NAMES = (*(f"series-{n}" for n in range(NUM_COLORS)), "series-rest", "soft", "rule", "page")
# No black: that is what matplotlib leaves out.
COLORS = {name: f"#0000{number:02x}" for number, name in enumerate(_NAMES, start=1)}
REFERENCE: Any = {"color": COLORS["soft"], "linewidth": 1.5, "linestyle": (0, (4, 3))}
SETTINGS: Any = {"svg.fonttype": "none", "font.size": 14, "axes.linewidth": 1.0}
_UNUSED = {"metadata", "style", "clipPath"}  # of what matplotlib writes


@dataclass(frozen=True)
class Style:
    """A color by its name in `COLORS`, a marker, and whether the line is in front."""

    color: str
    marker: str
    front: bool = True


@dataclass(frozen=True)
class ChartPoint:
    """A share of dense, a value, and the tooltip of the point."""

    share: float
    value: float
    said: str


@dataclass(frozen=True)
class Series:
    """A named line of points."""

    name: str
    points: Sequence[ChartPoint]


def styles_of(names: Sequence[str], matter: Callable[[str], bool]) -> dict[str, Style]:
    """A style per name, no two alike; where colors run out, those that do not `matter` are grey."""
    first = sorted(names, key=lambda name: not matter(name))
    coloured = first if len(first) <= NUM_COLORS else [name for name in first if matter(name)]
    styles = {
        name: Style(f"series-{index}", MARKERS[index])
        for index, name in enumerate(coloured[:NUM_COLORS])
    }
    rest = [name for name in first if name not in styles]
    styles |= {
        name: Style("series-rest", MARKERS[index % len(MARKERS)], front=False)
        for index, name in enumerate(rest)
    }
    return {name: styles[name] for name in names}


def line_chart(
    series: Sequence[Series],
    styles: dict[str, Style],
    labels: tuple[str, str],
    *,
    prefix: str,
    reference: float | None = None,
    floor: float | None = None,
) -> Markup | None:
    """A chart of a line and markers a series, `reference` dashed across; None without points.

    `labels` of x and y. X is a share, in percent. With a `floor` y is logarithmic, and what is
    below stands on the floor. Points that are not finite are left out. Ids begin with `prefix`.
    """
    shown = {one.name: [p for p in one.points if math.isfinite(p.value)] for one in series}
    points = [point for finite in shown.values() for point in finite]
    if not points:
        return None
    figure, axes = _figure(SIZE)
    said: dict[str, str] = {}
    for name, finite in shown.items():
        line = sorted(finite, key=lambda point: point.share)
        shares = [point.share for point in line]
        values = [max(point.value, floor or -math.inf) for point in line]
        style = styles[name]
        axes.add_line(_line(style, shares, values, marker=""))
        for point, x, y in zip(line, shares, values, strict=True):
            said[f"point-{len(said)}"] = f"{name}: {point.said}"
            dot = _line(style, [x], [y])
            dot.set_linewidth(0)
            dot.set_gid(f"point-{len(said) - 1}")
            axes.add_line(dot)
    if reference is not None:
        axes.axhline(reference, **REFERENCE)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    _scale_shares(axes, [point.share for point in points])
    values = [point.value for point in points]
    _scale_values(axes, values if reference is None else [*values, reference], floor)
    return _inline(figure, f"{labels[1]} against {labels[0]}", prefix, said)


def legend_key(style: Style | None, prefix: str) -> Markup:
    """The line and marker of a style, or the dashed line of a reference."""
    figure, axes = _figure(KEY_SIZE)
    axes.set(xlim=(-1, 1), ylim=(-1, 1))
    axes.set_axis_off()
    if style is None:
        axes.add_line(Line2D([-0.9, 0.9], [0, 0], **REFERENCE))
    else:
        axes.add_line(_line(style, [-0.9, 0.9], [0, 0], marker=""))
        axes.add_line(_line(style, [0], [0]))
    return _inline(figure, "", prefix, {})


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    # A Figure of its own, not pyplot: no global state, no display.
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
    axes.spines[:].set_visible(False)
    axes.grid(color=COLORS["rule"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=COLORS["soft"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(COLORS["soft"])
    return figure, axes


def _line(
    style: Style, xs: Sequence[float], ys: Sequence[float], marker: str | None = None
) -> Line2D:
    color = COLORS[style.color]
    return Line2D(
        xs,
        ys,
        color=color,
        linewidth=2.2 if style.front else 1.2,
        marker=style.marker if marker is None else marker,
        markersize=8 if style.front else 6,
        markerfacecolor=color if style.front else COLORS["page"],
        markeredgecolor=COLORS["page"] if style.front else color,
        zorder=3 if style.front else 2,
        clip_on=False,
    )


def _scale_shares(axes: Axes, shares: Sequence[float]) -> None:
    low, high = min(shares), max(shares)
    if low > 0 and high / low >= SHARES_LOG_FROM:
        room = (high / low) ** 0.05
        axes.set_xscale("log")
        axes.set_xlim(low / room, high * room)
        # Shares have up to six digits, such as 5,000%: fewer of them find room.
        steps = STEPS if high / low < 10 * SHARES_LOG_FROM else COARSE
        _tick(axes.xaxis, steps, lambda share: f"{share:,.0%}")
        return
    room = max(0.06 * (high - low), LEAST_ROOM)
    left, right = low - room, high + room
    axes.set_xlim(left, right)
    percent = MaxNLocator(5, integer=True).tick_values(100 * left, 100 * right)
    axes.xaxis.set_major_locator(
        FixedLocator([x / 100 for x in percent if left <= x / 100 <= right])
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))


def _scale_values(axes: Axes, values: Sequence[float], floor: float | None) -> None:
    if floor is None:
        room = 0.08 * (max(values) - min(values)) or 1.0
        axes.set_ylim(min(values) - room, max(values) + room)
        return
    low, high = max(min(values), floor), max(*values, floor)
    axes.set_yscale("log")
    # Below the lowest step is room for the markers on it.
    axes.set_ylim(0.88 * _step(low, up=False), _step(high, up=True))
    lowest = "\u2264" if min(values) < floor else ""
    _tick(axes.yaxis, STEPS, lambda value: f"{lowest if value < 1.001 * floor else ''}{value:g}")


def _tick(axis: Axis, steps: Sequence[int], label: Callable[[float], str]) -> None:
    axis.set_major_locator(LogLocator(subs=steps[:-1], numticks=99))
    axis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    axis.set_minor_locator(LogLocator(subs=()))


def _step(value: float, *, up: bool) -> float:
    """The next value of `STEPS` in any decade, above or below."""
    decade = 10.0 ** math.floor(math.log10(value))
    steps = [decade * step for step in STEPS]
    return next(s for s in steps if s > value) if up else max(s for s in steps if s <= value)


def _inline(figure: Figure, label: str, prefix: str, said: dict[str, str]) -> Markup:
    """The figure as an SVG element of a page, with a title at the groups named in `said`."""
    written = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(written, format="svg", transparent=True)
    root = ElementTree.fromstring(written.getvalue())
    used = [value for element in root.iter() for name, value in element.items() if "href" in name]
    ids = {value[1:]: f"{prefix}-{number}" for number, value in enumerate(dict.fromkeys(used))}
    _clean(root, ids, said)
    root.attrib = {"viewBox": root.attrib["viewBox"]}
    root.attrib |= {"role": "img", "aria-label": label} if label else {"aria-hidden": "true"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _clean(element: ElementTree.Element, ids: dict[str, str], said: dict[str, str]) -> None:
    """Of one element and those below: no namespaces, no unused ids, and the page's colours."""
    element.tag = element.tag.partition("}")[2]
    given = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    name = given.pop("id", "")
    given.pop("clip-path", None)
    if name in ids:
        given["id"] = ids[name]
    if "href" in given:
        given["href"] = "#" + ids[given["href"][1:]]
    if "style" in given:
        given["style"] = _themed(given["style"])
    element.attrib = given
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    for child in list(element):
        _clean(child, ids, said)
        if child.tag in _UNUSED or (child.tag in {"g", "defs"} and not len(child)):
            element.remove(child)
    if name in said:
        title = ElementTree.Element("title")
        title.text = said[name]
        element.insert(0, title)


def _themed(style: str) -> str:
    names = {placeholder: name for name, placeholder in COLORS.items()}
    style = re.sub(r"#0000[0-9a-f]{2}\b", lambda match: f"var(--{names[match[0]]})", style)
    return re.sub(r"font-family: [^;]*; ", "", style)


LABELS = {"paper": "RAP as published", "rap": "rap", "recovered": "rap, recovered"}
LINEAR = 3.0  # times dense, up to which a linear axis tells curves apart
DRAWN = {"paper": "#b5651d", "rap": "#1f5fa8", "recovered": "#3a8f4f"}


def quality_against_cache(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Perplexity against KV bytes per token, one curve a method.

    `rows` hold `method` (one of them "dense"), `kv_bytes_per_token` and `perplexity`.
    """
    dense = next(row for row in rows if row["method"] == "dense")
    # A Figure of its own, not pyplot: no global state, no display.
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.axhline(
        dense["perplexity"],
        color="0.6",
        linewidth=1,
        linestyle="--",
        label=f"dense, {dense['perplexity']:.1f}",
    )
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "dense"):
        points = sorted(
            (row["kv_bytes_per_token"] / dense["kv_bytes_per_token"], row["perplexity"])
            for row in rows
            if row["method"] == method
        )
        color = DRAWN.get(method)
        axes.plot(
            *zip(*points, strict=True), marker="o", color=color, label=LABELS.get(method, method)
        )
        for point in points:
            axes.annotate(
                f"{point[1]:.1f}",
                point,
                # What is recovered stands below the curve it came from.
                xytext=(8, -15) if method == "recovered" else (6, 6),
                textcoords="offset points",
                color=color,
                fontsize=9,
            )
    if max(row["perplexity"] for row in rows) > LINEAR * dense["perplexity"]:
        axes.set_yscale("log")  # or one broken cut would press all others onto the axis
    axes.margins(x=0.09, y=0.12)
    shares = {row["kv_bytes_per_token"] / dense["kv_bytes_per_token"] for row in rows} - {1.0}
    axes.set_xticks(sorted({round(share, 2) for share in shares}))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(f"KV cache, share of the dense {dense['kv_bytes_per_token']:,} bytes per token")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
