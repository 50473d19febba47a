"""The tables of budgets on docs/measurements/recovery.md, before and after layer-wise distillation.

    python docs/budgets.py

A row is in one if all of its cells were measured.
"""

import json
from collections.abc import Sequence
from typing import Any

from sources import REPOSITORY, put

from rap.studies.report.report import markdown_table

PAGE = "docs/measurements/recovery.md"
BEGIN = "<!-- measured: python docs/budgets.py {} -->\n"
END = "<!-- end of the budgets -->\n"
# Result folder, model, heads, and the methods whose budgets are `uniform` and `error`.
ROWS = (
    ("smollm2-budgets", "SmolLM2", "merged", ("rap", "rap:budget=error")),
    ("smollm2-budgets", "SmolLM2", "separate", ("rap:merge=1:budget=uniform", "rap:merge=1")),
    ("gemma3-budgets", "Gemma 3", "one KV head", ("rap:budget=uniform", "rap")),
)
# With merged heads, all in one table after recovery.
MERGED = {
    "`uniform`": "rap",
    "`tempered`": "rap:budget=tempered",
    "`error`": "rap:budget=error",
}
RETAINS = (0.7, 0.5, 0.35)
SHOWN = "PPL ratio, KL"
HEADER = ("model", "heads", "retain", f"`uniform`: {SHOWN}", f"`error`: {SHOWN}")
HEADER += (f"`uniform`, recovered: {SHOWN}", f"`error`, recovered: {SHOWN}")


def rows_of(
    cells: list[dict[str, Any]],
    methods: Sequence[str],
    recoveries: Sequence[str] = ("none", "fit"),
) -> list[list[str]]:
    """Perplexity over dense and KL of the methods, a row for each ratio, where all are there."""
    dense = next(cell["perplexity"] for cell in cells if cell["method"] == "dense")
    found = {(cell["method"], cell["retain"], cell["recover"]): cell for cell in cells}
    rows = []
    for retain in RETAINS:
        asked = [(method, retain, recover) for recover in recoveries for method in methods]
        if all(one in found for one in asked):
            here = [found[one] for one in asked]
            shown = [f"{x['perplexity'] / dense:.3f}, {x['kl']['value']:.3f}" for x in here]
            rows.append([f"{retain:g}", *shown])
    return rows


def _cells(folder: str) -> list[dict[str, Any]]:
    result = REPOSITORY / "experiments" / folder / "compare.json"
    found: list[dict[str, Any]] = json.loads(result.read_text("utf-8"))["cells"]
    return found


def main() -> None:
    """Put them into the page."""
    rows: list[list[str]] = []
    for folder, model, heads, methods in ROWS:
        rows += [[model, heads, *row] for row in rows_of(_cells(folder), methods)]
    tables = {"recovery": {"header": list(HEADER), "rows": rows}}
    cells = _cells("smollm2-budgets") + _cells("smollm2-budgets-tempered")
    rows = rows_of(cells, list(MERGED.values()), ["fit"])
    header = ["retain", *(f"{name}: {SHOWN}" for name in MERGED)]
    tables["merged"] = {"header": header, "rows": rows}
    page = REPOSITORY / PAGE
    text = page.read_text("utf-8")
    for name, table in tables.items():
        text = put(text, BEGIN.format(name), END, markdown_table(table), PAGE)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
