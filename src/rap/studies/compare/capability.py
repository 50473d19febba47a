"""What each method saves and keeps: the paper's table `capability`, from the cells alone."""

from collections.abc import Sequence
from typing import Any

from ...methods import METHODS
from .variants import DENSE

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
    """The family of a method as the grid names it; its own name if nobody knows it any more."""
    name = method.split(":")[0]
    return METHODS[name].family if name in METHODS else name


def capability(name: str, dense: Record, cut: Sequence[Record], recovered: dict[str, str]) -> Table:
    """A row a method, sorted by family: what shrinks, what is rebuilt, and how far it can go.

    `recovered` maps the recoveries to what their columns are called. No rows if all methods are of
    one family: there is nothing to tell apart.
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
    columns = [f"smallest cache, {recovered.get(recover, recover)}" for recover in recoveries]
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
        "tokens, with what is rebuilt. Smallest cache: the least measured one down to which "
        f"perplexity stays within {CLOSE - 1:.0%} of {DENSE}."
    )
