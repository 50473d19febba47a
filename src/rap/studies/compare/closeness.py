"""KL of each pruned model to the dense model, with intervals: a table per retain ratio.

And how it does on texts of other kinds than the first, a table a retain ratio too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...checkpoint.card import interval_text
from ...evaluation.quality.intervals import perplexity_ratio_interval, share_interval
from .variants import DENSE, recovery_name

HEADER = ("method", "PPL", "PPL of dense", "KL", "KL p99", "top-1")

Record = dict[str, Any]
Table = dict[str, Any]


def closeness(name: str, retain: float, dense: Record, cut: Sequence[Record]) -> Table:
    """A row per cell of one retain ratio, the dense model first.

    No rows if no cell was measured so, as in a comparison of an earlier release.
    """
    here = of_ratio(retain, cut)
    rows = [_row(row, record, dense) for row, record in ((DENSE, dense), *here)]
    measured = any("kl" in record or _paired(record, dense) for _, record in here)
    return {
        "title": f"KL to the dense model at retain {retain:g}, {name}",
        "note": _note(dense),
        "header": [*HEADER, *(f"recall at {entry['distance']:,}" for entry in _recall(dense))],
        "rows": rows if measured else [],
    }


def of_ratio(retain: float, cut: Sequence[Record]) -> list[tuple[str, Record]]:
    """The cells of one retain ratio, each with the name of its row: its recovery if several are."""
    here = [record for record in cut if record["retain"] == retain]
    if len({record["recover"] for record in here}) < 2:
        return [(record["method"], record) for record in here]
    return [(f"{record['method']}, {recovery_name(record['recover'])}", record) for record in here]


def perplexity_text(value: float) -> str:
    """Two decimals, or none from a thousand on."""
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def perplexity_ratio(record: Record, dense: Record) -> dict[str, float]:
    """Perplexity as a multiple of dense, with its paired interval where both have their windows."""
    if not _paired(record, dense):
        return {"value": record["perplexity"] / dense["perplexity"]}
    pair = (one["evaluation"]["window_nats"] for one in (record, dense))
    return vars(perplexity_ratio_interval(*pair))


def _paired(record: Record, dense: Record) -> bool:
    """Whether losses of the same windows are there for both; older cells have none."""
    ours, theirs = (one["evaluation"].get("window_nats") or [] for one in (record, dense))
    same = all(record["evaluation"].get(k) == dense["evaluation"].get(k) for k in ("window", "bos"))
    return same and 0 < len(ours) == len(theirs)


def _row(name: str, record: Record, dense: Record) -> list[str]:
    recalled = {entry["distance"]: entry for entry in _recall(record)}
    return [
        name,
        perplexity_text(record["perplexity"]),
        interval_text(perplexity_ratio(record, dense), ".3f"),
        interval_text(record["kl"], ".3g") if "kl" in record else "",
        f"{record['kl_p99']:.3g}" if "kl_p99" in record else "",
        interval_text(record["top1"], ".1%") if "top1" in record else "",
        *(_recalled(recalled.get(entry["distance"])) for entry in _recall(dense)),
    ]


def _recall(record: Record) -> list[Record]:
    """Its recall by distance, where the number of questions is told; empty if it was skipped."""
    return [entry for entry in record.get("recall") or [] if "num_documents" in entry]


def _recalled(entry: Record | None) -> str:
    if entry is None:
        return ""
    return interval_text(vars(share_interval(entry["accuracy"], entry["num_documents"])), ".0%")


def _note(dense: Record) -> str:
    scored, entries = dense["evaluation"], _recall(dense)
    recall = (
        f" Recall of one of {entries[0]['num_facts']} numbers, in {entries[0]['num_documents']} "
        "documents, with Wilson's intervals."
        if entries
        else ""
    )
    return (
        "Perplexity as a multiple of dense; KL(dense || pruned) of next-token "
        "distributions in nats/token, its mean and its 99th percentile over "
        f"tokens; share of tokens that both think most likely. {scored['num_windows']} windows of "
        f"{scored['window']:,} tokens; in brackets 95% bootstrap intervals over them, of the "
        "multiple by pairs of the same window."
        f"{recall}"
    )


def other_texts(name: str, retain: float, dense: Record, cut: Sequence[Record]) -> Table:
    """A row per cell of one retain ratio, the dense model first; no rows for one dataset."""
    texts = list(dense.get("other_texts") or {})
    here = (DENSE, dense), *of_ratio(retain, cut)
    rows = [_other_row(row, record, dense, texts) for row, record in here]
    counts = {t: dense["other_texts"][t]["evaluation"]["num_windows"] for t in texts}
    return {
        "title": f"Other datasets at retain {retain:g}, {name}",
        "note": (
            "Perplexity, in brackets what it lost over dense, and KL to the dense model in "
            f"nats/token; {_read_text(counts)}, of "
            f"{dense['evaluation']['window']:,} tokens."
        ),
        "header": ["method", *(f"{Path(t).name} {what}" for t in texts for what in ("PPL", "KL"))],
        "rows": rows if texts else [],
    }


def _read_text(counts: dict[str, int]) -> str:
    """How many windows of each text were read."""
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} windows of each text"
    return " and ".join(f"{count} windows of {Path(text).name}" for text, count in counts.items())


def _other_row(name: str, record: Record, dense: Record, texts: Sequence[str]) -> list[str]:
    row = [name]
    for text in texts:
        figures = (record.get("other_texts") or {}).get(text)
        row += _figures(figures, dense["other_texts"][text]) if figures else ["", ""]
    return row


def _figures(figures: Record, dense: Record) -> list[str]:
    value = figures["perplexity"]
    shown = perplexity_text(value)
    if figures is not dense:
        shown = f"{shown} ({value / dense['perplexity'] - 1:+.0%})"
    return [shown, f"{figures['kl']['value']:.3g}" if "kl" in figures else ""]
