"""How much of the budget keys get: shares of K, and K and V in one pool."""

from matplotlib.axes import Axes

from ...planning.plan import Plan
from .study import Analysis, Data, Study, dense_line, paper_cut, percent

SHARES = (0.35, 0.5, 0.65, "pooled")
RETAIN = 0.5


def measure(study: Study) -> Data:
    """Perplexity of RAP as published with every share, and what K and V then keep."""
    rows = []
    for share in SHARES:
        method = paper_cut(RETAIN, key_share=share)
        plan = study.plan(method)
        rows.append({"share": share, **kept_parts(plan), "perplexity": study.after(method, plan)})
    return {
        "dense": study.perplexity(study.model),
        "rows": rows,
        "retain": RETAIN,
        "how": study.note,
    }


def kept_parts(plan: Plan) -> dict[str, float]:
    """Shares of the dense key and value channels that a plan keeps, over all layers."""
    kept = {"keys": 0, "values": 0}
    dense = 0
    for layer, shape in zip(plan.pairs, plan.shapes, strict=True):
        if shape is not None:
            kept["keys"] += layer.key_width if layer is not None else shape.head_dim
            kept["values"] += layer.value_width if layer is not None else shape.head_dim
            dense += shape.head_dim
    return {name: width / dense for name, width in kept.items()}


def table(data: Data) -> Data:
    """One row a share of K.

    `data` is what `measure` gave. Kept shares are in percent, the last column is perplexity.
    """
    return {
        "title": f"K's share of the budget, retain {data['retain']:g}",
        "note": (
            f"{data['how']} Dense: {data['dense']:.2f}. Pairs and value channels by root-Fisher, "
            "adaptive budgets. The paper (Llama-3-8B, after recovery): 11.64, 11.37 and 13.61 for "
            "0.35, 0.5 and 0.65."
        ),
        "header": ["K share", "K kept", "V kept", "perplexity"],
        "rows": [
            [
                str(row["share"]),
                percent(row["keys"]),
                percent(row["values"]),
                f"{row['perplexity']:.2f}",
            ]
            for row in data["rows"]
        ],
    }


def draw(data: Data, axes: Axes) -> None:
    """Perplexity against the part of the keys that is kept."""
    dense_line(axes, data["dense"])
    fixed = [row for row in data["rows"] if row["share"] != "pooled"]
    pooled = [row for row in data["rows"] if row["share"] == "pooled"]
    for rows, style, label in ((fixed, "o-", "fixed share"), (pooled, "s", "one pool")):
        keys = [100 * row["keys"] for row in rows]
        axes.plot(keys, [row["perplexity"] for row in rows], style, label=label)
    axes.set_xlabel("key channels kept, %")
    axes.set_ylabel("perplexity")


ANALYSIS = Analysis("share", "How much of the budget do keys need?", measure, table, draw)
