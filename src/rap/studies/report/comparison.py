"""What a page draws of the cells of a comparison: quality against cost, and maps of recall.

Recall is shown as heat maps, methods x distance at every retain ratio; the page makes tables of
them. The colour of a square is mixed by the style sheet from its share, so that it follows a dark
page; the share is written into it, so that nothing is lost where colours are not printed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ...methods.naming import SEPARATE
from .charts import ChartPoint, Series, Style, legend_key, line_chart, styles_of

Record = dict[str, Any]

DENSE = "dense"
# These have a colour of their own, alone or as published; the rest is grey where methods are many.
MATTER = ("rap", "rap:paper", "palu", "svdllm", "a3", "kvpruner")
# Nats a token over dense; differences below are noise, and a cut model can be better than dense.
LOSS_FLOOR = 1e-3


@dataclass(frozen=True)
class RecallMap:
    """Rows of a method and its shares, at every retain ratio one a distance; None: not measured."""

    retains: list[float]
    distances: list[int]
    rows: list[tuple[str, list[float | None]]]
    said: str

    @property
    def broad(self) -> bool:
        """Whether it takes the whole width of a page."""
        return len(self.retains) * len(self.distances) > NARROW


@dataclass(frozen=True)
class Figure:
    """A chart, and its caption."""

    chart: Markup
    caption: str


@dataclass(frozen=True)
class Comparison:
    """The key to all figures by name, the figures, and the maps of recall."""

    legend: list[tuple[str, Markup]]
    figures: list[Figure]
    maps: list[RecallMap]


def comparison_of(cells: Sequence[Record], prefix: str) -> Comparison | None:
    """What is drawn of cells, None without a dense one and others; ids begin with `prefix`.

    One figure a recovery of: loss over dense against KV bytes, the same against FLOPs, and recall.
    """
    dense = next((cell for cell in cells if cell["method"] == DENSE), None)
    cut = [cell for cell in cells if cell["method"] != DENSE]
    if dense is None or not cut:
        return None
    styles = styles_of(list(dict.fromkeys(cell["method"] for cell in cut)), matters)
    labels = {
        recover: "no recovery" if recover == "none" else f"recovery: {recover}"
        for recover in dict.fromkeys(cell["recover"] for cell in cut)
    }
    kinds = [(_loss_chart, label) for label in SHARES]
    kinds += [(_recall_chart, next(iter(SHARES)))] if dense.get("recall") else []
    figures: list[Figure] = []
    for draw, x_label in kinds:
        for recover, after in labels.items():
            here = [cell for cell in cut if cell["recover"] == recover]
            chart, caption = draw(here, dense, styles, x_label, f"{prefix}-{len(figures)}")
            if chart is not None:
                figures.append(Figure(chart, f"{caption}; {after}"))
    # The dense model is drawn by charts of recall alone: loss is over it.
    keys: dict[str, Style | None] = {DENSE: None} if dense.get("recall") else {}
    legend = _legend({**keys, **styles}, prefix)
    return Comparison(legend, figures, recall_maps(dense, cut, labels))


def matters(name: str) -> bool:
    """Whether a method is in `MATTER`, or is one of those as published or with separate heads."""
    plain = (name.removesuffix(f":{form}") for form in ("paper", SEPARATE))
    return name in MATTER or any(form in MATTER for form in plain)


def _legend(keys: dict[str, Style | None], prefix: str) -> list[tuple[str, Markup]]:
    return [
        (name, legend_key(style, f"{prefix}-key{number}"))
        for number, (name, style) in enumerate(keys.items())
    ]


def _loss_chart(
    here: Sequence[Record], dense: Record, styles: dict[str, Style], x_label: str, prefix: str
) -> tuple[Markup | None, str]:
    def point(cell: Record) -> ChartPoint:
        share, loss = SHARES[x_label](cell, dense), _loss(cell, dense)
        said = f"perplexity {cell['perplexity']:,.2f}, {loss:+.4f} nats, at {share:.1%}"
        return ChartPoint(share, loss, said)

    labels = (x_label, "loss over dense, nats/token")
    series = _series(here, styles, point)
    chart = line_chart(series, styles, labels, prefix=prefix, floor=LOSS_FLOOR)
    return chart, f"Loss over dense (perplexity {dense['perplexity']:,.2f}), logarithmic"


def _recall_chart(
    here: Sequence[Record], dense: Record, styles: dict[str, Style], x_label: str, prefix: str
) -> tuple[Markup | None, str]:
    def point(cell: Record) -> ChartPoint:
        share, recalled = SHARES[x_label](cell, dense), _recalled(cell)
        return ChartPoint(share, recalled, f"{recalled:.1f}% at {share:.1%}")

    labels = (x_label, "recall, % of numbers given back")
    series = _series(here, styles, point)
    chart = line_chart(series, styles, labels, prefix=prefix, reference=_recalled(dense))
    return chart, "Recall, mean of all distances"


def _series(
    here: Sequence[Record], styles: dict[str, Style], point: Callable[[Record], ChartPoint]
) -> list[Series]:
    return [Series(name, [point(c) for c in here if c["method"] == name]) for name in styles]


def _loss(cell: Record, dense: Record) -> float:
    return math.log(cell["perplexity"] / dense["perplexity"])


def _recalled(cell: Record) -> float:
    return 100 * sum(entry["accuracy"] for entry in cell["recall"]) / len(cell["recall"])


SHARES: dict[str, Callable[[Record, Record], float]] = {
    "KV bytes, part of dense": lambda c, d: c["kv_bytes_per_token"] / d["kv_bytes_per_token"],
    "attention FLOPs of a decode step, part of dense": lambda c, d: (
        c["attention_flops"]["value"] / d["attention_flops"]["value"]
    ),
}


NARROW = 6  # columns of a map that has another one beside it


def recall_maps(dense: Record, cut: Sequence[Record], labels: dict[str, str]) -> list[RecallMap]:
    """One map a recovery; none where recall was not measured.

    `labels` maps the recoveries to what their maps are called.
    """
    if not dense.get("recall"):
        return []
    return [
        _map(dense, [cell for cell in cut if cell["recover"] == recover], label)
        for recover, label in labels.items()
    ]


def _map(dense: Record, cells: Sequence[Record], label: str) -> RecallMap:
    retains = sorted({cell["retain"] for cell in cells}, reverse=True)
    distances = [entry["distance"] for entry in dense["recall"]]
    recalled = {(cell["method"], cell["retain"]): _by_distance(cell) for cell in cells}
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    # The dense model beside all of them, at every ratio the same.
    recalled |= {(dense["method"], retain): _by_distance(dense) for retain in retains}
    places = list(itertools.product(retains, distances))
    rows = [
        (method, [recalled.get((method, retain), {}).get(distance) for retain, distance in places])
        for method in (dense["method"], *methods)
    ]
    facts = dense["recall"][0]["num_facts"]
    said = f"Recall of one of {facts} numbers after so many tokens; {label}"
    return RecallMap(retains, distances, rows, said)


def _by_distance(cell: Record) -> dict[int, float]:
    return {entry["distance"]: entry["accuracy"] for entry in cell.get("recall") or []}
