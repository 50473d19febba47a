"""Documents made from result files: every table in them was printed by a command, none typed.

A result file is JSON with `title`, `header`, `rows`, and optionally `note`, `command` and
`provenance`. Files without a table are left to whoever wrote them.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import RapError


def markdown_report(folder: Path, title: str = "Results") -> str:
    """One Markdown page of all tables in a folder's *.json files, in the order of their names.

    Raises RapError if the folder holds none.
    """
    tables = [table for path in sorted(folder.glob("*.json")) if (table := _read(path))]
    if not tables:
        raise RapError(f"{folder} has no result files with a table: run a benchmark first")
    return "\n".join([f"# {title}", "", *(_section(table) for table in tables)])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RapError(f"{path} is not JSON ({error}): run what writes it again") from error
    complete = isinstance(found, dict) and {"title", "header", "rows"} <= found.keys()
    return found if complete else None


def _section(table: dict[str, Any]) -> str:
    header, rows = table["header"], table["rows"]
    lines = [f"## {table['title']}", ""]
    if table.get("note"):
        lines += [table["note"], ""]
    lines += [_row(header), _row(["---"] + ["---:"] * (len(header) - 1)), *map(_row, rows), ""]
    lines += [_source(table), ""]
    return "\n".join(lines)


def _row(cells: list[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _source(table: dict[str, Any]) -> str:
    parts = []
    if table.get("command"):
        parts.append(f"`{table['command']}`")
    made = table.get("provenance") or {}
    if made:
        packages = made["packages"]
        versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
        parts.append(f"rap {made['rap']}, {versions}, {made['device']}, {made['time'][:10]}")
    return "; ".join(parts)
