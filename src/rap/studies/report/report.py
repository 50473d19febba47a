"""Documents made from result files: every table in them was printed by a command, none typed.

A result file is JSON with a `table` (title, header, rows, and a note if it needs one), or several
`tables` under one `title`, and beside them the `command` that writes the file and `provenance`. A
comparison also has its `cells`, one record each. A picture of the same name stands beside the file.
Files without a table are left to whoever wrote them. Results are named by folders, which give all
their files, or by single files.

Results older than the commit in `provenance` have `file_committed_in`, the commit in which their
figures came under their name: what measured them is that commit's code, or a little older.

A caption says how a table was measured: data, samples, BOS, and where times were taken.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.bos import describe_bos
from ...data.protocol import (
    CALIBRATION_WINDOW,
    CALIBRATION_WINDOWS,
    EVALUATION_WINDOW,
    EVALUATION_WINDOWS,
)
from ...methods.naming import result_today
from ...model.errors import RapError

TIMED = ("decode", "prefill")  # columns of times
OTHER_TEXTS = "Other datasets"  # how the titles of tables begin that show those of `other_texts`
UNKNOWN = object()  # whether windows began with BOS, in results that do not record it
Sizes = tuple[int | None, int | None]


def caption(result: dict[str, Any], table: dict[str, Any]) -> str:
    """The protocol of a comparison, an analysis or an evaluation; nothing of other results."""
    settings = (result.get("provenance") or {}).get("settings") or {}
    if result.get("cells") and "measures" in settings:
        # That table names texts of its own, and how much of each was read.
        own = table["title"].startswith(OTHER_TEXTS)
        return f"{_comparison(result, settings, own)}{_timed(result['cells'], table)}"
    if "analysis" in result and "windows" in settings:
        return _analysis(settings, table)
    if {"text", "num_windows", "window", "value"} <= result.keys():
        sizes = result["num_windows"], result["window"]
        return f"Evaluated on {_data_read(sizes, result['text'], result.get('bos', UNKNOWN))}."
    return ""


def _comparison(result: dict[str, Any], settings: dict[str, Any], own: bool) -> str:
    scored = result["cells"][0]["evaluation"]
    calibrated = settings["num_windows"], settings["window"]
    evaluated = scored["num_windows"], scored["window"]
    read = _data_read(evaluated, settings["measures"]["text"], scored.get("bos", UNKNOWN))
    data = _samples(calibrated, settings["calibration"])
    evaluation = "" if own else f"; evaluated on {read}"
    return f"Calibrated on {data}{evaluation}.{_other(calibrated, evaluated)}"


def _analysis(settings: dict[str, Any], table: dict[str, Any]) -> str:
    calibrated = settings["windows"], settings["window"]
    data = f"Calibrated on {_samples(calibrated, settings['calibration'])}"
    if "erplexity" not in f"{table['title']} {table.get('note')} {table['header']}":
        return f"{data}.{_other(calibrated, (EVALUATION_WINDOWS, EVALUATION_WINDOW))}"
    # Before there was a setting of it, evaluation windows were as long as those of calibration.
    evaluated = settings["max_windows"], settings.get("evaluate_window") or settings["window"]
    read = f"at most {_samples(evaluated, settings['evaluate'], 'windows')}"
    return f"{data}; evaluated on {read}.{_other(calibrated, evaluated)}"


def _samples(sizes: Sizes, data: str, what: str = "samples") -> str:
    count, length = sizes
    return f"{count} {what} of {length:,} tokens of {data}"


def _data_read(sizes: Sizes, data: str, bos: Any) -> str:
    begins = "BOS not recorded" if bos is UNKNOWN else describe_bos(bos)
    return f"{_samples(sizes, data, 'windows')}, {begins}"


def _other(calibrated: Sizes, evaluated: Sizes) -> str:
    """What the default protocol has instead of these."""
    sizes = {
        "calibrate": (calibrated, (CALIBRATION_WINDOWS, CALIBRATION_WINDOW)),
        "evaluate": (evaluated, (EVALUATION_WINDOWS, EVALUATION_WINDOW)),
    }
    instead = [
        f"{count} x {length:,} tokens to {what}"
        for what, (used, (count, length)) in sizes.items()
        if used != (count, length)
    ]
    return f" The default protocol has {' and '.join(instead)}." if instead else ""


def _timed(cells: list[dict[str, Any]], table: dict[str, Any]) -> str:
    """Where the times of a table were taken, of the retain ratio that its title names."""
    if not any(column.split(",")[0] in TIMED for column in table["header"]):
        return ""
    ratio = re.match(r"At retain ([\d.]+),", table["title"])
    retains = {cell["retain"] for cell in cells if ratio and cell["retain"] == float(ratio[1])}
    here = [cell for cell in cells if not retains or cell["retain"] in retains]
    timed = [
        cell["provenance"]["device"]
        for cell in here
        if any(f"{what}_seconds" in cell for what in TIMED)
    ]
    return f" Timed on {' and on '.join(dict.fromkeys(timed))}." if timed else ""


PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}
SHORT = 12  # digits of a fingerprint that are shown
NUMBER = re.compile(r"[+-]?\d")  # what a cell of a column of numbers begins with


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
    """The tables of a result file, one or several, without empty columns.

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


