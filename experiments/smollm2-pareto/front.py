"""The tables of pareto.py, from the rows that it measured: what is small for how little lost."""

from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
Table = dict[str, Any]

AS_IT_IS = "float32"
BUDGETS = (1.4, 2.0, 4.0, 8.0)  # times smaller
RECOVERED = {"none": "", "fit": " layer-wise", "fit+full": " distilled"}


def name_of(row: Row) -> str:
    """What a row is called: its model, unless dense, and what is on top of it."""
    model = "" if row["method"] == "dense" else model_name(row)
    weights = "" if row["weights"] == AS_IT_IS else f"weights {row['weights']}"
    parts = [model, row["press"] or "", row["bits"] or "", weights]
    return " + ".join(part for part in parts if part) or "dense"


def model_name(row: Row) -> str:
    """The model of a row."""
    if row["method"] == "dense":
        return "dense"
    return f"{row['method']} {row['retain']:g}{RECOVERED[row['recover']]}"


def cache_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows whose weights are as they are: weights in fewer bits save nothing of a cache."""
    return [row for row in rows if row["weights"] == AS_IT_IS]


def front(rows: Sequence[Row]) -> list[Row]:
    """Rows to which no other is at least as small and as near to dense, largest cache first."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["share"], row["kl"])):
        if not kept or row["kl"] < kept[-1]["kl"]:
            kept.append(row)
    return kept[::-1]


def best(rows: Sequence[Row], times: float) -> Row | None:
    """The row nearest to dense of those whose cache is at least so many times smaller."""
    small = [row for row in rows if row["share"] * times <= 1]
    return min(small, key=lambda row: (row["kl"], row["share"]), default=None)


def picks(rows: Sequence[Row]) -> Table:
    """The best of each sort at every budget."""
    found = cache_rows(rows)
    sorts = {
        "best of all": found,
        "best without pruning": [row for row in found if row["method"] == "dense"],
        "best with rap": [row for row in found if row["method"].partition(":")[0] == "rap"],
        "best of pruning alone": [row for row in found if not row["bits"] and not row["press"]],
    }
    return {
        "title": "What to pick, by how much smaller the cache shall be",
        "note": "KL to the dense model in nats/token, and how many times smaller the cache is.",
        "header": ["at least", *sorts],
        "rows": [
            [f"{times:g}x", *(_pick(best(some, times)) for some in sorts.values())]
            for times in BUDGETS
        ],
    }


def tables(rows: Sequence[Row], note: str) -> list[Table]:
    """All tables of the rows measured so far."""
    found = cache_rows(rows)
    bits = _unique(row["bits"] for row in found if not row["press"])
    evicted = sorted((row for row in found if row["press"]), key=_press)
    pressed = _unique((row["press"], row["bits"]) for row in evicted)
    made = [picks(rows), _front(found, note)]
    made.append(_grid("Quantized cache", found, [(None, one) for one in bits]))
    if pressed:
        made.append(_grid("Token eviction", found, pressed))
    if len(kinds := _unique(row["weights"] for row in rows)) > 1:
        made.append(_weights(rows, kinds))
    return made


def _front(rows: Sequence[Row], note: str) -> Table:
    return {
        "title": "The Pareto front: nothing measured is both smaller and lower in KL",
        "note": note,
        "header": ["what", "bytes/token", "times smaller", "KL", "top-1", "perplexity"],
        "rows": [
            [
                name_of(row),
                f"{row['bytes_per_token']:,.0f}",
                f"{1 / row['share']:.2f}",
                f"{row['kl']:.4f}",
                f"{row['top1']:.1%}",
                f"{row['perplexity']:.2f}",
            ]
            for row in front(rows)
        ],
    }


def _grid(title: str, rows: Sequence[Row], axes: Sequence[tuple[str | None, str | None]]) -> Table:
    """KL and how many times smaller, a row a model and a column a pair of press and bits."""
    held = {(model_name(row), row["press"], row["bits"]): row for row in rows}
    return {
        "title": title,
        "note": "KL to the dense model in nats/token, and how many times smaller the cache is.",
        "header": [
            "model",
            *(" + ".join(filter(None, axis)) or "cache as it is" for axis in axes),
        ],
        "rows": [
            [model, *(_pick(held.get((model, *axis)), named=False) for axis in axes)]
            for model in _unique(map(model_name, rows))
        ],
    }


def _weights(rows: Sequence[Row], kinds: Sequence[str]) -> Table:
    held = {(model_name(row), row["weights"]): row for row in rows if _plain(row)}
    return {
        "title": "Quantized weights, the cache as it is",
        "note": (
            "KL to the dense model in nats/token, and perplexity. int8 is torchao's, one scale "
            "a row; nf4 is bitsandbytes's, one scale per 64. Neither changes the cache."
        ),
        "header": ["model", *kinds],
        "rows": [
            [model, *(_quality(held.get((model, kind))) for kind in kinds)]
            for model in _unique(map(model_name, rows))
        ],
    }


def _pick(row: Row | None, *, named: bool = True) -> str:
    if row is None:
        return ""
    said = f"{row['kl']:.3f} ({1 / row['share']:.1f}x)"
    return f"{name_of(row)}: {said}" if named else said


def _quality(row: Row | None) -> str:
    return "" if row is None else f"{row['kl']:.3f}, {row['perplexity']:.2f}"


def _plain(row: Row) -> bool:
    return not row["bits"] and not row["press"]


def _press(row: Row) -> tuple[bool, str, str]:
    """By how much is evicted and whether bits are cut too, then by name."""
    return row["bits"] is not None, row["press"].partition(":")[2], row["press"]


def _unique(values: Iterator[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
