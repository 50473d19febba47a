"""The tables of a comparison in the paper's form, from the records of its cells.

`summarize` makes one result file of them: a record of every cell, and the tables.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .capability import capability, matched
from .closeness import closeness, other_texts, perplexity_text
from .grid import Cell, failure, finished
from .variants import DENSE, recovery_name

Record = dict[str, Any]
Table = dict[str, Any]

# The paper's two side tables, by the methods they set beside each other.
STEELMAN = (
    "kvpruner",
    "kvpruner:paper",
    "kvpruner-indexed",
    "kvpruner-indexed:paper",
    "rap:paper",
    "rap:merge=1",
    "rap",
)
UNCONVERGED = ("elitekv", "matryoshka")
MISSED = 0.025  # of dense: a cache that is farther from what was asked is pointed out


def tables(name: str, records: Sequence[Record], failed: Sequence[Record]) -> list[Table]:
    """All tables there are data for: two a retain ratio, capabilities, matched compute, sweeps,
    steelman and non-converging.
    """
    if not records or records[0]["method"] != DENSE or len(records) == 1:
        return []
    dense, cut = records[0], records[1:]
    retains = sorted({record["retain"] for record in cut}, reverse=True)
    made = []
    for retain in retains:
        made.append(_main(name, retain, dense, cut, failed))
        made.append(closeness(name, retain, dense, cut))
        made.append(other_texts(name, retain, dense, cut))
    # Once is enough: it holds for all of them.
    made[0]["note"] = f"{_note(dense)} {made[0]['note']}".strip()
    made.append(capability(name, dense, cut))
    seen = {k: show for k, show in MATCHED_QUALITY.items() if any(map(show, cut))}
    made.append(matched(name, dense, cut, seen))
    if len(retains) > 2:
        for what, show in SWEPT.items():
            made += [_sweep(name, what, show, recover, dense, cut) for recover in _recoveries(cut)]
    steelman = [record for record in cut if record["method"] in STEELMAN]
    if {_base(record) for record in steelman} == {"kvpruner", "kvpruner-indexed", "rap"}:
        made += [_steelman(name, recover, dense, steelman) for recover in _recoveries(steelman)]
    unconverged = [record for record in cut if _base(record) in UNCONVERGED]
    if unconverged and len(_recoveries(cut)) > 1:
        made.append(_unconverged(name, unconverged, dense))
    return [table for table in made if table["rows"]]


def _base(record: Record) -> str:
    """The method without recipe and settings."""
    return str(record["method"]).split(":")[0]


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
    columns = {"paper PPL": _paper} if published else {}
    measured = {k: show for k, show in QUALITY.items() if any(map(show, (dense, *here)))}
    quality = {**measured, **columns}
    context = dense["attention_flops"]["context"]
    cost = {what: show for what, show in COST.items() if show(dense, dense)}
    header = ["method", *cost, f"FLOPs at {context:,}", "reconstructs K/V"]
    header += [f"{what}, {recovery_name(r)}" for what in quality for r in recoveries]
    rows = []
    for method in [DENSE, *_methods(here)]:
        by_recovery = {r["recover"]: r for r in here if r["method"] == method}
        cells = (
            [dense] * len(recoveries)
            if method == DENSE
            else [by_recovery.get(r) for r in recoveries]
        )
        # Recovery leaves the shapes alone, so any of the cells tells the cost.
        one = next(cell for cell in cells if cell is not None)
        spent = [show(one, dense) for show in cost.values()]
        spent += [_flops(one, dense), "yes" if one["reconstructs"] else "no"]
        shown = [show(cell) if cell else "" for show in quality.values() for cell in cells]
        rows.append([method, *spent, *shown])
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


def _sweep(
    name: str,
    what: str,
    show: Callable[[Record], str],
    recover: str,
    dense: Record,
    cut: Sequence[Record],
) -> Table:
    here = [record for record in cut if record["recover"] == recover and show(record)]
    methods = _methods(here)
    rows = [["dense", *[show(dense)] * len(methods)]] if here else []
    for retain in sorted({record["retain"] for record in here}):
        at = {record["method"]: record for record in here if record["retain"] == retain}
        rows.append([f"{retain:g}", *(show(at[m]) if m in at else "" for m in methods)])
    title = f"{what} over the retain ratio, {recovery_name(recover)}, {name}"
    note = _missed(here, dense)
    return {"title": title, "note": note, "header": ["retain", *methods], "rows": rows}


def _missed(records: Sequence[Record], dense: Record) -> str:
    """Which cells do not cache what was asked, so that nobody reads them as if they did."""
    key = "kv_bytes_per_token"
    missed = [
        f"{record['method']} {record[key] / dense[key]:.0%} at {record['retain']:g}"
        for record in records
        if abs(record[key] / dense[key] - record["retain"]) > MISSED
    ]
    return f"Caches another part of dense than asked: {', '.join(missed)}." if missed else ""


def _steelman(name: str, recover: str, dense: Record, records: Sequence[Record]) -> Table:
    """A row a variant, a column a ratio, and times the perplexity of RAP, if that is here."""
    here = [record for record in records if record["recover"] == recover]
    retains = sorted({record["retain"] for record in here})
    value = {(record["method"], record["retain"]): record for record in here}
    base = next((one for one in ("rap:paper", "rap:merge=1", "rap") if one in _methods(here)), None)
    compared = retains if base else []
    rows = []
    for method in sorted(_methods(here), key=STEELMAN.index):
        cells = [value.get((method, retain)) for retain in retains]
        below = [value.get((base, retain)) for retain in compared]
        rows.append(
            [
                method,
                *(_perplexity(cell) if cell else "" for cell in cells),
                *(
                    f"{cell['perplexity'] / rap['perplexity']:.2f}" if cell and rap else ""
                    for cell, rap in zip(cells, below, strict=False)
                ),
            ]
        )
    return {
        "title": "Single channels at their best against RoPE pairs, "
        f"{recovery_name(recover)}, {name}",
        "note": f"Perplexity; dense {dense['perplexity']:.2f}.",
        "header": [
            "method",
            *(f"retain {retain:g}" for retain in retains),
            *(f"times {base}, {retain:g}" for retain in compared),
        ],
        "rows": rows,
    }


def _unconverged(name: str, records: Sequence[Record], dense: Record) -> Table:
    """A row a method and ratio, a column a recovery."""
    recoveries = _recoveries(records)
    value = {(r["method"], r["retain"], r["recover"]): _perplexity(r) for r in records}
    rows = [
        [method, f"{retain:g}", *(value.get((method, retain, r), "") for r in recoveries)]
        for method in _methods(records)
        for retain in sorted({record["retain"] for record in records})
    ]
    return {
        "title": f"Methods that the paper's recovery left unconverged, {name}",
        "note": f"Perplexity; dense {dense['perplexity']:.2f}.",
        "header": ["method", "retain", *(recovery_name(r) for r in recoveries)],
        "rows": rows,
    }


def _note(dense: Record) -> str:
    scored = dense["evaluation"]
    parts = [
        f"KV and parameters of attention as parts of dense ({dense['kv_bytes_per_token']:,} "
        "bytes/token), counted from the cache tensors and weights; FLOPs of attention in one "
        f"decode step, projections alone and with all products at that context{_times(dense)}. "
        f"Perplexity over {scored['num_windows']} windows of {scored['window']:,} tokens"
    ]
    if dense.get("recall"):
        far = " and ".join(f"{cell['distance']:,}" for cell in dense["recall"])
        parts.append(
            f"recall of one of {dense['recall'][0]['num_facts']} numbers after {far} tokens; "
            "copying is the loss saved (nats per token) on a passage read a second time"
        )
    return "; ".join(parts) + "."


def _times(dense: Record) -> str:
    tokens = dense.get("prefill_tokens")
    timed = ["of a whole decode step"] if "decode_seconds" in dense else []
    timed += [f"to read {tokens:,} tokens"] if tokens else []
    if not timed:
        return ""
    return f"; time {' and '.join(timed)}, as part of the dense model's timed interleaved with it"


def _share(key: str) -> Callable[[Record, Record], str]:
    return lambda cell, dense: f"{cell[key] / dense[key]:.1%}"


def _flops(cell: Record, dense: Record) -> str:
    return f"{cell['attention_flops']['value'] / dense['attention_flops']['value']:.1%}"


def _time(what: str) -> Callable[[Record, Record], str]:
    """Of a cell as part of the dense model's in turn with it; of the dense model itself in ms."""

    def shown(cell: Record, dense: Record) -> str:
        if f"{what}_seconds" not in cell:
            return ""
        if cell is dense:
            return f"{1000 * cell[f'{what}_seconds']:.2f} ms"
        return f"{cell[f'{what}_seconds'] / cell[f'dense_{what}_seconds']:.0%}"

    return shown


