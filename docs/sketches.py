"""Sketches of the ideas, drawn without a model; figures.py writes them."""

import math
from collections.abc import Callable
from typing import Any

import themed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

BASE, PAIRS = 100_000, 32  # of RoPE, as in SmolLM2
RATES = {"fast pair, 1 rad/token": 1.0, "slow pair, 0.05 rad/token": 0.05}
POSITIONS = 5
FIRST_ANGLE = 0.4  # with which no arrow lies on an axis
FREQUENCIES = ("one", "two", "three", "four")  # their colors, fast to slow


def _canvas(figure: Figure, width: float, height: float) -> Axes:
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    return axes


def _box(axes: Axes, place: tuple[float, float, float, float], text: str, color: str) -> None:
    left, low, width, height = place
    edge, fill = themed.COLORS[color], themed.COLORS["fill"]
    axes.add_patch(Rectangle((left, low), width, height, facecolor=fill, edgecolor=edge))
    axes.text(left + width / 2, low + height / 2, text, ha="center", va="center")


def _rotation(figure: Figure) -> None:
    """A fast and a slow pair at successive positions."""
    for number, (title, rate) in enumerate(RATES.items()):
        axes = figure.add_subplot(1, 2, number + 1)
        axes.set_aspect("equal")
        axes.set_xlim(-1.45, 1.45)
        axes.set_ylim(-1.35, 1.35)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_position("zero")
        axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=themed.COLORS["line"]))
        for position in range(POSITIONS):
            angle = FIRST_ANGLE + rate * position
            tip = math.cos(angle), math.sin(angle)
            axes.add_patch(_arrow((0, 0), tip, color=("two", "one")[position == 0]))
            if rate > 0.5 or position in (0, POSITIONS - 1):
                place = 1.2 * tip[0], 1.2 * tip[1]
                axes.text(*place, f"t={position}", ha="center", va="center", fontsize=10)
        axes.set_title(title, fontsize=12)
        soft: dict[str, Any] = {"color": themed.COLORS["soft"], "fontsize": 10}
        axes.text(1.42, -0.16, "channel j", ha="right", **soft)
        axes.text(0.06, -1.3, "channel j + D/2", **soft)


def _folded(figure: Figure) -> None:
    """How far neighboring pairs diverge with the distance."""
    axes = figure.add_subplot()
    axes.grid(axis="y", color=themed.COLORS["line"], linewidth=0.6)
    theta = [BASE ** (-pair / PAIRS) for pair in range(PAIRS)]
    for pair, color in ((2, "two"), (10, "four"), (18, "three"), (26, "one")):
        apart = [abs(theta[pair] - theta[pair + 1]) * distance for distance in range(513)]
        label = f"pairs {pair} and {pair + 1}"
        axes.plot(apart, color=themed.COLORS[color], linewidth=2, label=label)
    axes.set_ylim(0, math.pi)
    axes.set_xlim(0, 512)
    axes.set_xlabel("distance between query and key, tokens")
    axes.set_ylabel("angle between\nneighboring pairs, rad")
    axes.legend(frameon=False, loc="upper right")


def _merging(figure: Figure) -> None:
    """Pairs of two heads at one frequency become one slot."""
    axes = _canvas(figure, 100, 44)
    heads = {"KV head 1": 12, "KV head 2": 30}
    for title, left in heads.items():
        axes.text(left + 6, 39.5, title, ha="center")
    axes.text(75, 39.5, "merged head", ha="center")
    for row, color in enumerate(FREQUENCIES):
        low = 31 - 7 * row
        for left in heads.values():
            axes.add_patch(Rectangle((left, low), 12, 4.5, color=themed.COLORS[color]))
        axes.add_patch(Rectangle((69, low), 12, 4.5, color=themed.COLORS[color]))
        axes.plot((24, 30), (low + 2.25,) * 2, color=themed.COLORS[color], linewidth=1.4)
        axes.add_patch(_arrow((42.4, low + 2.25), (68.6, low + 2.25), color=color))
        axes.text(10.5, low + 2.25, f"pair {row + 1}", ha="right", va="center", fontsize=11)
        axes.text(83, low + 2.25, f"slot {row + 1}", va="center", fontsize=11)
    soft: dict[str, Any] = {"color": themed.COLORS["soft"], "fontsize": 11}
    axes.text(55.5, 36.2, "one complex\ncombination", ha="center", va="bottom", **soft)
    axes.text(27, 4, "8 pairs cached per token", ha="center", va="center", **soft)
    axes.text(75, 4, "4 slots cached per token", ha="center", va="center", **soft)
    axes.text(27, 0.2, "rows: fast to slow, one frequency each", ha="center", **soft)
    axes.text(75, 0.2, "same frequencies, exact", ha="center", **soft)


