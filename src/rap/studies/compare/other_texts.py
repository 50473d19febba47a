"""How the cuts do on texts of other kinds than the first: a table a retain ratio."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .closeness import of_ratio, perplexity_text
from .variants import DENSE

Record = dict[str, Any]
Table = dict[str, Any]


def other_texts(
    name: str, retain: float, dense: Record, cut: Sequence[Record], recovered: dict[str, str]
) -> Table:
    """A row a cell of one retain ratio, the dense one first; no rows if one text was measured.

    `recovered` maps the recoveries to what they are called.
    """
    texts = list(dense.get("other_texts") or {})
    here = (DENSE, dense), *of_ratio(retain, cut, recovered)
    rows = [_row(row, record, dense, texts) for row, record in here]
    counts = {t: dense["other_texts"][t]["evaluation"]["num_windows"] for t in texts}
    return {
        "title": f"On texts of other kinds at retain {retain:g}, {name}",
        "note": (
            "Perplexity, in brackets what it lost over dense, and KL divergence from the dense "
            f"model in nats a token; {_read(counts)}, of {dense['evaluation']['window']:,} tokens."
        ),
        "header": ["method", *(f"{Path(t).name} {what}" for t in texts for what in ("PPL", "KL"))],
        "rows": rows if texts else [],
    }


def _read(counts: dict[str, int]) -> str:
    """How many windows of each text were read."""
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} windows of each text"
    return " and ".join(f"{count} windows of {Path(text).name}" for text, count in counts.items())


def _row(name: str, record: Record, dense: Record, texts: Sequence[str]) -> list[str]:
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
