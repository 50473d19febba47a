"""Where one pool of K and V leaves keys short, layer by layer, and what that costs."""

from matplotlib.axes import Axes

from .share import kept_parts
from .study import RETAINS, Analysis, Data, Study, paper_cut, percent

MEASURED = (0.7, 0.5)


def measure(study: Study) -> Data:
    """What K keeps of every layer in one pool; perplexity of the pool and of equal widths."""
    rows = []
    for retain in RETAINS:
        plan = study.plan(paper_cut(retain, key_share="pooled"))
        layers = {
            str(index): layer.key_width / shape.head_dim
            for index, (layer, shape) in enumerate(zip(plan.pairs, plan.shapes, strict=True))
            if layer is not None and shape is not None
        }
        row = {"retain": retain, **kept_parts(plan), "layers": layers}
        if retain in MEASURED:
            row["perplexity"] = {
                "pooled": study.after(paper_cut(retain, key_share="pooled"), plan),
                "balanced": study.after(paper_cut(retain)),
            }
        rows.append(row)
    return {"rows": rows, "how": study.note}


def table(data: Data) -> Data:
    """One row a retain ratio.

    `data` is what `measure` gave. Kept shares of K and V are in percent, the rest perplexities;
    perplexities that were not measured are blank.
    """
    rows = []
    for row in data["rows"]:
        worst = min(row["layers"], key=row["layers"].get)
        values = row.get("perplexity")
        cost = [f"{values[name]:.2f}" for name in ("pooled", "balanced")] if values else ["", ""]
        rows.append(
            [
                f"{row['retain']:g}",
                percent(row["keys"]),
                percent(row["values"]),
                f"{percent(row['layers'][worst])} (layer {worst})",
                *cost,
            ]
        )
    return {
        "title": "Keys in one pool with values",
        "note": (
            f"Root-Fisher, adaptive budgets. {data['how']} The paper (Llama-3-8B): K keeps about "
            "21% at 0.5, and LongBench loses 8 points at 0.7."
        ),
        "header": ["retain", "K kept", "V kept", "layer with least K", "pooled", "K as wide as V"],
        "rows": rows,
    }


def draw(data: Data, axes: Axes) -> None:
    """The part of K that every layer keeps, a curve a ratio."""
    for row in data["rows"]:
        layers = sorted(row["layers"], key=int)
        axes.plot(
            [int(layer) for layer in layers],
            [100 * row["layers"][layer] for layer in layers],
            "o-",
            label=f"retain {row['retain']:g}",
        )
    axes.set_ylim(0, 104)
    axes.set_xlabel("layer")
    axes.set_ylabel("key channels kept in one pool, %")


ANALYSIS = Analysis("starve", "Where does one pool starve keys?", measure, table, draw)
