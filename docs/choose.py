"""The table of docs/measurements/cache-size.md: what to use for a cache that many times smaller.

    python docs/choose.py

Every entry is a measured row with its loss; what was not measured says so.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from first_page import COMPARED, EXPERIMENTS, MERGED, REPOSITORY, SHORT, is_merged
from sources import anchor, link, put

from rap.methods.naming import named_today, result_today
from rap.studies.report.report import caption, markdown_table

PAGE = "docs/measurements/cache-size.md"
BEGIN, END = "<!-- measured: python docs/choose.py -->\n", "<!-- end of what is measured -->\n"
COMBINED, PRESSED = "smollm2-pareto", "smollm2-presses"
TIMES = (1.4, 2.0, 4.0, 8.0)
RECOVERED = {"none": "no recovery", "fit": "layer-wise", "fit+full": "end-to-end"}
AS_IT_IS = "float32"
EMPTY = "not measured"
HEADER = (
    "fewer bytes",
    "quantization or eviction alone",
    "with pruning",
    "pruning alone, merged heads (`rap`)",
    "low rank alone (`palu`)",
)

Row = dict[str, Any]


class Choices:
    """What was measured of caches that are smaller, by how it was made smaller."""

    def __init__(self, experiments: Path = EXPERIMENTS) -> None:
        self.experiments = experiments
        result = result_today(_read(experiments / COMBINED / "pareto.json"))
        self.settings = result["provenance"]["settings"]
        rows = [row | {"folder": COMBINED} for row in result["rows"] if row["weights"] == AS_IT_IS]
        self.dense = next(row for row in rows if row["share"] == 1 and row["method"] == "dense")
        short = {
            cell["fingerprint"]
            for folder in (*SHORT, "smollm2-merged-aligned")
            for cells in _comparisons(experiments, folder)
            for cell in cells
            if cell["recover"] == "fit"
        }
        for row in rows:
            row["length"] = "short " if row.get("fingerprint") in short else ""
        self.plain = [row for row in rows if row["method"] == "dense"]
        self.combined = [row for row in rows if row["method"].partition(":")[0] == "rap"]
        first = result_today(_read(experiments / COMPARED[0] / "compare.json"))
        self.protocol = caption(first, {"title": "", "header": []})
        folders = (*COMPARED, *MERGED, *SHORT)
        alone = [row for folder in folders for row in _alone(experiments, folder)]
        self.merged = [row for row in alone if is_merged(row["method"])]
        self.low_rank = [row for row in alone if row["method"] == "palu"]

    def recalled(self, name: str) -> tuple[str, str]:
        """Fact recall of the dense model, with its cache as it is and under a press."""
        rows = _read(self.experiments / PRESSED / f"dense-{name}.json")["table"]["rows"]
        return rows[0][2], rows[1][2]


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _comparisons(experiments: Path, folder: str) -> list[list[Row]]:
    """The cells of each result file of a comparison."""
    files = sorted((experiments / folder).glob("*.json"))
    return [result_today(_read(file)).get("cells") or [] for file in files]


def _alone(experiments: Path, folder: str) -> Iterator[Row]:
    """Models of a comparison as rows: their share of the cache, KL and perplexity over dense."""
    length = "short " if folder in SHORT else ""
    for cells in _comparisons(experiments, folder):
        dense = next((cell for cell in cells if cell["method"] == "dense"), None)
        for cell in cells:
            if dense is None or cell is dense or cell["recover"] not in RECOVERED:
                continue
            how = RECOVERED[cell["recover"]]
            yield {
                "method": cell["method"],
                "name": f"`{cell['method']}` {cell['retain']:g}, {length}{how}",
                "folder": folder,
                "share": cell["kv_bytes_per_token"] / dense["kv_bytes_per_token"],
                "kl": cell["kl"]["value"],
                "loss": cell["perplexity"] / dense["perplexity"] - 1,
            }


def combined_name(row: Row) -> str:
    """What a row of the combinations is called: its model unless dense, eviction, bits."""
    how = f"{row['length']}{RECOVERED[row['recover']]}"
    model = f"`{named_today(row['method'])}` {row['retain']:g}, {how}"
    parts = ["" if row["method"] == "dense" else model]
    parts += [f"`{one}`" for one in (row["press"], row["bits"]) if one]
    return " + ".join(filter(None, parts))


def best(rows: Sequence[Row], times: float) -> Row | None:
    """The row nearest to dense of those that are at least so many times smaller."""
    small = [row for row in rows if row["share"] * times <= 1]
    return min(small, key=lambda row: (row["kl"], row["share"]), default=None)


def entry(choices: Choices, rows: Sequence[Row], times: float) -> str:
    """The best row as an entry of the table: its name, loss and how many times smaller it is."""
    row = best(rows, times)
    if row is None:
        return EMPTY
    loss = row.get("loss")
    if loss is None:
        loss = row["perplexity"] / choices.dense["perplexity"] - 1
    name = row.get("name") or combined_name(row)
    measured = f"[KL {row['kl']:.3f}](../results/README.md#{anchor(row['folder'])})"
    # A loss that rounds to nothing is +0%, whatever its sign.
    return f"{name}: {measured}, perplexity {round(loss, 2) + 0.0:+.0%} ({1 / row['share']:.1f}x)"


def table(choices: Choices) -> str:
    """The table in Markdown, with how it was measured."""
    columns = (choices.plain, choices.combined, choices.merged, choices.low_rank)
    rows = [[f"{times:g}x", *(entry(choices, some, times) for some in columns)] for times in TIMES]
    shown = markdown_table({"header": list(HEADER), "rows": rows}).replace("---:", "---")
    return f"{shown}\n\n{verdict(choices)}\n\n{notes(choices)}"


def verdict(choices: Choices) -> str:
    """At which sizes pruning or low rank is nearer to dense than quantization and eviction are."""
    others = [*choices.combined, *choices.merged, *choices.low_rank]
    ahead = []
    for times in TIMES:
        plain, other = best(choices.plain, times), best(others, times)
        if other is not None and (plain is None or other["kl"] < plain["kl"]):
            ahead.append(f"{times:g}x")
    if ahead:
        return f"Pruning or low rank has the lowest KL at {', '.join(ahead)}."
    return "At every size, quantization or eviction without pruning has the lowest KL."


def notes(choices: Choices) -> str:
    """How the columns were measured, and what they do not show, an item each."""
    made = choices.settings
    evicted = [
        f"{press}: {choices.recalled(press)[1]}" for press in ("snapkv", "keydiff", "expected")
    ]
    items = (
        f"First two columns: {made['windows']} windows of {made['window']} tokens of "
        f"{made['text']}. The cache of the first {made['prefix']} tokens is compressed, and the "
        f"other {made['window'] - made['prefix']} are evaluated.",
        f"Other columns: {choices.protocol}",
        "Short layer-wise distillation is of 60 steps per layer.",
        "The two protocols differ: compare exactly within a column, and roughly across columns.",
        "KL hides what eviction loses: with half of the tokens evicted, fact recall of the dense "
        f"model falls from {choices.recalled('snapkv')[0]} ({', '.join(evicted)}; "
        f"{link(PRESSED, PAGE)}).",
    )
    return "\n".join(
        textwrap.fill(f"* {item}", 100, subsequent_indent="  ", break_on_hyphens=False)
        for item in items
    )


def with_table(text: str, choices: Choices) -> str:
    """The page with the table as it is measured."""
    return put(text, BEGIN, END, f"{table(choices)}\n", PAGE)


def main() -> None:
    """Write the table into the page."""
    page = REPOSITORY / PAGE
    page.write_text(with_table(page.read_text(encoding="utf-8"), Choices()), encoding="utf-8")


if __name__ == "__main__":
    main()
