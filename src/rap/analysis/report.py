"""Documents made from result files: every table in them was printed by a command, none typed.

A result file is JSON with a `table` (title, header, rows, and a note if it needs one), and beside
it the `command` and `provenance`. Files without a table are left to whoever wrote them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RapError


def markdown_report(folders: Sequence[Path], title: str = "Results") -> str:
    """One Markdown page of all tables in the folders' *.json files, in the order of their names.

    Raises RapError if the folders hold none.
    """
    paths = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    results = [result for path in paths if (result := _read(path))]
    if not results:
        named = ", ".join(map(str, folders))
        raise RapError(f"{named} has no result files with a table: run a benchmark first")
    head = [f"# {title}", "", "Built by `rap report` from result files; no figure is typed.", ""]
    return "\n".join([*head, *(_section(result) for result in results)])


def markdown_table(table: dict[str, Any]) -> str:
    """A table's header and rows in Markdown, the first column to the left."""
    header = table["header"]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(_row(cells) for cells in (header, rule, *table["rows"]))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RapError(f"{path} is not JSON ({error}): run what writes it again") from error
    return found if isinstance(found, dict) and "table" in found else None


def _section(result: dict[str, Any]) -> str:
    table = result["table"]
    note = [table["note"], ""] if table.get("note") else []
    body = [f"## {table['title']}", "", *note, markdown_table(table), "", _source(result), ""]
    return "\n".join(body)


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _source(result: dict[str, Any]) -> str:
    parts = []
    if result.get("command"):
        parts.append(f"`{result['command']}`")
    made = result.get("provenance") or {}
    if made:
        packages = made["packages"]
        versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
        parts.append(f"rap {made['rap']}, {versions}, {made['device']}, {made['time'][:10]}")
    return "; ".join(parts)
