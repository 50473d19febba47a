"""Drawings of the explanation: of the bundled model and of result files, and sketches of ideas.

python docs/figures.py
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import sketches
import themed
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import rap
from rap import assets
from rap.methods.base import dense_layers
from rap.planning.folding import EDGES, frequency_groups, group_directions, spectrum
from rap.planning.losses import key_moments
from rap.planning.subspace import output_gram, weighted_subspace

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs/explanation"
WIDE = (8.4, 3.6)
# The layer that drawings of statistics are of: neither the first nor the last.
LAYER = 2
WINDOWS, TOKENS = 4, 256
FEWEST_SLOTS = 4


def drawn(name: str) -> Figure:
    """The figure of a drawing; KeyError for a name that DRAWINGS has not."""
    size, draw = DRAWINGS[name]
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    return figure


@cache
def _statistics() -> tuple[Any, Any]:
    """The bundled model's layers, and what a little text says of them."""
    model, tokenizer = assets.reference_model(), assets.reference_tokenizer()
    windows = rap.load_windows("bundled", tokenizer, num_windows=WINDOWS, window=TOKENS)
    needs = {"pairs", "gradients", "values"}
    return dense_layers(model), rap.calibrate(model, windows, needs)


def _plain(figure: Figure, *place: int) -> Axes:
    axes = figure.add_subplot(*place)
    axes.grid(axis="y", color=themed.COLORS["line"], linewidth=0.6)
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
        color = (
            themed.COLORS["soft"]
            if group >= 0
            else themed.COLORS[("one", "two", "three")[-1 - group]]
        )
        axes.plot(pair, turn, "o", color=color, markersize=7)
    for edge in EDGES[-1]:
        axes.axhline(edge, color=themed.COLORS["soft"], linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0, edge * 1.15, f"{edge:g} rad", color=themed.COLORS["soft"], fontsize=11)
    axes.set_yscale("log")
    axes.set_xlabel("pair")
    axes.set_ylabel(f"rotation over {context:,} tokens, rad")


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
        axes.sharey(figure.axes[0])
        choices = (("pairs", (), "soft"), ("merged pairs", EDGES[-1], "one"))
        everything = spectrum(read_GPP[head], key_GPP[head], frequencies, context, EDGES[-1]).sum()
        for label, edges, color in choices:
            saved = spectrum(read_GPP[head], key_GPP[head], frequencies, context, edges)
            lost = [share * float(saved.sum() / everything) for share in _tail(saved)]
            # With fewer slots all is lost, and what pairs do together is counted by groups alone.
            slots = range(FEWEST_SLOTS, len(lost))
            axes.plot(
                slots, lost[FEWEST_SLOTS:], color=themed.COLORS[color], label=label, linewidth=2
            )
        axes.set_xlabel(f"slots kept, KV head {head}")
        if head == 0:
            axes.set_ylabel("estimated loss increase,\nshare of all")
            axes.legend(frameon=False)
    figure.axes[0].set_ylim(0, None)


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
                axes.add_patch(Rectangle(place, side, side, color=themed.COLORS["one"]))
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
        axes.plot(lost, color=themed.COLORS["soft"], label="channels", linewidth=2)
        axes.plot(_tail(best[head]), color=themed.COLORS["two"], label="directions", linewidth=2)
        axes.set_xlabel(f"width kept, KV head {head}")
        axes.set_ylim(0, None)
        if head == 0:
            axes.set_ylabel("squared error, relative\nto keeping nothing")
            axes.legend(frameon=False)


def _expected(figure: Figure) -> None:
    """Estimated and measured loss increase of the bundled model."""
    path = REPOSITORY / "experiments" / "analyses" / "analysis-loss.json"
    rows = json.loads(path.read_text("utf-8"))["data"]["rows"]
    axes = _plain(figure)
    budgets = sorted({row["budget"] for row in rows})
    # The labels of a curve are on its side away from the other, that of its end is behind it.
    looks = (("one", (7, -17), "left"), ("two", (-8, 5), "right"))
    for budget, (color, aside, side) in zip(budgets, looks, strict=True):
        own = [row for row in rows if row["budget"] == budget]
        places = [row["expected"] for row in own], [row["measured"] for row in own]
        axes.plot(*places, "o-", color=themed.COLORS[color], label=f"budget {budget}", markersize=7)
        end = max(places[0])
        for row in own:
            behind = row["expected"] == end
            axes.annotate(
                f"{row['retain']:g}",
                (row["expected"], row["measured"]),
                (9, -4) if behind else aside,
                textcoords="offset points",
                ha="left" if behind else side,
                fontsize=10,
                color=themed.COLORS[color],
            )
    axes.margins(y=0.12)
    ends = [
        max(1e-9, min(min(r["expected"], r["measured"]) for r in rows)),
        max(max(r["expected"], r["measured"]) for r in rows),
    ]
    axes.plot(
        ends, ends, color=themed.COLORS["soft"], linewidth=1, linestyle=(0, (4, 3)), label="equal"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("estimated, nats/token")
    axes.set_ylabel("measured, nats/token")
    axes.legend(frameon=False)


DRAWINGS: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
    "turns": (WIDE, _turns),
    "folding": (WIDE, _folding),
    "groups": ((6.0, 6.0), _groups),
    "subspace": (WIDE, _subspace),
    "expected": (WIDE, _expected),
    **sketches.SKETCHES,
}


def main(folder: Path = FOLDER) -> None:
    """Write every drawing as a file next to the pages that show it."""
    for name in DRAWINGS:
        with matplotlib.rc_context(themed.SETTINGS):
            themed.save(drawn(name), folder / f"{name}.svg")


if __name__ == "__main__":
    main()
