"""The table of budgets on docs/explanation/budget.md, before and after layer-wise distillation.

    python docs/budgets.py

A row is in it if all four of its cells were measured.
"""

import json
from typing import Any

from sources import REPOSITORY, put

from rap.studies.report.report import markdown_table

PAGE = "docs/explanation/budget.md"
BEGIN = "<!-- measured: python docs/budgets.py -->\n"
END = "<!-- end of the budgets -->\n"
# Result folder, model, heads, and the methods whose budgets are `uniform` and `error`.
ROWS = (
    ("smollm2-budgets", "SmolLM2", "merged", ("rap", "rap:budget=error")),
    ("smollm2-budgets", "SmolLM2", "separate", ("rap:merge=1:budget=uniform", "rap:merge=1")),
    ("gemma3-budgets", "Gemma 3", "one KV head", ("rap:budget=uniform", "rap")),
)
RETAINS = (0.7, 0.5, 0.35)
HEADER = ("model", "heads", "retain", "`uniform`", "`error`")
HEADER += ("`uniform`, recovered", "`error`, recovered")


def rows_of(cells: list[dict[str, Any]], methods: tuple[str, str]) -> list[list[str]]:
    """Perplexity over dense and KL of both methods, a row for each ratio, where all are there."""
    dense = next(cell["perplexity"] for cell in cells if cell["method"] == "dense")
    found = {(cell["method"], cell["retain"], cell["recover"]): cell for cell in cells}
    rows = []
    for retain in RETAINS:
        asked = [(method, retain, recover) for recover in ("none", "fit") for method in methods]
        if all(one in found for one in asked):
            here = [found[one] for one in asked]
            shown = [f"{x['perplexity'] / dense:.3f}, {x['kl']['value']:.3f}" for x in here]
            rows.append([f"{retain:g}", *shown])
    return rows


def main() -> None:
    """Put it into the page."""
    rows: list[list[str]] = []
    for folder, model, heads, methods in ROWS:
        result = REPOSITORY / "experiments" / folder / "compare.json"
        cells = json.loads(result.read_text("utf-8"))["cells"]
        rows += [[model, heads, *row] for row in rows_of(cells, methods)]
    page = REPOSITORY / PAGE
    made = markdown_table({"header": list(HEADER), "rows": rows})
    page.write_text(put(page.read_text("utf-8"), BEGIN, END, made, PAGE), encoding="utf-8")


if __name__ == "__main__":
    main()
