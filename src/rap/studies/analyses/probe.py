"""One layer pruned, all others dense: the layers that pruning damages most."""

from dataclasses import replace

from matplotlib.axes import Axes

from .study import Analysis, Data, Study, curve_a_group, dense_line, paper_cut

RETAINS = (0.7, 0.5)


def measure(study: Study) -> Data:
    """Perplexity with each single layer pruned to each ratio by the paper's pairs and channels.

    Layers that read another's keys and values are pruned with that one.
    """
    rows = []
    for retain in RETAINS:
        # Uniform: the layer that is left is cut to the ratio itself.
        method = paper_cut(retain, budget="uniform")
        plan = study.plan(method)
        for index, layer in enumerate(plan.layers):
            shape = plan.shapes[index]
            if layer is None or shape is None or shape.source is not None:
                continue
            alone = [
                one if index in (other, shape and shape.source) else None
                for other, (one, shape) in enumerate(zip(plan.layers, plan.shapes, strict=True))
            ]
            perplexity = study.after(method, replace(plan, layers=tuple(alone)))
            rows.append({"retain": retain, "layer": index, "perplexity": perplexity})
    return {"dense": study.perplexity(study.model), "rows": rows, "how": study.note}


def table(data: Data) -> Data:
    """One row per layer, pruned alone.

    `data` is what `measure` gave. Cells are perplexities, a column a ratio.
    """
    values = {(row["layer"], row["retain"]): row["perplexity"] for row in data["rows"]}
    layers = sorted({layer for layer, _ in values})
    retains = sorted({retain for _, retain in values}, reverse=True)
    return {
        "title": "One layer pruned, the others dense",
        "note": (
            f"{data['how']} Pairs and value channels by root-Fisher. The paper (Llama-3-8B, 0.5): "
            "10.8 on average for the first four layers, 9.0 for the last four, 8.6 between, "
            "8.28 dense; layer 2 alone 13.4."
        ),
        "header": ["layer", *(f"perplexity at {retain:g}" for retain in retains)],
        "rows": [
            ["none", *(f"{data['dense']:.2f}" for _ in retains)],
            *([layer, *(f"{values[layer, retain]:.2f}" for retain in retains)] for layer in layers),
        ],
    }


def draw(data: Data, axes: Axes) -> None:
    """Perplexity against the layer that was pruned."""
    dense_line(axes, data["dense"])
    label = "retain {:g}".format
    curve_a_group(axes, data["rows"], by="retain", x="layer", y="perplexity", label=label)
    axes.set_xlabel("layer that is pruned")
    axes.set_ylabel("perplexity")


ANALYSIS = Analysis("probe", "Which layer does pruning hurt?", measure, table, draw)
