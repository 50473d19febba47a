"""The loss that `planning.losses` estimates for pruning against the measured loss."""

import math

from matplotlib.axes import Axes

from ...methods import Rap
from ...methods.dense import dense_layers
from ...methods.values import layer_losses
from ...planning.budgets import Budget
from ...planning.losses import one_width
from ...planning.plan import Plan
from .study import RETAINS, Analysis, Data, Study, curve_a_group

BUDGETS: tuple[Budget, ...] = ("error", "uniform")


def measure(study: Study) -> Data:
    """Estimated and measured nats/token of `rap` with separate heads, with both its budgets."""
    dense = study.perplexity(study.model)
    costs = curves(study)
    rows = []
    for budget in BUDGETS:
        for retain in RETAINS:
            method = Rap(retain=retain, align=2, budget=budget, merge=1, layers="all")
            plan = study.plan(method)
            perplexity = study.after(method, plan)
            rows.append(
                {
                    "budget": budget,
                    "retain": retain,
                    "expected": expected(plan, costs),
                    "measured": math.log(perplexity / dense),
                    "perplexity": perplexity,
                }
            )
    return {"dense": dense, "rows": rows, "how": study.note}


def curves(study: Study) -> list[list[float]]:
    """What every width of every layer is expected to cost, in nats per token; empty: no attention.

    Of separate heads, so layers that cannot be mixed drop what is dropped of those.
    """
    method = Rap(budget="error", merge=1, layers="all")
    dense = dense_layers(study.model).with_statistics(study.statistics(method.needs))
    return [
        one_width(*layer_losses(layer, dense.context, method.orders(layer, scores)))
        if layer is not None
        else []
        for layer, scores in zip(dense.layers, method.scores(dense), strict=True)
    ]


def expected(plan: Plan, curves: list[list[float]]) -> float:
    """Sum over layers of what their widths cost, nats per token; steps are of two channels.

    The curve of a layer whose keys and values others read is theirs too, and they have none.
    """
    return sum(
        curve[layer.value_width // 2]
        for layer, curve in zip(plan.pairs, curves, strict=True)
        if layer is not None and curve
    )


def table(data: Data) -> Data:
    """One row a budget and retain ratio.

    `data` is what `measure` gave. Losses are over the dense model, in nats/token, as expected
    and as measured; then the perplexities that both mean.
    """
    return {
        "title": "Estimated and measured loss increase of pruning",
        "note": (
            f"{data['how']} Folded keys and value subspaces; dense {data['dense']:.2f}. Expected: "
            "half the gradient's second moment times what is pruned, summed over layers as if they "
            "did not interact, in nats per token."
        ),
        "header": [
            "budget, retain",
            "expected nats",
            "measured nats",
            "expected perplexity",
            "measured",
        ],
        "rows": [
            [
                f"{row['budget']} {row['retain']:g}",
                f"{row['expected']:.4f}",
                f"{row['measured']:.4f}",
                f"{data['dense'] * math.exp(row['expected']):.2f}",
                f"{row['perplexity']:.2f}",
            ]
            for row in data["rows"]
        ],
    }


def draw(data: Data, axes: Axes) -> None:
    """Measured against expected, with the line on which both are the same."""
    largest = max(max(row["expected"], row["measured"]) for row in data["rows"])
    axes.plot([0, largest], [0, largest], ":", color="0.6", label="as expected")
    label = "budget {}".format
    curve_a_group(axes, data["rows"], by="budget", x="expected", y="measured", label=label)
    axes.set_xlabel("expected, nats per token")
    axes.set_ylabel("measured, nats per token")


ANALYSIS = Analysis("loss", "Is the loss of pruning what was estimated?", measure, table, draw)