def _perplexity(cell: Record) -> str:
    return perplexity_text(cell["perplexity"])


def _kl(cell: Record) -> str:
    return f"{cell['kl']['value']:.3g}" if "kl" in cell else ""


def _recall(cell: Record) -> str:
    return " / ".join(f"{entry['accuracy']:.0%}" for entry in cell.get("recall", []))


def _copying(cell: Record) -> str:
    return f"{cell['copy_gain']:.2f}" if "copy_gain" in cell else ""


def _paper(cell: Record) -> str:
    value = (cell.get("paper") or {}).get("perplexity")
    return "" if value is None else str(value)


COST: dict[str, Callable[[Record, Record], str]] = {
    "KV": _share("kv_bytes_per_token"),
    "attn params": _share("attention_parameters"),
    "decode": _time("decode"),
    "prefill": _time("prefill"),
    "projection FLOPs": _share("projection_flops"),
}
QUALITY: dict[str, Callable[[Record], str]] = {
    "PPL": _perplexity,
    "recall": _recall,
    "copying": _copying,
}
SWEPT: dict[str, Callable[[Record], str]] = {
    "Perplexity": _perplexity,
    "KL to the dense model": _kl,
}
MATCHED_QUALITY: dict[str, Callable[[Record], str]] = {
    "PPL": _perplexity,
    "KL": _kl,
    "recall": _recall,
}


