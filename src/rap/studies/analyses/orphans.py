"""How many kept channels have lost the partner they rotate with, by method and retain ratio.

Shapes: G KV heads, W kept key channels, P pairs, M kept pairs.
"""

from collections.abc import Iterable

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...methods.kvpruner import IndexedKvPruner
from ...model.kinds.base import WeightsPlan
from ...model.kinds.single_channels import partners
from ...planning.plan import Plan
from .study import RETAINS, Analysis, Data, Study, paper_cut, percent


def pair_damage(kept: Iterable[tuple[Tensor, int]]) -> dict[str, float]:
    """Of layers of (kept channels [G, W], canonical and ascending; pairs P): who lost a partner.

    `orphans` is the share of kept rotating channels whose partner is gone, `broken` the share of
    pairs with a kept channel that have lost the other.
    """
    lone = rotating = 0
    for kept_GW, num_pairs in kept:
        rotates_GW = kept_GW < 2 * num_pairs
        _, sign_GW = partners(kept_GW, num_pairs)
        lone += int((rotates_GW & (sign_GW == 0)).sum())
        rotating += int(rotates_GW.sum())
    touched = lone + (rotating - lone) / 2
    return {"orphans": lone / rotating, "broken": lone / touched}


def chance(width: int, head_dim: int) -> float:
    """Orphans expected when the kept channels of a head are drawn at random."""
    return 1 - (width - 1) / (head_dim - 1)


def kept_channels(plan: Plan) -> Iterable[tuple[Tensor, int]]:
    """Key channels that a plan of RoPE pairs keeps: both halves of each, canonical."""
    for layer, shape in zip(plan.pairs, plan.shapes, strict=True):
        if layer is not None and shape is not None:
            pairs_GM, num_pairs = layer.frequency_GM.long(), shape.geometry.num_pairs
            yield torch.cat([pairs_GM, pairs_GM + num_pairs], dim=1), num_pairs


def measure(study: Study) -> Data:
    """Single channels (KVPruner) and RoPE pairs (RAP), both by root-Fisher with its budgets."""
    rows = []
    for retain in RETAINS:
        method = IndexedKvPruner.paper(retain=retain, align=2, layers="all")
        plan = study.plan(method)
        channels = _single_channels(plan)
        widths = [
            (kept.shape[1], dim) for (kept, _), dim in zip(channels, _heads(plan), strict=True)
        ]
        rows.append(
            {
                "retain": retain,
                "channels": pair_damage(channels),
                "pairs": pair_damage(kept_channels(study.plan(paper_cut(retain)))),
                # Weighed by width, as the shares above are.
                "chance": sum(w * chance(w, head_dim) for w, head_dim in widths)
                / sum(w for w, _ in widths),
            }
        )
    return {"rows": rows}


def _single_channels(plan: Plan) -> list[tuple[Tensor, int]]:
    return [
        (layer.weights["kept_channels"].long(), shape.geometry.num_pairs)
        for layer, shape in zip(plan.layers, plan.shapes, strict=True)
        if isinstance(layer, WeightsPlan) and shape is not None
    ]


def _heads(plan: Plan) -> list[int]:
    """Channels of a head of every planned layer, those that never rotate among them."""
    both = zip(plan.layers, plan.shapes, strict=True)
    return [shape.head_dim for layer, shape in both if layer is not None and shape is not None]


def table(data: Data) -> Data:
    """One row a retain ratio.

    `data` is what `measure` gave. Cells are shares of kept channels, or of pairs, in percent.
    """
    return {
        "title": "Channels that lost the partner they rotate with",
        "note": (
            "Single channels as KVPruner chooses them, RoPE pairs as RAP does, by root-Fisher "
            "with adaptive budgets. Orphans are kept key channels without their partner; broken "
            "pairs are those with just one channel left, of the pairs with any. The paper "
            "(Llama-3-8B): orphans from 12.1% at 0.9 to 62.7% at 0.5, broken 21.5% to 77.1%."
        ),
        "header": ["retain", "orphans", "broken pairs", "orphans by chance", "orphans, RAP"],
        "rows": [
            [
                f"{row['retain']:g}",
                percent(row["channels"]["orphans"]),
                percent(row["channels"]["broken"]),
                percent(row["chance"]),
                percent(row["pairs"]["orphans"]),
            ]
            for row in data["rows"]
        ],
    }


def draw(data: Data, axes: Axes) -> None:
    """Shares against the retain ratio."""
    rows = data["rows"]
    retains = [row["retain"] for row in rows]
    for label, style, values in (
        ("orphans, single channels", "o-", [row["channels"]["orphans"] for row in rows]),
        ("broken pairs, single channels", "s-", [row["channels"]["broken"] for row in rows]),
        ("orphans by chance", ":", [row["chance"] for row in rows]),
        ("orphans, whole pairs (RAP)", "^-", [row["pairs"]["orphans"] for row in rows]),
    ):
        axes.plot(retains, [100 * value for value in values], style, label=label)
    axes.invert_xaxis()
    axes.set_xlabel("retain ratio")
    axes.set_ylabel("%")


ANALYSIS = Analysis("orphans", "How many kept channels lost their partner?", measure, table, draw)
