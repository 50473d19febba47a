"""The table of methods in docs/measurements/index.md and the figure of README.md, from results.

    python docs/first_page.py

A row is left out where no result file has it.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import themed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, PercentFormatter
from sources import put, with_error

from rap.methods.naming import result_today, shown_today
from rap.studies.report.report import caption, markdown_table

REPOSITORY = Path(__file__).parents[1]
EXPERIMENTS = REPOSITORY / "experiments"
PAGE, FIGURE = REPOSITORY / "docs/measurements/index.md", "docs/first-page.svg"
BEGIN, END = "<!-- measured: python docs/first_page.py -->\n", "<!-- end of what is measured -->\n"
COMPARED = (
    *("smollm2", "smollm2-sweep", "smollm2-fit-block", "smollm2-fit-sweep", "smollm2-fit-methods"),
    *("smollm2-fit-others", "smollm2-distil", "smollm2-distil-others"),
)
# Comparisons, zero-shot scores and perplexities of merged heads.
MERGED = ("smollm2-merged-distil", "smollm2-merged", "smollm2-merged-0.7", "smollm2-merged-sweep")
# Layer-wise distillation of fewer steps, with which all ratios fit into a day.
SHORT = ("smollm2-merged-short", "smollm2-merged-fits", "smollm2-merged-ratios")
SHORT += ("smollm2-merged-plain-quarter", "smollm2-merged-short-fits")
SHORT += ("smollm2-others-short-fits", "smollm2-fits-0.8", "smollm2-fits-0.6")
SHORT += ("smollm2-fits-0.35", "smollm2-fits-0.25")
SCORED = "smollm2-zero-shot/zero-shot.json"
WHOLE = "smollm2-whole-test"
RATIOS = (0.7, 0.5)
SHOWN = "fit"  # the recovery of the rows of the table
STORED_BYTES = {"float32": 4}  # of the caches that were counted
SERVED_BYTES = 2  # of bfloat16, in which a model is served
HEADER = (
    "SmolLM2-135M-Instruct",
    "KV cache, bytes/token",
    "decode-time reconstruction",
    "perplexity",
    "KL, nats/token",
)
# Earlier results call it `rap`: heads were not merged unless that was asked for.
SEPARATE = "rap:merge=1"
STYLES = {"none": "--", "fit": "-"}  # lines of the figure, by recovery
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25)  # of the cache, where most points are


@dataclass(frozen=True)
class Row:
    """A method of the table: how it is called there, and its color in the figure."""

    name: str
    method: str
    color: str


ROWS = (
    Row("RAP as published (`rap:paper`)", "rap:paper", "two"),
    Row("PaLU (`palu`)", "palu", "soft"),
    Row("**`rap`**, separate heads (`rap:merge=1`)", SEPARATE, "one"),
    Row("**`rap`**", "rap", "five"),
)


class Measured:
    """All runs of the comparisons on SmolLM2, and what else was measured of their models."""

    def __init__(self, experiments: Path = EXPERIMENTS) -> None:
        self.cells: dict[tuple[str, float, str], dict[str, Any]] = {}
        compared = [_read(experiments / name / "compare.json") for name in COMPARED]
        merged = [_read(x) for name in MERGED for x in sorted((experiments / name).glob("*.json"))]
        self.merged = [one for one in merged if "cells" in one]
        for one in (*compared, *self.merged):
            for cell in one["cells"]:
                if one in compared or is_merged(cell["method"]):
                    self.cells[cell["method"], cell["retain"], cell["recover"]] = cell
        self.dense = self.cells["dense", 1.0, "none"]
        self.protocol = caption(compared[0], {"title": "", "header": []})
        rows = _read(experiments / SCORED)["rows"]
        rows = [row | {"name": shown_today(row["name"])} for row in rows]
        rows += [row for one in merged for row in one.get("rows", []) if "mean_stderr" in row]
        self.scores = {row["name"]: (row["mean"], row["mean_stderr"]) for row in rows}

    def rows(self) -> list[Row]:
        """The rows of every ratio: those of ROWS, and merged heads where there are results."""
        methods = {method for method, _, _ in self.cells if is_merged(method)}
        methods = sorted(methods - {row.method for row in ROWS})
        return [*ROWS, *(_merged_row(method, len(methods) > 1) for method in methods)]

    def score(self, method: str, retain: float, recover: str) -> str:
        """The zero-shot mean of a model with its standard error."""
        name = method if method == "dense" else f"{method} {retain:g}"
        found = self.scores.get(name if recover == "none" else f"{name} {recover}")
        return "" if found is None else with_error(*found)

    def curve(self, method: str, recover: str) -> Iterator[tuple[float, float]]:
        """Share of the cache, and perplexity over the dense model's less one, by share."""
        for (name, _, after), cell in sorted(self.cells.items()):
            if (name, after) == (method, recover):
                share = cell["kv_bytes_per_token"] / self.dense["kv_bytes_per_token"]
                yield share, cell["perplexity"] / self.dense["perplexity"] - 1

    def captions(self) -> list[str]:
        """How the table was measured, an item each."""
        heads = {caption(one, {"title": "", "header": []}) for one in self.merged}
        found = [self.protocol]
        found += [f"Merged heads: {one}" for one in sorted(heads - {self.protocol})]
        found += [
            "Recovery is layer-wise distillation (`--recover fit`) on samples of 512 tokens. Dense "
            "weights are dequantized from 4 bits. KV cache: bfloat16. Other data and tasks: "
            "[novels, code, recall, retrieval and zero-shot](data-and-tasks.md).",
        ]
        return found