KEPT_VERSIONS = ("rap", "commit", "python", "packages", "device", "time")


def summarize(
    name: str,
    cells: Sequence[Cell],
    folder: Callable[[Cell], Path],
    provenance: dict[str, Any],
    *,
    paper: Sequence[dict[str, Any]] = (),
    command: Callable[[Cell], str] = str,
) -> dict[str, Any]:
    """Everything that is known of the `cells`: finished ones as records, failed ones apart.

    `paper` entries name a `method`, `retain` and `recover`, and join the cell of these three;
    `command` gives the command line that repeats one cell.
    """
    records, failed = [], []
    for cell in cells:
        where = folder(cell)
        result, error = finished(where), failure(where)
        about = {
            "cell": cell.name,
            "method": cell.spec,
            "retain": cell.retain,
            "recover": cell.recover,
        }
        if result is not None:
            published = _published(paper, about)
            shared = {"command": command(cell), **({"paper": published} if published else {})}
            records.append({**about, **shared, **_record(cell, result)})
        elif error is not None:
            failed.append({**about, "command": command(cell), "error": error["error"]})
    shown = tables(name, records, failed)
    return {
        "title": f"Methods side by side: {name}",
        "tables": shown,
        "cells": records,
        "failed": failed,
        "paper": list(paper),
        "command": provenance["command"],
        "provenance": provenance,
    }


def _published(paper: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any] | None:
    for entry in paper:
        if all(entry.get(key, "none") == about[key] for key in ("method", "retain", "recover")):
            return {k: v for k, v in entry.items() if k not in ("method", "retain", "recover")}
    return None


def _record(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    made = result["provenance"]
    kept = {key: value for key, value in result.items() if key not in ("provenance", "recovery")}
    recovery = result.get("recovery") or {}
    return {
        **kept,
        "settings": cell.config.get("method"),
        "recovery": {k: v for k, v in recovery.items() if k.startswith("perplexity")},
        "dense_fingerprint": cell.config["dense_fingerprint"],
        "seed": cell.config["seed"],
        # Cells of an older release have no commit.
        "provenance": {key: made.get(key) for key in KEPT_VERSIONS},
    }
