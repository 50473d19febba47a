"""Root-Fisher against the weighted Fisher: order, chosen sets, and loss after pruning.

Shapes: G KV heads, P pairs.
"""

import torch
from matplotlib.axes import Axes
from torch import Tensor

from ...methods.dense import dense_layers
from ...planning.budgets import uniform
from ...planning.scores import score_layers
from .study import Analysis, Data, Study, overlap, paper_cut, percent, spearman

RETAINS = (0.9, 0.7, 0.5)
SCORES = ("fisher", "weighted-fisher")


def measure(study: Study) -> Data:
    """Spearman of every head; overlap of the sets kept at uniform widths; perplexity of both."""
    heads = [_heads(study, score) for score in SCORES]
    orders = [spearman(*pair) for pair in zip(*heads, strict=True)]
    rows = []
    for retain in RETAINS:
        shared = [
            overlap(first, second, uniform(retain, [first.shape[1]])[0])
            for first, second in zip(*heads, strict=True)
        ]
        cuts = [study.after(paper_cut(retain, score=score, budget="uniform")) for score in SCORES]
        rows.append(
            {
                "retain": retain,
                "overlap": torch.cat(shared).tolist(),
                "perplexity": dict(zip(SCORES, cuts, strict=True)),
            }
        )
    return {"spearman": [order.tolist() for order in orders], "rows": rows, "how": study.note}


def _heads(study: Study, score: str) -> list[Tensor]:
    """Scores of the pairs of every head, [G, P] a layer that rotates."""
    dense = dense_layers(study.model)
    statistics = study.statistics({"fisher"}).layers
    scored = score_layers(score, statistics, dense.weights, dense.shapes)
    return [x.pairs_GP for x in scored if x is not None and x.pairs_GP.shape[1]]


def table(data: Data) -> Data:
    """One row a retain ratio.

    `data` is what `measure` gave. Cells are shares of pairs in percent, and perplexities; the
    rank correlation of the two scores (Spearman) is in the note.
    """
    order = torch.tensor([value for layer in data["spearman"] for value in layer])
    rows = []
    for row in data["rows"]:
        shared = torch.tensor(row["overlap"])
        rows.append(
            [
                f"{row['retain']:g}",
                percent(float(shared.mean())),
                percent(float((shared == 1).double().mean())),
                *(f"{row['perplexity'][score]:.2f}" for score in SCORES),
            ]
        )
    return {
        "title": "Root-Fisher against weighted Fisher",
        "note": (
            f"Mean Spearman of the pairs' order {float(order.mean()):.2f}, from "
            f"{float(order.min()):.2f} to {float(order.max()):.2f}, over {len(order)} heads. "
            f"Uniform widths. {data['how']} The paper (256 heads of Llama-3-8B): Spearman 0.67; "
            "overlap 95%, 85% and 75% at 0.9, 0.7 and 0.5, under 4% of heads identical."
        ),
        "header": [
            "retain",
            "pairs in common",
            "heads with one set",
            "perplexity, root-Fisher",
            "weighted",
        ],
        "rows": rows,
    }


def draw(data: Data, axes: Axes) -> None:
    """Overlap of every head, a column of dots a ratio."""
    for row in data["rows"]:
        shared = [100 * value for value in row["overlap"]]
        axes.plot([row["retain"]] * len(shared), shared, "o", color="tab:blue", alpha=0.4)
    means = [100 * sum(row["overlap"]) / len(row["overlap"]) for row in data["rows"]]
    axes.plot([row["retain"] for row in data["rows"]], means, "k-", label="mean over heads")
    axes.invert_xaxis()
    axes.set_xlabel("retain ratio")
    axes.set_ylabel("kept pairs in common, %")


ANALYSIS = Analysis("scores", "Do the two Fisher scores choose alike?", measure, table, draw)
