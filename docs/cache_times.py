"""The table of decode times in docs/explanation/pruning-vs-quantization.md.

    python docs/cache_times.py

It is read from the result of `benchmarks/cache_bits.py`.
"""

import json
from typing import Any

from sources import REPOSITORY, put

from rap.studies.report.report import markdown_table

PAGE = "docs/explanation/pruning-vs-quantization.md"
RESULT = REPOSITORY / "benchmarks/results/cache_bits-cpu.json"
BEGIN, END = "<!-- measured: python docs/cache_times.py -->\n", "<!-- end of what is measured -->\n"
PLAIN = "rap:merge=all:profile=stock@0.5"
NAMES = {
    "dense": "dense",
    "dense+hqq8": "dense, `hqq8`",
    "dense+hqq4": "dense, `hqq4`",
    PLAIN: "`rap` 0.5, merged heads, plain checkpoint",
    f"{PLAIN}+hqq4": "the same, `hqq4`",
    "rap:merge=1@0.5": "`rap:merge=1` 0.5, separate heads",
    "palu@0.5": "`palu` 0.5",
}


def table(result: dict[str, Any]) -> str:
    """The table of the result in Markdown, with names for readers."""
    shown = result["table"]
    rows = [[NAMES[entry], *cells] for entry, *cells in shown["rows"]]
    return str(markdown_table({"header": ["model, cache", *shown["header"][1:]], "rows": rows}))


def main() -> None:
    """Put it into the page."""
    path = REPOSITORY / PAGE
    made = table(json.loads(RESULT.read_text(encoding="utf-8")))
    text = put(path.read_text(encoding="utf-8"), BEGIN, END, made, PAGE)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
