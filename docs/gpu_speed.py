"""The table of decode attention on a GPU in docs/measurements/decode-speed.md.

    python docs/gpu_speed.py

It is read from the result of `benchmarks/roofline.py --device cuda`.
"""

import json
from pathlib import Path

from sources import REPOSITORY, put

from rap.studies.report.report import markdown_table

PAGE = "docs/measurements/decode-speed.md"
RESULT = "benchmarks/results/roofline-nvidia-h200.json"
BEGIN, END = "<!-- measured: python docs/gpu_speed.py -->\n", "<!-- end of what is measured -->\n"
POINTS = ((1, 4096), (1, 32768), (16, 4096), (16, 32768))
NAMES = {
    "dense": "dense, time of a step",
    "rap:merge=1@0.7": "separate heads",
    "rap:merge=1@0.5": "separate heads",
    "rap:merge=2@0.7": "pairs of heads merged (default)",
    "rap:merge=2@0.5": "pairs of heads merged",
    "rap:profile=stock:merge=2@0.5": "the same, plain checkpoint (default with `--target plain`)",
    "rap:merge=4@0.5": "four heads merged (default)",
    "rap:profile=stock:merge=4@0.5": "the same, plain checkpoint",
    "palu@0.5": "PaLU",
}


def table(result: Path) -> str:
    """A row of every model, a column of every point, in Markdown.

    Ends the program if the rows are of several shapes or types, which no column names.
    """
    found_rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    if len(sorts := {(row["shape"], row["dtype"]) for row in found_rows}) != 1:
        raise SystemExit(f"{result.name} has rows of several shapes or types: {sorted(sorts)}")
    cells = {(row["model"], row["batch"], row["context"]): row for row in found_rows}
    dense = {point: cells["dense", *point] for point in POINTS}
    rows = []
    for model, name in NAMES.items():
        found = [cells[model, *point] for point in POINTS]
        share = found[0]["kv_bytes"] / dense[POINTS[0]]["kv_bytes"]
        shown = [
            f"{one['milliseconds']:.2f} ms" if model == "dense" else f"{one['ratio']:.2f}x"
            for one in found
        ]
        rows.append([name, f"{share:.0%}", *shown])
    header = ["model", "cache", *(f"{batch} x {context:,}" for batch, context in POINTS)]
    return markdown_table({"header": header, "rows": rows})


def main() -> None:
    """Put it into the page."""
    page = REPOSITORY / PAGE
    text = page.read_text(encoding="utf-8")
    made = table(REPOSITORY / RESULT)
    page.write_text(put(text, BEGIN, END, made, PAGE), encoding="utf-8")


if __name__ == "__main__":
    main()