def is_merged(method: str) -> bool:
    """Whether a method of the results merges heads, as their names are today."""
    return method == "rap" or ("merge=" in method and "merge=1" not in method.split(":"))


def stem_today(stem: str) -> str:
    """The name of an earlier result of a single model, after the method as it is called today."""
    return re.sub(r"^rap(?=-0\.)", re.sub(r"[:=]", "-", SEPARATE), stem)


def _merged_row(method: str, several: bool) -> Row:
    plain = "profile=stock" in method
    name = "**`rap`, merged heads**" + (", plain checkpoint" if plain else "")
    return Row(f"{name} (`{method}`)" if several else name, method, "four" if plain else "three")


def _read(path: Path) -> Any:
    return result_today(json.loads(path.read_text(encoding="utf-8")))


def _line(name: str, measured: Measured, key: tuple[str, float, str]) -> list[str]:
    cell, dense = measured.cells[key], measured.dense
    served = cell["kv_bytes_per_token"] * SERVED_BYTES // STORED_BYTES[cell["kv_dtype"]]
    loss = cell["perplexity"] / dense["perplexity"] - 1
    return [
        name,
        f"{served:,} ({cell['kv_bytes_per_token'] / dense['kv_bytes_per_token']:.0%})",
        "keys" if cell["reconstructs"] else "none",
        f"{cell['perplexity']:.2f}" + (f" ({loss:+.0%})" if loss else ""),
        f"{cell['kl']['value']:.2f}" if loss else "0",
    ]


def table(measured: Measured) -> str:
    """The table of methods, in Markdown, with how it was measured."""
    rows = [_line("dense", measured, ("dense", 1.0, "none"))]
    for retain in RATIOS:
        for row in measured.rows():
            key = row.method, retain, SHOWN
            if key in measured.cells:
                rows.append(_line(row.name, measured, key))
    shown = markdown_table({"header": list(HEADER), "rows": rows})
    wrapped = {"width": 100, "subsequent_indent": "  ", "break_on_hyphens": False}
    items = (textwrap.fill(f"* {one}", **wrapped) for one in measured.captions())
    return f"{shown}\n\n" + "\n".join(items)


def draw(measured: Measured, path: Path) -> None:
    """The figure of README.md: perplexity against cache, on a logarithmic axis."""
    with matplotlib.rc_context(themed.SETTINGS):
        figure = Figure(figsize=(6.4, 5.4), layout="constrained")
        axes = figure.subplots()
        for row in measured.rows():
            color, label = (
                themed.COLORS[row.color],
                re.sub(r"[*`]| \([^)]*\)", "", row.name),
            )
            for recover, style in STYLES.items():
                points = list(measured.curve(row.method, recover))
                if points:
                    look: dict[str, Any] = {"color": color, "marker": "o", "linestyle": style}
                    axes.plot(*zip(*points, strict=True), label=label, **look)
        shown = FuncFormatter(lambda share, _: f"{share:,.0%}")
        over_share(axes, "increase in perplexity", [0.03, 0.1, 0.3, 1, 10, 100], shown)
        ink = themed.COLORS["ink"]
        keys = [Line2D([], [], color=ink, linestyle=style) for style in STYLES.values()]
        legend_below(figure, axes, dict(zip(("no recovery", "recovered"), keys, strict=True)))
        themed.save(figure, path)


def legend_below(figure: Figure, axes: Axes, more: dict[str, Line2D]) -> None:
    """A method per color, then `more` by name, below the axes: they keep their width on a phone."""
    colors = {str(line.get_label()): line.get_color() for line in axes.lines}
    keys = {
        name: Line2D([], [], color=color, marker="o")
        for name, color in colors.items()
        if not name.startswith("_")  # what matplotlib calls lines without a name
    } | more
    where: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "fontsize": 11}
    figure.legend([*keys.values()], [*keys], frameon=False, **where)


def over_share(axes: Axes, what: str, ticks: list[float], shown: Formatter) -> None:
    """Draw `what` on a logarithmic axis over the share of the cache, which shrinks to the right."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(shown)
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.xaxis.set_major_locator(FixedLocator(SHARES))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.invert_xaxis()
    axes.set_xlabel("KV cache, % of the dense model's")
    axes.set_ylabel(what)
    axes.grid(axis="y", color=themed.COLORS["line"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def with_table(text: str, measured: Measured) -> str:
    """The page with the table as it is measured."""
    return put(text, BEGIN, END, table(measured), PAGE)


def main() -> None:
    """Write the table into its page, and the figure."""
    measured = Measured()
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), measured), encoding="utf-8")
    draw(measured, REPOSITORY / FIGURE)


if __name__ == "__main__":
    main()
