"""Docstrings as they are written in the source, made readable for Sphinx.

Two forms of paragraph mean something there: `name: text` lines with indented continuations are
settings, one an item; lines in aligned columns are a table, shown as it stands.
"""

import re
from typing import Any

from sphinx.application import Sphinx

SETTING = re.compile(r"[a-z]\w*: \S")
COLUMNS = re.compile(r"\S {2,}\S")


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Runs of lines that are not blank."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [part for part in found if part]


def readable(paragraph: list[str]) -> list[str]:
    """A paragraph as reStructuredText."""
    outer = [line for line in paragraph if not line.startswith(" ")]
    indented = len(outer) < len(paragraph)
    if any(COLUMNS.search(line.strip()) for line in paragraph) and indented:
        return [".. code-block:: text", "", *(f"   {line}" for line in paragraph)]
    if outer and all(SETTING.match(line) for line in outer) and (indented or len(outer) > 1):
        return [
            f"  {line.strip()}"
            if line.startswith(" ")
            else "* `{}`: {}".format(*line.split(": ", 1))
            for line in paragraph
        ]
    return paragraph


def process(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Rewrite the lines of one docstring in place."""
    parts = [readable(part) for part in paragraphs(lines)]
    lines[:] = [line for part in parts for line in (*part, "")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Have every docstring of the API reference go through `process`."""
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
