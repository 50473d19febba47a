"""Documents made from result files: every table in them was printed by a command, none typed.

A result file is JSON with a `table` (title, header, rows, and a note if it needs one), or several
`tables` under one `title`, and beside them the `command` that writes the file and `provenance`. A
comparison also has its `cells`, one record each. A picture of the same name stands beside the file.
Files without a table are left to whoever wrote them. Results are named by folders, which give all
their files, or by single files.

Results older than the commit in `provenance` have `file_committed_in`, the commit in which their
figures came under their name: what measured them is that commit's code, or a little older.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...model.errors import RapError
from .captions import caption

PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}
SHORT = 12  # digits of a fingerprint that are shown


def read_results(sources: Sequence[Path]) -> list[dict[str, Any]]:
    """All result files with tables: named ones, and the *.json of folders by name.

    Each has its `path` beside what the file holds. Raises RapError if there are none, a named
    file has no table, or a file is damaged.
    """
    results = [result for source in sources for result in _results(source)]
    if not results:
        named = ", ".join(map(str, sources)) or "this directory"
        raise RapError(
            f"{named} has no result files with a table: run a benchmark or an experiment first"
        )
    return results


def tables_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of a result file, be it one or several, without columns that say nothing.

    The note of each says by which protocol it was measured, where the file records that.
    """
    tables = result["tables"] if "tables" in result else [result["table"]]
    return [_captioned(_filled(table), result) for table in tables]


def title_of(result: dict[str, Any]) -> str:
    """What a result file is called: its title, else that of its first table."""
    return str(result.get("title") or tables_of(result)[0]["title"])


def _captioned(table: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A table with how it was measured behind its note."""
    said = f"{table.get('note') or ''} {caption(result, table)}".strip()
    return table | {"note": said} if said else table


def _filled(table: dict[str, Any]) -> dict[str, Any]:
    """A table without the columns that are empty in every row: what was not measured."""
    header, rows = table["header"], table["rows"]
    kept = [i for i in range(len(header)) if not rows or any(str(row[i]) != "" for row in rows)]
    return table | {
        "header": [header[i] for i in kept],
        "rows": [[row[i] for i in kept] for row in rows],
    }


def markdown_report(sources: Sequence[Path], title: str = "Results") -> str:
    """One Markdown page of all tables; RapError as of `read_results`."""
    return markdown_page(read_results(sources), title)


def markdown_page(results: Sequence[dict[str, Any]], title: str) -> str:
    """The page of results that were read."""
    head = [f"# {title}", "", "Built by `rap report` from result files; no figure is typed.", ""]
    return "\n".join([*head, *(_section(result) for result in results)])


def markdown_table(table: dict[str, Any]) -> str:
    """A table's header and rows in Markdown, the first column to the left."""
    header = table["header"]
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(_row(cells) for cells in (header, rule, *table["rows"]))


def source_parts(result: dict[str, Any]) -> list[str]:
    """Versions, commit, device and day of a result, where it has them."""
    made = result.get("provenance") or {}
    if not made:
        return []
    packages = made["packages"]
    versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
    code = [f"code {commit}"] if (commit := commit_of(result)) else []
    return [f"rap {made['rap']}", *code, versions, made["device"], made["time"][:10]]


def commit_of(result: dict[str, Any]) -> str:
    """The commit of the code that ran, else the one that brought the file, else nothing."""
    ran = (result.get("provenance") or {}).get("commit")
    if ran or not result.get("file_committed_in"):
        return ran or ""
    return f"unrecorded, file committed in {result['file_committed_in']}"


def _results(source: Path) -> list[dict[str, Any]]:
    if source.is_dir():
        return [result for path in sorted(source.glob("*.json")) if (result := _read(path))]
    result = _read(source)
    if result is None:
        raise RapError(f"{source} has no table: name result files, or folders of them")
    return [result]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RapError(f"{path} is not JSON ({error}): run what writes it again") from error
    if not isinstance(result, dict) or not {"table", "tables"} & result.keys():
        return None
    pictures = [path.with_suffix(suffix) for suffix in PICTURES]
    drawn = next((picture for picture in pictures if picture.is_file()), None)
    return result | {"path": path} | ({"picture": drawn} if drawn else {})


def _section(result: dict[str, Any]) -> str:
    body = []
    for table in tables_of(result):
        note = [table["note"], ""] if table.get("note") else []
        body += [f"## {table['title']}", "", *note, markdown_table(table), ""]
    body += [_source(result), ""]
    if result.get("cells"):
        body += [_cells(result), ""]
    return "\n".join(body)


def _cells(result: dict[str, Any]) -> str:
    """Which command repeats each cell of a comparison, and the weights that it measured."""
    rows = [
        [
            cell["method"],
            f"{cell['retain']:g}",
            cell["recover"],
            cell["fingerprint"][:SHORT],
            f"`{cell['command']}`",
        ]
        for cell in result["cells"]
    ]
    return markdown_table(
        {"header": ["cell", "retain", "recovery", "weights", "command"], "rows": rows}
    )


def _row(cells: list[Any]) -> str:
    shown = (str(cell).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(shown)} |"


def _source(result: dict[str, Any]) -> str:
    command = [f"`{result['command']}`"] if result.get("command") else []
    made = source_parts(result)
    return "; ".join([*command, *([", ".join(made)] if made else [])])