def markdown_report(sources: Sequence[Path]) -> str:
    """One Markdown page of all tables; RapError as of `read_results`."""
    return markdown_page(read_results(sources), "Results")


def markdown_page(results: Sequence[dict[str, Any]], title: str) -> str:
    """The page of results that were read."""
    tables = [tables_of(result) for result in results]
    named = [
        (table["title"], result)
        for result, own in zip(results, tables, strict=True)
        for table in own
    ]
    headings = iter(told_apart(named))
    sections = (
        _section(result, [table | {"title": next(headings)} for table in own])
        for result, own in zip(results, tables, strict=True)
    )
    return "\n".join([*page_head(title), *sections])


def page_head(title: str) -> list[str]:
    """The lines above all that a page of results shows."""
    return [f"# {title}", "", "Built by `rap report` from result files; no figure is typed.", ""]


def told_apart(named: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """The titles of results, with the file behind those that several have."""
    titles = [title for title, _ in named]
    return [
        f"{title} ({result['path'].parent.name}/{result['path'].name})"
        if titles.count(title) > 1
        else title
        for title, result in named
    ]


def numeric(table: dict[str, Any]) -> list[bool]:
    """Whether a column has numbers, in the order of the header; never the first, which names."""
    cells = [[str(row[i]) for row in table["rows"]] for i in range(len(table["header"]))]
    found = [[cell for cell in column if cell] for column in cells]
    right = [bool(some) and all(map(NUMBER.match, some)) for some in found]
    return [False, *right[1:]]


def markdown_table(table: dict[str, Any]) -> str:
    """A table's header and rows in Markdown, columns of numbers to the right."""
    header = table["header"]
    rule = ["---:" if right else "---" for right in numeric(table)]
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
    tables = result["tables"] if "tables" in result else [result["table"]]
    if not isinstance(tables, list) or not all(map(_is_table, tables)):
        raise RapError(f"{path} has a table without a header and rows: run what writes it again")
    pictures = [path.with_suffix(suffix) for suffix in PICTURES]
    drawn = next((picture for picture in pictures if picture.is_file()), None)
    return result_today(result) | {"path": path} | ({"picture": drawn} if drawn else {})


def _is_table(found: Any) -> bool:
    fields = found if isinstance(found, dict) else {}
    return all(isinstance(fields.get(name), list) for name in ("header", "rows"))


def _section(result: dict[str, Any], tables: Sequence[dict[str, Any]]) -> str:
    body = []
    for table in tables:
        note = [table["note"], ""] if table.get("note") else []
        body += [f"## {table['title']}", "", *note, markdown_table(table), ""]
    for cell in result.get("failed") or []:
        name = f"{cell['method']} at {cell['retain']:g}, recovery {cell['recover']}"
        body += [f"Failed: {name}: {cell['error']}", ""]
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
