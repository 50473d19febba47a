"""Drawings of the pages on how it works: of the bundled model and of result files, never by hand.

Colours are placeholders that become CSS variables, so that a dark page themes its drawings.
"""

import io
import json
import re
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import rap
from rap import assets
from rap.methods.base import dense_layers
from rap.planning.folding import EDGES, frequency_groups, group_directions, spectrum
from rap.planning.losses import key_moments
from rap.planning.subspace import output_gram, weighted_subspace

REPOSITORY = Path(__file__).parents[2]
NAMES = ("ink", "soft", "line", "fill", "one", "two", "three", "cut")
# No black: that is what matplotlib leaves out.
COLORS = {name: f"#0000{number:02x}" for number, name in enumerate(NAMES, start=1)}
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rap",
    "font.size": 12,
    "axes.edgecolor": COLORS["line"],
    "axes.labelcolor": COLORS["ink"],
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["soft"],
    "ytick.color": COLORS["soft"],
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WIDE = (8.4, 3.6)
# The layer that drawings of statistics are of: neither the first nor the last.
LAYER = 2
WINDOWS, TOKENS = 4, 256
FEWEST_SLOTS = 4


def svg(name: str) -> str:
    """The SVG of a drawing; KeyError for a name that DRAWINGS has not."""
    size, draw = DRAWINGS[name]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()
    found = found[found.index("<svg") :]
    for color, value in COLORS.items():
        found = found.replace(value, f"var(--{color})")
    # Fonts are the page's; ids would meet those of the other drawings of a page.
    found = re.sub(r" font-family: [^;\"]*;?", "", found)
    found = re.sub(r"(id=\"|#)(?=[\w-]+[\")])", rf"\1{name}-", found)
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    opening, rest = found.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest


def labelled(drawing: str, text: str) -> str:
    """A drawing with its text for those who do not see it."""
    return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(text, quote=True)}"', 1)


@cache
def _statistics() -> tuple[Any, Any]:
    """The bundled model's layers, and what a little text says of them."""
    model, tokenizer = assets.reference_model(), assets.reference_tokenizer()
    windows = rap.load_windows("bundled", tokenizer, num_windows=WINDOWS, window=TOKENS)
    needs = {"pairs", "gradients", "values"}
    return dense_layers(model), rap.calibrate(model, windows, needs)


