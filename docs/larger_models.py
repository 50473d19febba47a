"""The tables of docs/measurements/larger-models.md.

    python docs/larger_models.py

They are read from the results of `experiments/scale/scale.py`.
"""

import json
from typing import Any

from sources import REPOSITORY, put

from rap.studies.report.report import markdown_table

PAGE = "docs/measurements/larger-models.md"
SHOWN = ("Llama-3.2-1B", "Llama-3-8B", "Llama-3-70B")
FILES = ("scale", "scale-decode", "scale-fit")
END = "<!-- end of what is counted -->\n"


def begin(name: str) -> str:
    """The line above the table of a result file."""
    return f"<!-- counted: python docs/larger_models.py {name} -->\n"


def shown(table: dict[str, Any], *, every: bool) -> str:
    """A table in Markdown, of SHOWN models or of `every` one."""
    rows = [row for row in table["rows"] if every or row[0] in SHOWN]
    return markdown_table({"header": table["header"], "rows": rows})


def main() -> None:
    """Put them into the page."""
    page = REPOSITORY / PAGE
    text = page.read_text(encoding="utf-8")
    for name in FILES:
        found = json.loads((REPOSITORY / f"experiments/scale/{name}.json").read_text("utf-8"))
        made = shown(found["table"], every=name == "scale-fit")
        text = put(text, begin(name), END, made, PAGE)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
