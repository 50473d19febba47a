"""Line charts as inline SVG whose colours are CSS variables, so that a dark page themes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 330
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 14, 46
# From this ratio of largest to smallest value on, an axis is logarithmic.
VALUES_LOG_FROM, SHARES_LOG_FROM = 3.0, 5.0
NUM_COLORS = 8  # --series-0 ... of the style sheet
MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-4,-4h8v8h-8z",
    "M0,-5l5,9h-10z",
    "M0,-5l5,5l-5,5l-5,-5z",
    "M0,5l5,-9h-10z",
    "M-4,-4l8,8m0,-8l-8,8",
    "M-5,0h10m-5,-5v10",
)


@dataclass(frozen=True)
class Series:
    """A named line of (x, y) points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """Values to pixels, and where the ticks are."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (
            (math.log(self.low), math.log(self.high), math.log(value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values on the axis, about `count` of them."""
        if self.log:
            return _log_ticks(self.low, self.high, count)
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [step * index for index in range(first, last + 1)]


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    reference: float | None = None,
    may_log: bool = True,
) -> str:
    """An SVG figure: a line and a marker a series, `reference` as a dashed line across.

    Points that are not finite are left out, and those not above zero where the axis may be
    logarithmic. X is a share, shown in percent.
    """
    least = 0.0 if may_log else -math.inf
    shown = [
        Series(one.name, sorted(p for p in one.points if math.isfinite(p[1]) and p[1] > least))
        for one in series
    ]
    values = [y for one in shown for _, y in one.points] + (
        [] if reference is None else [reference]
    )
    shares = [x for one in shown for x, _ in one.points]
    if not shares:
        return ""
    x = _axis(shares, LEFT, WIDTH - RIGHT, SHARES_LOG_FROM)
    y = _axis(values, HEIGHT - BOTTOM, TOP, VALUES_LOG_FROM if may_log else math.inf)
    parts = [*_grid(x, y, x_label, y_label)]
    if reference is not None:
        at = f"{y(reference):.1f}"
        parts.append(f'<path class="reference" d="M{LEFT},{at}H{WIDTH - RIGHT}"/>')
    for index, one in enumerate(shown):
        parts += _line(index, one, x, y)
    label = escape(f"{y_label} against {x_label}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def legend(names: Sequence[str], reference: str = "") -> str:
    """The key to the series of a `line_chart` in the same order, as HTML."""
    keys = [
        f'<li><svg viewBox="-8 -8 16 16" class="key">{_marker(index)}</svg>{escape(name)}</li>'
        for index, name in enumerate(names)
    ]
    if reference:
        line = '<svg viewBox="-8 -8 16 16" class="key"><path class="reference" d="M-8,0H8"/></svg>'
        keys.insert(0, f"<li>{line}{escape(reference)}</li>")
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _axis(values: Sequence[float], start: float, stop: float, log_from: float) -> Axis:
    low, high = min(values), max(values)
    if low > 0 and high / low >= log_from:
        room = (high / low) ** 0.06
        return Axis(low / room, high * room, start, stop, log=True)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - room, high + room, start, stop)


def _grid(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in y.ticks():
        at = f"{y(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT},{at}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{_number(tick)}</text>'
        )
    base = HEIGHT - BOTTOM
    # Shares have up to six digits, such as 1,000%: fewer of them find room.
    for tick in x.ticks(4 if x.log else 5):
        at = f"{x(tick):.1f}"
        parts.append(f'<path class="grid" d="M{at},{TOP}V{base}"/>')
        parts.append(f'<text x="{at}" y="{base + 16}" text-anchor="middle">{tick:,.0%}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    up = f'transform="translate(13,{(TOP + base) / 2}) rotate(-90)"'
    parts.append(f'<text {up} text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _line(index: int, series: Series, x: Axis, y: Axis) -> list[str]:
    places = [(x(share), y(value)) for share, value in series.points]
    path = "L".join(f"{px:.1f},{py:.1f}" for px, py in places)
    parts = [f'<path class="line s{index % NUM_COLORS}" d="M{path}"/>'] if places else []
    for (share, value), (px, py) in zip(series.points, places, strict=True):
        said = escape(f"{series.name}: {value:,.2f} at {share:.1%}")
        parts.append(
            f'<g transform="translate({px:.1f},{py:.1f})"><title>{said}</title>{_marker(index)}</g>'
        )
    return parts


def _marker(index: int) -> str:
    shape = MARKERS[index % len(MARKERS)]
    return f'<path class="marker s{index % NUM_COLORS}" d="{shape}"/>'


def _round_step(rough: float) -> float:
    size = 10.0 ** math.floor(math.log10(rough))
    return next(size * step for step in (1, 2, 5, 10) if size * step >= rough * 0.999)


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # The finest of these that does not crowd the axis.
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [10.0**d * s for d in decades for s in steps if low <= 10.0**d * s <= high]
        if len(found) <= count + 2:
            return found
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.3g}"
