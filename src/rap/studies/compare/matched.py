"""The same attention parameters instead of the same cache: the paper's table `isoparam`."""

from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]
Table = dict[str, Any]
CellFormat = Callable[[Record], str]

REFERENCE = ("rap", 0.7)
NEAR = 0.05  # of dense parameters: what counts as the same


def matched(
    name: str,
    dense: Record,
    cut: Sequence[Record],
    quality: dict[str, CellFormat],
    recovered: dict[str, str],
) -> Table:
    """`rap` beside every method that reconstructs, at the ratio where its parameters come nearest.

    `quality` maps what is shown of a cell to how; `recovered` the recoveries to their names. No
    rows if the comparison lacks the reference, or a method that reconstructs.
    """
    reference = [r for r in cut if (r["method"], r["retain"]) == REFERENCE]
    rebuilding = list(dict.fromkeys(r["method"] for r in cut if r["reconstructs"]))
    table = {"title": f"The same attention parameters instead of the same cache, {name}"}
    if not reference or not rebuilding:
        return table | {"header": [], "rows": []}
    target = parameters(reference[0], dense)
    groups = [reference, *(nearest(cut, method, dense, target) for method in rebuilding)]
    recoveries = list(dict.fromkeys(r["recover"] for r in cut))
    far = [g[0]["method"] for g in groups if abs(parameters(g[0], dense) - target) > NEAR]
    columns = [f"{what}, {recovered.get(r, r)}" for what in quality for r in recoveries]
    return table | {
        "note": _note(target, far),
        "header": ["method", "KV", "parameters", "projection FLOPs", *columns],
        "rows": [_row(group, dense, quality, recoveries) for group in groups],
    }


def parameters(record: Record, dense: Record) -> float:
    """Attention parameters as a part of the dense model's."""
    return float(record["attention_parameters"] / dense["attention_parameters"])


def nearest(cut: Sequence[Record], method: str, dense: Record, target: float) -> list[Record]:
    """The records of a method at the one ratio whose parameters come nearest to `target`."""
    here = [record for record in cut if record["method"] == method]
    best = min(here, key=lambda record: abs(parameters(record, dense) - target))
    return [record for record in here if record["retain"] == best["retain"]]


def _row(
    group: Sequence[Record],
    dense: Record,
    quality: dict[str, CellFormat],
    recoveries: Sequence[str],
) -> list[str]:
    one, cells = group[0], {record["recover"]: record for record in group}
    costs = ("kv_bytes_per_token", "attention_parameters", "projection_flops")
    return [
        f"{one['method']} at {one['retain']:g}",
        *(f"{one[key] / dense[key]:.1%}" for key in costs),
        *(show(cells[r]) if r in cells else "" for show in quality.values() for r in recoveries),
    ]


def _note(target: float, far: Sequence[str]) -> str:
    note = (
        f"Every method that rebuilds keys or values, at that measured ratio where its attention "
        f"parameters come nearest to the {target:.1%} of {REFERENCE[0]} at {REFERENCE[1]:g}."
    )
    if far:
        note += f" No measured ratio comes within {NEAR:.0%} of dense: {', '.join(far)}."
    return note