def _plain(figure: Figure, *place: int) -> Axes:
    axes = figure.add_subplot(*place)
    axes.grid(axis="y", color=COLORS["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _turns(figure: Figure) -> None:
    """How far every pair turns over the context."""
    dense, _ = _statistics()
    frequencies, context = dense.frequencies[LAYER], dense.context
    axes = _plain(figure)
    turned = (frequencies * context).tolist()
    groups = frequency_groups(frequencies, context, EDGES[-1])
    for pair, (turn, group) in enumerate(zip(turned, groups, strict=True)):
        color = COLORS["soft"] if group >= 0 else COLORS[("one", "two", "three")[-1 - group]]
        axes.plot(pair, turn, "o", color=color, markersize=7)
    for edge in EDGES[-1]:
        axes.axhline(edge, color=COLORS["soft"], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0, edge * 1.15, f"{edge:g} rad", color=COLORS["soft"], fontsize=11)
    axes.set_yscale("log")
    axes.set_xlabel("pair")
    axes.set_ylabel(f"turned after {context:,} tokens, rad")


def _blocks(figure: Figure) -> None:
    """The four projections of one group, and what a cut takes from them."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 40)
    kept, dropped = COLORS["one"], COLORS["cut"]
    rows = [dropped if pair in (1, 4, 6) else kept for pair in range(8)]
    for left, title in ((2, "W_q, two query heads"), (30, "W_k")):
        heads = 2 if left == 2 else 1
        for head in range(heads):
            for number, color in enumerate(rows):
                place = (left + head * 12, 30 - 3.2 * number)
                axes.add_patch(Rectangle(place, 11, 2.6, color=color))
        axes.text(left, 35.5, title)
    for number in range(8):
        color = COLORS["two"] if number < 5 else dropped
        axes.add_patch(Rectangle((52, 30 - 3.2 * number), 11, 2.6, color=color))
        axes.add_patch(Rectangle((74 + 2.6 * number, 7.6), 2.1, 25, color=color))
    axes.text(52, 35.5, "W_v")
    axes.text(74, 35.5, "W_o")
    axes.text(2, 2.5, "whole pairs, the same in q and k", color=kept)
    axes.text(52, 2.5, "a subspace, folded into v and o", color=COLORS["two"])


def _tail(weights: torch.Tensor) -> list[float]:
    """The share of the sum that is lost if the first m are kept, m = 0, 1, ..."""
    kept = torch.cat([weights.new_zeros(1), weights.double().cumsum(0)])
    return (1 - kept / weights.sum()).clamp_min(1e-9).tolist()


def _folding(figure: Figure) -> None:
    """What keys lose by the slots that are kept: plain pairs, directions inside groups."""
    dense, statistics = _statistics()
    (key_GPP, read_GPP) = key_moments(statistics.layers[LAYER], "loss")
    frequencies, context = dense.frequencies[LAYER], dense.context
    for head in range(len(key_GPP)):
        axes = _plain(figure, 1, len(key_GPP), head + 1)
        choices = (("pairs", (), "soft"), ("folded", EDGES[-1], "one"))
        everything = spectrum(read_GPP[head], key_GPP[head], frequencies, context, EDGES[-1]).sum()
        for label, edges, color in choices:
            saved = spectrum(read_GPP[head], key_GPP[head], frequencies, context, edges)
            lost = [share * float(saved.sum() / everything) for share in _tail(saved)]
            # With fewer slots all is lost, and what pairs do together is counted by groups alone.
            slots = range(FEWEST_SLOTS, len(lost))
            axes.plot(slots, lost[FEWEST_SLOTS:], color=COLORS[color], label=label, linewidth=2)
        axes.set_xlabel(f"slots kept, KV head {head}")
        axes.set_ylim(0, None)
        if head == 0:
            axes.set_ylabel("expected loss, share of all")
            axes.legend(frameon=False)


def _groups(figure: Figure) -> None:
    """Which pairs one folded slot mixes."""
    dense, statistics = _statistics()
    (key_GPP, read_GPP) = key_moments(statistics.layers[LAYER], "loss")
    groups = frequency_groups(dense.frequencies[LAYER], dense.context, EDGES[-1])
    found = group_directions(read_GPP[0], key_GPP[0], groups)
    directions = [one for group in found.values() for one in group]
    directions.sort(key=lambda one: one.pair)
    energy = torch.diagonal(key_GPP[0]).real.sqrt()
    mixes = torch.stack([one.key_mix.abs() * energy for one in directions])
    axes = figure.add_subplot()
    axes.set_xlim(-0.5, mixes.shape[1] - 0.5)
    axes.set_ylim(len(directions) - 0.5, -0.5)
    for row, mix in enumerate(mixes / mixes.amax(1, keepdim=True)):
        for pair, value in enumerate(mix.tolist()):
            if value > 0.02:
                side = value**0.5 * 0.9
                place = (pair - side / 2, row - side / 2)
                axes.add_patch(Rectangle(place, side, side, color=COLORS["one"]))
    axes.set_xlabel("dense pair")
    axes.set_ylabel("slot")
    axes.set_aspect("equal")


def _subspace(figure: Figure) -> None:
    """What values lose by the width that is kept: channels, the best directions."""
    dense, statistics = _statistics()
    shape = dense.shapes[LAYER]
    moment = statistics.layers[LAYER]["value_moment"].double()
    gram = output_gram(dense.weights[LAYER]["o"], shape)
    groups = (shape.num_kv_heads, shape.group_size)
    inner, outer = moment.unflatten(0, groups).sum(1), gram.unflatten(0, groups).sum(1)
    best = weighted_subspace(inner, outer, 1).singular.square()
    alone = torch.diagonal(inner, dim1=-2, dim2=-1) * torch.diagonal(outer, dim1=-2, dim2=-1)
    for head in range(len(inner)):
        axes = _plain(figure, 1, len(inner), head + 1)
        order = alone[head].argsort(descending=True)
        lost = []
        for kept in range(shape.head_dim + 1):
            gone = order[kept:]
            mesh = gone[:, None], gone
            lost.append(float((inner[head][mesh] * outer[head][mesh]).sum() / best[head].sum()))
        axes.plot(lost, color=COLORS["soft"], label="channels", linewidth=2)
        axes.plot(_tail(best[head]), color=COLORS["two"], label="subspace", linewidth=2)
        axes.set_xlabel(f"width kept, KV head {head}")
        axes.set_ylim(0, None)
        if head == 0:
            axes.set_ylabel("squared error, over the\nleast of keeping nothing")
            axes.legend(frameon=False)


def _expected(figure: Figure) -> None:
    """The loss that was expected of cuts of the bundled model, and the one they had."""
    path = REPOSITORY / "experiments" / "analyses" / "analysis-loss.json"
    rows = json.loads(path.read_text("utf-8"))["data"]["rows"]
    axes = _plain(figure)
    budgets = sorted({row["budget"] for row in rows})
    colors = dict(zip(budgets, ("one", "two"), strict=False))
    for budget, color in colors.items():
        own = [row for row in rows if row["budget"] == budget]
        places = [row["expected"] for row in own], [row["measured"] for row in own]
        axes.plot(*places, "o-", color=COLORS[color], label=f"budget {budget}", markersize=7)
        for row in own:
            axes.annotate(
                f"{row['retain']:g}",
                (row["expected"], row["measured"]),
                (0, -15 if budget == max(colors) else 8),
                textcoords="offset points",
                ha="center",
                fontsize=10,
            )
    ends = [
        max(1e-9, min(min(r["expected"], r["measured"]) for r in rows)),
        max(max(r["expected"], r["measured"]) for r in rows),
    ]
    axes.plot(ends, ends, color=COLORS["soft"], linewidth=1, linestyle=(0, (4, 3)), label="equal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("expected, nats a token")
    axes.set_ylabel("measured, nats a token")
    axes.legend(frameon=False)


def _fit(figure: Figure) -> None:
    """The two streams, and what one layer is fitted to."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 34)
    for low, color, stream, reads, name in (
        (22, "soft", "h", "x", "A  dense"),
        (4, "one", "h'", "x'", "A'  cut, trained"),
    ):
        axes.add_patch(
            Rectangle((34, low), 26, 8, facecolor=COLORS["fill"], edgecolor=COLORS[color])
        )
        axes.text(47, low + 4, name, ha="center", va="center")
        axes.text(3, low + 4, stream, va="center")
        axes.text(14, low + 5.4, "norm", color=COLORS["soft"], fontsize=10)
        axes.text(28, low + 5.4, reads)
        for start, end in ((6, 34), (60, 78)):
            axes.add_patch(_arrow((start, low + 4), (end, low + 4)))
    axes.text(80, 26, "h + A(x)", va="center")
    axes.text(80, 8, "h' + A'(x')", va="center")
    axes.add_patch(_arrow((84, 11), (84, 23), "<->", "two"))
    axes.text(86, 17, "their distance,\nmade small", color=COLORS["two"], va="center", fontsize=11)


def _arrow(start: Any, end: Any, style: str = "-|>", color: str = "ink") -> FancyArrowPatch:
    return FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=12, color=COLORS[color])


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
        place = Rectangle((left, 8), 16, 7, facecolor=COLORS["fill"], edgecolor=COLORS["one"])
        axes.add_patch(place)
        axes.text(left + 8, 11.5, stage, ha="center", va="center")
        if number < len(stages) - 1:
            axes.add_patch(_arrow((left + 16.4, 11.5), (left + 25.2, 11.5)))
        axes.text(left + 8, 4, result, ha="center", va="center", color=COLORS["soft"], fontsize=11)


DRAWINGS: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
    "stages": ((8.4, 1.9), _stages),
    "blocks": ((8.4, 3.2), _blocks),
    "turns": (WIDE, _turns),
    "folding": (WIDE, _folding),
    "groups": ((6.0, 6.0), _groups),
    "subspace": (WIDE, _subspace),
    "expected": (WIDE, _expected),
    "fit": ((8.4, 2.9), _fit),
}
