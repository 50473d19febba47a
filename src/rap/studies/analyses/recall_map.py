"""Recall of a comparison as heat maps: methods x distance at every retain ratio, as HTML tables.

The colour of a square is mixed by the style sheet from its share, so that it follows a dark page;
the share is written into it, so that nothing is lost where colours are not printed.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

Record = dict[str, Any]

NARROW = 6  # columns of a map that has another one beside it


def recall_maps(dense: Record, cut: Sequence[Record], labels: dict[str, str]) -> str:
    """One map a recovery, in HTML; nothing where recall was not measured.

    `labels` maps the recoveries to what their maps are called.
    """
    if not dense.get("recall"):
        return ""
    maps = (
        _map(dense, [cell for cell in cut if cell["recover"] == recover], label)
        for recover, label in labels.items()
    )
    return f'<div class="maps">{"".join(maps)}</div>'


def _map(dense: Record, cells: Sequence[Record], label: str) -> str:
    retains = sorted({cell["retain"] for cell in cells}, reverse=True)
    distances = [entry["distance"] for entry in dense["recall"]]
    span = f' colspan="{len(distances)}"'
    groups = "".join(f"<th{span}>retain {retain:g}</th>" for retain in retains)
    columns = "".join(f"<th>{distance:,}</th>" for distance in distances) * len(retains)
    found = {(cell["method"], cell["retain"]): _by_distance(cell) for cell in cells}
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    # The dense model beside all of them, at every ratio the same.
    found |= {(dense["method"], retain): _by_distance(dense) for retain in retains}
    rows = "".join(
        f"<tr><th>{escape(method).replace(':', ':<wbr>')}</th>"
        + "".join(
            _square(found.get((method, retain), {}).get(distance), first=distance == distances[0])
            for retain in retains
            for distance in distances
        )
        + "</tr>"
        for method in (dense["method"], *methods)
    )
    facts = dense["recall"][0]["num_facts"]
    said = f"Recall of one of {facts} numbers after so many tokens; {label}"
    wide = " broad" if len(retains) * len(distances) > NARROW else ""
    return (
        f'<figure class="map{wide}"><div class="wide" tabindex="0"><table>'
        f'<thead><tr><th rowspan="2">tokens</th>{groups}</tr><tr>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div><figcaption>{escape(said)}</figcaption></figure>"
    )


def _by_distance(cell: Record) -> dict[int, float]:
    return {entry["distance"]: entry["accuracy"] for entry in cell.get("recall") or []}


def _square(share: float | None, *, first: bool) -> str:
    start = " start" if first else ""
    if share is None:
        return f'<td class="square{start}"></td>'
    return f'<td class="square{start}" style="--share:{share:.0%}">{share:.0%}</td>'
