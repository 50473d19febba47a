"""What each method saves and keeps: the paper's tables `capability` and `isoparam`.

Both are made from the cells alone. The second compares at the same attention parameters instead of
the same cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ...methods import METHODS
from .variants import DENSE, recovery_name

Record = dict[str, Any]
Table = dict[str, Any]

# The rows of the paper's table, in its order; a family that it does not know comes after them.
ORDER = ("pair pruning", "channel pruning", "head pruning", "low rank", "activation side")
CLOSE = 1.05  # of dense perplexity: what counts as staying near it
ROOM = 0.01  # a cost shrinks with the cache if it is at most so much more of dense than the cache
SAVINGS = {
    "cache": lambda cell: max(cell["kv_bytes_per_token"], cell["prefill_kv_bytes_per_token"]),
    "parameters": lambda cell: cell["attention_parameters"],
    "FLOPs": lambda cell: cell["attention_flops"]["value"],
}


def family(method: str) -> str:
    """The family of a method as the grid names it; its own name if it is unknown."""
    name = method.split(":")[0]
    return METHODS[name].family if name in METHODS else name


def capability(name: str, dense: Record, cut: Sequence[Record]) -> Table:
    """A row per method, sorted by family: what shrinks, what is reconstructed, possible ratios.

    No rows if all methods are of one family: there is nothing to tell apart.
    """
    methods = list(dict.fromkeys(record["method"] for record in cut))
    methods.sort(key=lambda method: _place(family(method)))
    recoveries = list(dict.fromkeys(record["recover"] for record in cut))
    rows = []
    for method in methods:
        here = [record for record in cut if record["method"] == method]
        rows.append(
            [
                method,
                family(method),
                *(saves(what, here, dense) for what in SAVINGS),
                "no" if any(record["reconstructs"] for record in here) else "yes",
                *(furthest(here, recover, dense) for recover in recoveries),
            ]
        )
    columns = [f"smallest cache, {recovery_name(recover)}" for recover in recoveries]
    return {
        "title": f"What each method saves, {name}",
        "note": _note(dense),
        "header": ["method", "family", *SAVINGS, "reconstruction free", *columns],
        "rows": rows if len({family(method) for method in methods}) > 1 else [],
    }


def saves(what: str, records: Sequence[Record], dense: Record) -> str:
    """Whether a cost shrinks with the cache, and its part of dense at the smallest cache.

    `yes` if at every measured ratio it is no more of dense than the cache is, to within ROOM; `no`
    if at the smallest cache it is not below dense; `in part` between.
    """
    cost = SAVINGS[what]
    parts = {_kept(record, dense): cost(record) / cost(dense) for record in records}
    least = parts[min(parts)]
    follows = all(part <= min(kept + ROOM, 1) for kept, part in parts.items())
    verdict = "yes" if follows else "in part" if least < 1 else "no"
    return f"{verdict} ({least:.0%})"


def furthest(records: Sequence[Record], recover: str, dense: Record) -> str:
    """The smallest measured cache down to which perplexity stays within CLOSE of dense."""
    here = [record for record in records if record["recover"] == recover]
    reached = None
    for record in sorted(here, key=lambda one: -_kept(one, dense)):
        # Not a number is not close either.
        if not record["perplexity"] <= CLOSE * dense["perplexity"]:
            break
        reached = _kept(record, dense)
    if reached is not None:
        return f"{reached:.0%}"
    return "none" if here else ""


def _kept(record: Record, dense: Record) -> float:
    return float(record["kv_bytes_per_token"] / dense["kv_bytes_per_token"])


def _place(name: str) -> tuple[int, str]:
    return (ORDER.index(name), "") if name in ORDER else (len(ORDER), name)


def _note(dense: Record) -> str:
    context = dense["attention_flops"]["context"]
    return (
        f"Yes: at every measured ratio the cost is no more of {DENSE} than the cache is, to "
        f"{ROOM:.0%}; in part: below {DENSE}, but above the cache's part; in brackets the part "
        f"at the smallest measured cache. FLOPs of attention in one decode step at {context:,} "
        "tokens, with what is reconstructed. Smallest cache: the least measured one down to which "
        f"perplexity stays within {CLOSE - 1:.0%} of {DENSE}."
    )


CellFormat = Callable[[Record], str]

REFERENCE = ("rap", 0.7)
NEAR = 0.05  # of dense parameters: what counts as the same


def matched(
    name: str,
    dense: Record,
    cut: Sequence[Record],
    quality: dict[str, CellFormat],
) -> Table:
    """`rap` and every reconstructing method, at the ratio with the nearest parameters.

    `quality` maps what is shown of a cell to how. No rows if the comparison lacks the reference, or
    a method that reconstructs.
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
    columns = [f"{what}, {recovery_name(r)}" for what in quality for r in recoveries]
    return table | {
        "note": _matched_note(target, far),
        "header": ["method", "KV", "parameters", "projection FLOPs", *columns],
        "rows": [_matched_row(group, dense, quality, recoveries) for group in groups],
    }


def parameters(record: Record, dense: Record) -> float:
    """Attention parameters as a part of the dense model's."""
    return float(record["attention_parameters"] / dense["attention_parameters"])


def nearest(cut: Sequence[Record], method: str, dense: Record, target: float) -> list[Record]:
    """The records of a method at the one ratio whose parameters come nearest to `target`."""
    here = [record for record in cut if record["method"] == method]
    best = min(here, key=lambda record: abs(parameters(record, dense) - target))
    return [record for record in here if record["retain"] == best["retain"]]


def _matched_row(
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


def _matched_note(target: float, far: Sequence[str]) -> str:
    note = (
        "Every method that reconstructs keys or values, at that measured ratio where its attention "
        f"parameters come nearest to the {target:.1%} of {REFERENCE[0]} at {REFERENCE[1]:g}."
    )
    if far:
        note += f" No measured ratio comes within {NEAR:.0%} of dense: {', '.join(far)}."
    return note
