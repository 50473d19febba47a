"""The measured table and figure at the top of README.md, from the result files.

    python docs/first_page.py

What no result file has yet is left open in the table.
"""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Formatter, PercentFormatter

from rap.studies.report.captions import caption
from rap.studies.report.report import markdown_table

REPOSITORY = Path(__file__).parents[1]
EXPERIMENTS = REPOSITORY / "experiments"
README, FIGURE = REPOSITORY / "README.md", "docs/first-page.svg"
BEGIN, END = "<!-- measured: python docs/first_page.py -->\n", "<!-- end of what is measured -->\n"
COMPARED = (
    *("smollm2", "smollm2-sweep", "smollm2-fit-block", "smollm2-fit-sweep", "smollm2-fit-methods"),
    *("smollm2-fit-others", "smollm2-distil", "smollm2-distil-others"),
)
SCORED = "smollm2-zero-shot/zero-shot.json"
RATIOS = (0.7, 0.5)
STORED_BYTES = {"float32": 4}  # of the caches that were counted
SERVED_BYTES = 2  # of bfloat16, in which a model is served


@dataclass(frozen=True)
class Row:
    """A model of the table: how it is called, its method and recovery, and its colour."""

    name: str
    method: str
    recover: str
    color: str


ROWS = (
    Row("the paper's cut", "rap:paper", "none", "#b5651d"),
    Row("the paper's cut, fitted", "rap:paper", "fit", "#8f521a"),
    Row("the paper's cut, fitted and distilled", "rap:paper", "fit+full", "#5a2f08"),
    Row("PaLU, low rank", "palu", "none", "#a0a0a0"),
    Row("PaLU, fitted", "palu", "fit", "#606060"),
    Row("PaLU, fitted and distilled", "palu", "fit+full", "#000000"),
    Row("**rap**", "rap", "none", "#7fb0e6"),
    Row("**rap, fitted**", "rap", "fit", "#1f5fa8"),
    Row("**rap, fitted and distilled**", "rap", "fit+full", "#0b2f5c"),
)


class Measured:
    """All cells of the comparisons of the real model, and its zero-shot means."""

    def __init__(self, experiments: Path = EXPERIMENTS) -> None:
        self.cells: dict[tuple[str, float, str], dict[str, Any]] = {}
        for name in COMPARED:
            for cell in _read(experiments / name / "compare.json")["cells"]:
                self.cells[cell["method"], cell["retain"], cell["recover"]] = cell
        self.dense = self.cells["dense", 1.0, "none"]
        first = _read(experiments / COMPARED[0] / "compare.json")
        self.protocol = caption(first, {"title": "", "header": []})
        rows = _read(experiments / SCORED)["rows"]
        self.scores = {row["name"]: (row["mean"], row["mean_stderr"]) for row in rows}

    def score(self, method: str, retain: float, recover: str) -> str:
        """The zero-shot mean of a model with its standard error."""
        name = method if method == "dense" else f"{method} {retain:g}"
        found = self.scores.get(name if recover == "none" else f"{name} {recover}")
        return "" if found is None else f"{found[0]:.1%} +- {found[1]:.1%}"

    def curve(self, row: Row) -> Iterator[tuple[float, float]]:
        """Share of the cache, and perplexity over the dense model's less one, by share."""
        for (method, _, recover), cell in sorted(self.cells.items()):
            if (method, recover) == (row.method, row.recover):
                share = cell["kv_bytes_per_token"] / self.dense["kv_bytes_per_token"]
                yield share, cell["perplexity"] / self.dense["perplexity"] - 1


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _line(name: str, cell: dict[str, Any], dense: dict[str, Any], score: str) -> list[str]:
    served = cell["kv_bytes_per_token"] * SERVED_BYTES // STORED_BYTES[cell["kv_dtype"]]
    loss = cell["perplexity"] / dense["perplexity"] - 1
    return [
        name,
        f"{served:,} ({cell['kv_bytes_per_token'] / dense['kv_bytes_per_token']:.0%})",
        "keys" if cell["reconstructs"] else "nothing",
        f"{cell['perplexity']:.2f}" + (f" ({loss:+.0%})" if loss else ""),
        f"{cell['kl']['value']:.2f}" if loss else "0",
        score,
    ]


def table(measured: Measured) -> str:
    """The table of the first page, in Markdown, with how it was measured."""
    rows = [_line("dense", measured.dense, measured.dense, measured.score("dense", 1.0, "none"))]
    for retain in RATIOS:
        for row in ROWS:
            cell = measured.cells.get((row.method, retain, row.recover))
            if cell is not None:
                score = measured.score(row.method, retain, row.recover)
                rows.append(_line(row.name, cell, measured.dense, score))
    header = ["SmolLM2-135M-Instruct", "cache bytes a token", "rebuilt at every step"]
    header += ["perplexity", "KL", "zero-shot mean"]
    shown = markdown_table({"header": header, "rows": rows})
    return f"{shown}\n\n{textwrap.fill(measured.protocol, 100)}"


def draw(measured: Measured, path: Path) -> None:
    """The figure of the first page: loss against cache, on a logarithmic axis."""
    with matplotlib.rc_context({"svg.hashsalt": "rap", "svg.fonttype": "none", "font.size": 11}):
        figure = Figure(figsize=(8.6, 3.8), layout="constrained")
        axes = figure.subplots()
        for row in ROWS:
            points = list(measured.curve(row))
            label = row.name.strip("*")
            axes.plot(*zip(*points, strict=True), marker="o", color=row.color, label=label)
        shown = PercentFormatter(1.0, decimals=0)
        over_share(axes, "perplexity over dense", [0.03, 0.1, 0.3, 1, 10], shown)
        figure.savefig(path, format="svg", metadata={"Date": None})


def over_share(axes: Axes, what: str, ticks: list[float], shown: Formatter) -> None:
    """Draw `what` on a logarithmic axis over the share of the cache, which shrinks to the right."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(shown)
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.invert_xaxis()
    axes.set_xlabel("KV cache, share of the dense model's")
    axes.set_ylabel(what)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def with_table(text: str, measured: Measured) -> str:
    """README.md with the table as it is measured."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README.name} has no place for the table: {BEGIN.strip()}")
    return f"{before}{BEGIN}\n{table(measured)}\n{END}{after}"


def main() -> None:
    """Write the table into README.md, and the figure."""
    measured = Measured()
    README.write_text(with_table(README.read_text("utf-8"), measured), encoding="utf-8")
    draw(measured, REPOSITORY / FIGURE)


if __name__ == "__main__":
    main()
