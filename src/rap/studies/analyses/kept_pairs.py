"""Which pairs survive: how often a pair is kept, against its index and its wavelength.

Pair j turns by theta_j a token, so its wavelength is 2 pi / theta_j tokens.
Shapes: P pairs, G KV heads, M kept pairs.
"""

import math

import torch
from matplotlib.axes import Axes

from ...methods.dense import dense_layers
from ...model.errors import UnsupportedModelError
from .study import Analysis, Data, Study, paper_cut, percent, spearman

RETAINS = (0.7, 0.5)
ROWS = 8  # of the table: pairs are put together so that there are about so many


def measure(study: Study) -> Data:
    """Share of the heads of all layers that keep a pair, for every pair [P].

    Layers without rotation have no pairs and are left out. Raises UnsupportedModelError where
    layers have pairs of their own, or none has any.
    """
    rotations = dense_layers(study.model).frequencies
    found = [pairs for pairs in rotations if pairs is not None and len(pairs)]
    if not found:
        raise UnsupportedModelError("no layer of this model rotates: it has no pairs to count")
    frequencies = found[0]
    if any(len(f) == len(frequencies) and not torch.equal(f, frequencies) for f in found):
        raise UnsupportedModelError(
            "the layers of this model rotate at different frequencies: there is no one axis of "
            "pairs to count on"
        )
    wavelengths = [2 * math.pi / value if value else math.inf for value in frequencies.tolist()]
    return {
        "wavelengths": wavelengths,
        "kept": {f"{retain:g}": _kept(study, retain, len(wavelengths)) for retain in RETAINS},
    }


def _kept(study: Study, retain: float, num_pairs: int) -> list[float]:
    count, heads = torch.zeros(num_pairs), 0
    for layer in study.plan(paper_cut(retain)).layers:
        if layer is not None and layer.frequency_GM.numel():
            if int(layer.frequency_GM.max()) >= num_pairs:
                raise UnsupportedModelError(
                    "the layers of this model have different numbers of pairs: there is no one "
                    "axis of pairs to count on"
                )
            count += torch.bincount(layer.frequency_GM.flatten().long(), minlength=num_pairs)
            heads += layer.frequency_GM.shape[0]
    return (count / heads).tolist()


def table(data: Data) -> Data:
    """Neighboring pairs put together, and how far the order of keeping follows the index.

    `data` is what `measure` gave. Wavelengths are in tokens for a full turn, cells the share of
    heads in percent that keep a pair, a column a ratio.
    """
    waves, kept = data["wavelengths"], data["kept"]
    step = max(1, len(waves) // ROWS)
    rows = []
    for start in range(0, len(waves), step):
        part = slice(start, start + step)
        rows.append(
            [
                f"{start}-{start + len(waves[part]) - 1}",
                f"{waves[part][0]:,.0f}-{waves[part][-1]:,.0f}",
                *(percent(sum(rates[part]) / len(rates[part])) for rates in kept.values()),
            ]
        )
    order = torch.arange(len(waves)).double()
    trends = [float(spearman(order, torch.tensor(rates).double())) for rates in kept.values()]
    rows.append(["Spearman with the index", "", *(f"{trend:.2f}" for trend in trends)])
    return {
        "title": "Which pairs are kept",
        "note": (
            "Share of heads, over all layers, that keep the pairs, by root-Fisher with adaptive "
            "budgets. The paper (Llama-3-8B) finds slow pairs, of high index, kept more often."
        ),
        "header": ["pairs", "wavelength, tokens", *(f"kept at {retain}" for retain in kept)],
        "rows": rows,
    }


def draw(data: Data, axes: Axes) -> None:
    """Keep rate against wavelength, a logarithmic axis that is even in the pair's index."""
    for retain, rates in data["kept"].items():
        points = [(w, 100 * rate) for w, rate in zip(data["wavelengths"], rates, strict=True)]
        shown = [point for point in points if math.isfinite(point[0])]
        axes.plot(*zip(*shown, strict=True), "o-", markersize=3, label=f"retain {retain}")
    axes.set_xscale("log")
    axes.set_xlabel("wavelength of the pair, tokens (pair index rises to the right)")
    axes.set_ylabel("heads that keep it, %")


ANALYSIS = Analysis("kept-pairs", "Which pairs are kept?", measure, table, draw)