def _cached(figure: Figure) -> None:
    """Numbers cached per token by four heads, to scale."""
    axes = _canvas(figure, 100, 40)
    layers = (
        ("dense", 4, 7.5, "4 KV heads"),
        ("rap:merge=1", 4, 3.75, "4 separate heads,\nnarrower"),
        ("rap, merged heads", 2, 7.5, "2 heads"),
        ("low rank (PaLU)", 1, 15.0, ""),
    )
    axes.text(22, 37.5, "keys", color=themed.COLORS["one"])
    axes.text(56, 37.5, "values", color=themed.COLORS["two"])
    for row, (name, heads, width, said) in enumerate(layers):
        low = 30 - 9.4 * row
        axes.text(20, low + 2.5, name, ha="right", va="center", fontsize=11)
        for left, color in ((22, "one"), (56, "two")):
            for head in range(heads):
                place = (left + head * width, low)
                axes.add_patch(Rectangle(place, width - 0.5, 5, color=themed.COLORS[color]))
        axes.text(88, low + 2.5, said, va="center", fontsize=10, color=themed.COLORS["soft"])
    for head in range(4):
        edge, place = themed.COLORS["one"], (22 + head * 7.5, -7)
        ghost = Rectangle(place, 7, 5, fill=False, edgecolor=edge, linestyle=(0, (3, 2)))
        axes.add_patch(ghost)
    axes.set_ylim(-8, 40)
    axes.add_patch(_arrow((29.5, 1.6), (29.5, -1.8), color="one"))
    soft: dict[str, Any] = {"color": themed.COLORS["soft"], "fontsize": 10}
    axes.text(53, -4.5, "keys, reconstructed at every step, not cached", va="center", **soft)


def _absorbed(figure: Figure) -> None:
    """Where the maps of merged heads are multiplied into the weights."""
    axes = _canvas(figure, 100, 44)
    axes.text(2, 20.5, "hidden\nstates", va="center")
    for low, text in ((33, "W_q and B"), (18, "A and W_k"), (3, "down and W_v")):
        _box(axes, (15, low, 17, 8), text, "two")
        axes.add_patch(_arrow((10, 21.5), (14.6, low + 4)))
    _box(axes, (39, 33, 11, 8), "rotate", "soft")
    _box(axes, (39, 18, 11, 8), "rotate", "soft")
    _box(axes, (56, 18, 13, 8), "slots", "one")
    _box(axes, (56, 3, 13, 8), "latent", "one")
    _box(axes, (75, 18, 12, 23), "attention", "soft")
    _box(axes, (75, 3, 12, 8), "up, W_o", "two")
    for start, end in (
        ((32.4, 37), (38.6, 37)),
        ((32.4, 22), (38.6, 22)),
        ((50.4, 22), (55.6, 22)),
    ):
        axes.add_patch(_arrow(start, end))
    axes.add_patch(_arrow((32.4, 7), (55.6, 7)))
    axes.add_patch(_arrow((50.4, 37), (74.6, 37)))
    axes.add_patch(_arrow((69.4, 22), (74.6, 22)))
    axes.add_patch(_arrow((69.4, 8.5), (74.6, 19)))
    axes.add_patch(_arrow((81, 17.6), (81, 11.4)))
    axes.add_patch(_arrow((87.4, 7), (93, 7)))
    axes.text(94, 7, "out", va="center")
    axes.text(62.5, 13.7, "KV cache", ha="center", va="center", color=themed.COLORS["one"])
    axes.text(2, 41.5, "absorbed\nmaps", va="top", color=themed.COLORS["two"])


