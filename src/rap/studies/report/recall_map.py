"""Recall of a comparison as heat maps, methods x distance at every retain ratio: what they show.

The page makes tables of them. The colour of a square is mixed by the style sheet from its share, so
that it follows a dark page; the share is written into it, so that nothing is lost where colours are
not printed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

NARROW = 6  # columns of a map that has another one beside it


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
