"""Figures drawn from result data, never from numbers typed by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter


def quality_against_cache(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Perplexity against KV bytes per token; `rows` hold `retain` (1.0: dense) and both figures."""
    rows = sorted(rows, key=lambda row: row["kv_bytes_per_token"])
    dense = next(row for row in rows if row["retain"] == 1.0)
    share = [row["kv_bytes_per_token"] / dense["kv_bytes_per_token"] for row in rows]
    quality = [row["perplexity"] for row in rows]
    # A Figure of its own, not pyplot: no global state, no display.
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.axhline(dense["perplexity"], color="0.6", linewidth=1, linestyle="--", label="dense")
    axes.plot(share, quality, marker="o", color="#1f5fa8", label="pruned")
    for x, row in zip(share, rows, strict=True):
        axes.annotate(
            f"{row['perplexity']:.1f}",
            (x, row["perplexity"]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.margins(x=0.06, y=0.16)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"KV cache, share of the dense {dense['kv_bytes_per_token']:,} bytes per token")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