def _blocks(figure: Figure) -> None:
    """The four projections of one group, and what pruning removes from them."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 40)
    kept, dropped = themed.COLORS["one"], themed.COLORS["cut"]
    rows = [dropped if pair in (1, 4, 6) else kept for pair in range(8)]
    for left, title in ((2, "W_q, two query heads"), (30, "W_k")):
        heads = 2 if left == 2 else 1
        for head in range(heads):
            for number, color in enumerate(rows):
                place = (left + head * 12, 30 - 3.2 * number)
                axes.add_patch(Rectangle(place, 11, 2.6, color=color))
        axes.text(left, 35.5, title)
    for number in range(8):
        color = themed.COLORS["two"] if number < 5 else dropped
        axes.add_patch(Rectangle((52, 30 - 3.2 * number), 11, 2.6, color=color))
        axes.add_patch(Rectangle((74 + 2.6 * number, 7.6), 2.1, 25, color=color))
    axes.text(52, 35.5, "W_v")
    axes.text(74, 35.5, "W_o")
    axes.text(2, 2.5, "RoPE pairs, the same in q and k", color=kept)
    axes.text(52, 2.5, "a latent, absorbed into v and o", color=themed.COLORS["two"])


def _fit(figure: Figure) -> None:
    """The hidden states of both models, and the target of one layer."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 34)
    for low, color, stream, reads, name in (
        (22, "soft", "h", "x", "A  dense"),
        (4, "one", "h'", "x'", "A'  pruned, trained"),
    ):
        axes.add_patch(
            Rectangle(
                (34, low), 26, 8, facecolor=themed.COLORS["fill"], edgecolor=themed.COLORS[color]
            )
        )
        axes.text(47, low + 4, name, ha="center", va="center")
        axes.text(3, low + 4, stream, va="center")
        axes.text(14, low + 5.4, "norm", color=themed.COLORS["soft"], fontsize=10)
        axes.text(28, low + 5.4, reads)
        for start, end in ((6, 34), (60, 78)):
            axes.add_patch(_arrow((start, low + 4), (end, low + 4)))
    axes.text(80, 26, "h + A(x)", va="center")
    axes.text(80, 8, "h' + A'(x')", va="center")
    axes.add_patch(_arrow((84, 11), (84, 23), "<->", "two"))
    axes.text(86, 17, "distance,\nminimized", color=themed.COLORS["two"], va="center", fontsize=11)


def _arrow(start: Any, end: Any, style: str = "-|>", color: str = "ink") -> FancyArrowPatch:
    return FancyArrowPatch(
        start, end, arrowstyle=style, mutation_scale=12, color=themed.COLORS[color]
    )


def _stages(figure: Figure) -> None:
    """The stages of compress, and what goes from one to the next."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 20)
    stages = (
        ("calibrate", "statistics"),
        ("plan", "a plan"),
        ("apply", "smaller weights"),
        ("recover", "a checkpoint"),
    )
    for number, (stage, result) in enumerate(stages):
        left = 1 + 25.5 * number
        place = Rectangle(
            (left, 8), 16, 7, facecolor=themed.COLORS["fill"], edgecolor=themed.COLORS["one"]
        )
        axes.add_patch(place)
        axes.text(left + 8, 11.5, stage, ha="center", va="center")
        if number < len(stages) - 1:
            axes.add_patch(_arrow((left + 16.4, 11.5), (left + 25.2, 11.5)))
        axes.text(
            left + 8, 4, result, ha="center", va="center", color=themed.COLORS["soft"], fontsize=11
        )


SKETCHES: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
    "stages": ((8.4, 1.9), _stages),
    "rotation": ((8.4, 3.9), _rotation),
    "blocks": ((8.4, 3.2), _blocks),
    "folded": ((8.4, 3.0), _folded),
    "merging": ((6.4, 3.7), _merging),  # narrow: README.md shows it, on phones too
    "cached": ((8.4, 3.6), _cached),
    "absorbed": ((8.4, 3.7), _absorbed),
    "fit": ((8.4, 2.9), _fit),
}
