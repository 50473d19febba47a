"""Scorer against layer budget: magnitude or Fisher, uniform or adaptive, before any recovery."""

from matplotlib.axes import Axes

from .study import Analysis, Data, Study, dense_line, paper_cut

RETAIN = 0.7
SCORERS = {"M": "magnitude", "F": "fisher"}
BUDGETS = {"U": "uniform", "A": "adaptive"}
# The paper's bars share one pool of K and V; its method gives K and V one width.
SHARES = {"pooled": "one pool", 0.5: "K as wide as V"}


def measure(study: Study) -> Data:
    """Perplexity of every scorer with every budget, for both ways to divide it."""
    rows = []
    for letter, score in SCORERS.items():
        for other, budget in BUDGETS.items():
            perplexities = {
                name: study.after(paper_cut(RETAIN, score=score, budget=budget, key_share=share))
                for share, name in SHARES.items()
            }
            name = f"{letter}{other}: {score}, {budget}"
            rows.append({"name": name, "perplexity": perplexities})
    return {
        "dense": study.perplexity(study.model),
        "rows": rows,
        "retain": RETAIN,
        "how": study.note,
    }


def table(data: Data) -> Data:
    """One row a combination of scorer and budget.

    `data` is what `measure` gave. Cells are perplexities, a column for each way to divide the
    budget between K and V; title and note say at which ratio, and what the paper found.
    """
    shares = list(data["rows"][0]["perplexity"])
    return {
        "title": f"Scorer and layer budget, retain {data['retain']:g}",
        "note": (
            f"{data['how']} Dense: {data['dense']:.2f}. The paper finds MU unusable, Fisher and "
            "adaptive budgets each a gain, and FA the best before recovery, in one pool of K and V."
        ),
        "header": ["setting", *shares],
        "rows": [
            [row["name"], *(f"{row['perplexity'][share]:.2f}" for share in shares)]
            for row in data["rows"]
        ],
    }


def draw(data: Data, axes: Axes) -> None:
    """Bars, a group a combination."""
    shares = list(data["rows"][0]["perplexity"])
    width = 0.8 / len(shares)
    for number, share in enumerate(shares):
        places = [at + (number - (len(shares) - 1) / 2) * width for at in range(len(data["rows"]))]
        heights = [row["perplexity"][share] for row in data["rows"]]
        axes.bar_label(axes.bar(places, heights, width, label=share), fmt="%.1f", fontsize=8)
    dense_line(axes, data["dense"])
    axes.set_xticks(range(len(data["rows"])), [row["name"].split(":")[0] for row in data["rows"]])
    axes.set_ylabel("perplexity")


ANALYSIS = Analysis("allocation", "Which scorer, which layer budget?", measure, table, draw)
