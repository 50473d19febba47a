"""Figures drawn from result data, never from numbers typed by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

LABELS = {"paper": "RAP as published", "rap": "rap", "recovered": "rap, recovered"}
LINEAR = 3.0  # times dense, up to which a linear axis tells curves apart
COLORS = {"paper": "#b5651d", "rap": "#1f5fa8", "recovered": "#3a8f4f"}


def quality_against_cache(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Perplexity against KV bytes per token, one curve a method.

    `rows` hold `method` (one of them "dense"), `kv_bytes_per_token` and `perplexity`.
    """
    dense = next(row for row in rows if row["method"] == "dense")
    # A Figure of its own, not pyplot: no global state, no display.
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.axhline(
        dense["perplexity"],
        color="0.6",
        linewidth=1,
        linestyle="--",
        label=f"dense, {dense['perplexity']:.1f}",
    )
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "dense"):
        points = sorted(
            (row["kv_bytes_per_token"] / dense["kv_bytes_per_token"], row["perplexity"])
            for row in rows
            if row["method"] == method
        )
        color = COLORS.get(method)
        axes.plot(
            *zip(*points, strict=True), marker="o", color=color, label=LABELS.get(method, method)
        )
        for point in points:
            axes.annotate(
                f"{point[1]:.1f}",
                point,
                # What is recovered stands below the curve it came from.
                xytext=(8, -15) if method == "recovered" else (6, 6),
                textcoords="offset points",
                color=color,
                fontsize=9,
            )
    if max(row["perplexity"] for row in rows) > LINEAR * dense["perplexity"]:
        axes.set_yscale("log")  # or one broken cut would press all others onto the axis
    axes.margins(x=0.09, y=0.12)
    shares = {row["kv_bytes_per_token"] / dense["kv_bytes_per_token"] for row in rows} - {1.0}
    axes.set_xticks(sorted({round(share, 2) for share in shares}))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(f"KV cache, share of the dense {dense['kv_bytes_per_token']:,} bytes per token")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
