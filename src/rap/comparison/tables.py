"""The tables of a comparison in the paper's form, from the records of its cells."""

from collections.abc import Callable, Sequence
from typing import Any

from .variants import DENSE

Record = dict[str, Any]
Table = dict[str, Any]

# The paper's two side tables, by the methods they set beside each other.
STEELMAN = ("kvpruner", "kvpruner-indexed", "rap:paper", "rap")
UNCONVERGED = ("elitekv", "matryoshka")
RECOVERED = {"none": "cut only", "closed-form": "refitted"}


def tables(name: str, records: Sequence[Record], failed: Sequence[Record]) -> list[Table]:
    """All tables there are data for: one a retain ratio, sweeps, steelman, non-converging."""
    if not records or records[0]["method"] != DENSE:
        return []
    dense, cut = records[0], records[1:]
    retains = sorted({record["retain"] for record in cut}, reverse=True)
    found = [_main(name, retain, dense, cut, failed) for retain in retains]
    # Once is enough: it holds for all of them.
    for table in found[:1]:
        table["note"] = f"{_note(dense)} {table['note']}".strip()
    if len(retains) > 2:
        found += [_sweep(name, recover, dense, cut) for recover in _recoveries(cut)]
    steelman = [record for record in cut if record["method"] in STEELMAN]
    if len({record["method"] for record in steelman} & set(STEELMAN[:3])) == 3:
        title = f"Single channels at their best against whole pairs, {name}"
        found.append(_by_retain(title, steelman, dense))
    unconverged = [record for record in cut if record["method"].split(":")[0] in UNCONVERGED]
    if unconverged and len(_recoveries(cut)) > 1:
        title = f"Methods that the paper's recovery did not bring back, {name}"
        found.append(_by_retain(title, unconverged, dense))
    return [table for table in found if table["rows"]]


def _recoveries(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["recover"] for record in records))


def _methods(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["method"] for record in records))


def _main(
    name: str, retain: float, dense: Record, cut: Sequence[Record], failed: Sequence[Record]
) -> Table:
    here = [record for record in cut if record["retain"] == retain]
    recoveries = _recoveries(here)
    published = any("paper" in record for record in here)
    columns = {"paper PPL": lambda cell: _paper(cell, "perplexity")} if published else {}
    quality = {**QUALITY, **columns}
    context = dense["attention_flops"]["context"]
    header = ["method", *COST, f"FLOPs at {context:,}", "rebuilds K/V"]
    header += [f"{what}, {RECOVERED.get(r, r)}" for what in quality for r in recoveries]
    rows = []
    for method in [DENSE, *_methods(here)]:
        found = {r["recover"]: r for r in here if r["method"] == method}
        cells = [dense] * len(recoveries) if method == DENSE else [found.get(r) for r in recoveries]
        # Recovery leaves the shapes alone, so any of the cells tells the cost.
        one = next(cell for cell in cells if cell is not None)
        cost = [show(one, dense) for show in COST.values()]
        cost += [_flops(one, dense), "yes" if one["reconstructs"] else "no"]
        shown = [show(cell) if cell else "" for show in quality.values() for cell in cells]
        rows.append([method, *cost, *shown])
    broken = [
        f"{record['method']} ({record['recover']})"
        for record in failed
        if record["retain"] == retain
    ]
    return {
        "title": f"At retain {retain:g}, {name}",
        "note": f"Failed: {', '.join(broken)}." if broken else "",
        "header": header,
        "rows": rows,
    }


def _sweep(name: str, recover: str, dense: Record, cut: Sequence[Record]) -> Table:
    here = [record for record in cut if record["recover"] == recover]
    methods = _methods(here)
    rows = [["dense", *[f"{dense['perplexity']:.2f}"] * len(methods)]]
    for retain in sorted({record["retain"] for record in here}):
        at = {record["method"]: record for record in here if record["retain"] == retain}
        rows.append([f"{retain:g}", *(_perplexity(at[m]) if m in at else "" for m in methods)])
    title = f"Perplexity over the retain ratio, {RECOVERED.get(recover, recover)}, {name}"
    return {"title": title, "header": ["retain", *methods], "rows": rows}


def _by_retain(title: str, records: Sequence[Record], dense: Record) -> Table:
    recoveries = _recoveries(records)
    rows = [
        [
            method,
            f"{retain:g}",
            *(
                next(
                    (
                        _perplexity(r)
                        for r in records
                        if (r["method"], r["retain"], r["recover"]) == (method, retain, recover)
                    ),
                    "",
                )
                for recover in recoveries
            ),
        ]
        for method in _methods(records)
        for retain in sorted({record["retain"] for record in records}, reverse=True)
    ]
    return {
        "title": title,
        "note": f"Perplexity; dense {dense['perplexity']:.2f}.",
        "header": ["method", "retain", *(RECOVERED.get(r, r) for r in recoveries)],
        "rows": rows,
    }


def _note(dense: Record) -> str:
    scored = dense["evaluation"]
    parts = [
        f"KV and parameters of attention as parts of dense ({dense['kv_bytes_per_token']:,} bytes "
        "a token), counted from the cache tensors and weights; FLOPs of attention in one decode "
        "step, projections alone and with all products at that context; decode time of a whole "
        "step, as part of the dense model's timed in turn with it. Perplexity over "
        f"{scored['num_windows']} windows of {scored['window']:,} tokens"
    ]
    if dense.get("recall"):
        far = " and ".join(f"{cell['distance']:,}" for cell in dense["recall"])
        parts.append(
            f"recall of one of {dense['recall'][0]['num_facts']} numbers after {far} tokens; "
            "copying is the loss saved (nats per token) on a passage read a second time"
        )
    return "; ".join(parts) + "."


def _share(key: str) -> Callable[[Record, Record], str]:
    return lambda cell, dense: f"{cell[key] / dense[key]:.1%}"


def _flops(cell: Record, dense: Record) -> str:
    return f"{cell['attention_flops']['value'] / dense['attention_flops']['value']:.1%}"


def _decode(cell: Record, dense: Record) -> str:
    if "decode_seconds" not in cell:
        return ""
    if cell is dense:
        return f"{1000 * cell['decode_seconds']:.2f} ms"
    return f"{cell['decode_seconds'] / cell['dense_decode_seconds']:.0%}"


def _perplexity(cell: Record) -> str:
    value = cell["perplexity"]
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def _recall(cell: Record) -> str:
    return " / ".join(f"{entry['accuracy']:.0%}" for entry in cell.get("recall", []))


def _copying(cell: Record) -> str:
    return f"{cell['copy_gain']:.2f}" if "copy_gain" in cell else ""


def _paper(cell: Record, key: str) -> str:
    value = (cell.get("paper") or {}).get(key)
    return "" if value is None else str(value)


COST: dict[str, Callable[[Record, Record], str]] = {
    "KV": _share("kv_bytes_per_token"),
    "attn params": _share("attention_parameters"),
    "decode": _decode,
    "projection FLOPs": _share("projection_flops"),
}
QUALITY: dict[str, Callable[[Record], str]] = {
    "PPL": _perplexity,
    "recall": _recall,
    "copying": _copying,
}
