"""One self-contained HTML page of result files: tables, figures, and where every number is from.

What it says is gathered here, how it is marked up stands in page.html.j2.
"""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...model.errors import RapError
from ..analyses.registry import ANALYSES
from ..analyses.study import figure_of
from .comparison import DENSE, comparison_of
from .report import PICTURES, SHORT, read_results, source_parts, tables_of, title_of

Record = dict[str, Any]

FOLDER, TEMPLATE = Path(__file__).parent, "page.html.j2"


def html_report(sources: Sequence[Path], title: str = "Results") -> str:
    """A page that needs no other file and no network; RapError as of `report.read_results`."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    results = read_results(sources)
    names = _names(results)
    sections = [
        _section(f"r{number}", name, one)
        for number, (name, one) in enumerate(zip(names, results, strict=True))
    ]
    return environment.get_template(TEMPLATE).render(title=title, sections=sections)


def _names(results: Sequence[Record]) -> list[str]:
    """What each section is called: its title, with the file where several have one title."""
    titles = [title_of(one) for one in results]
    files = [f"{one['path'].parent.name}/{one['path'].name}" for one in results]
    return [
        f"{title} ({file})" if titles.count(title) > 1 else title
        for title, file in zip(titles, files, strict=True)
    ]


def _section(anchor: str, name: str, result: Record) -> Record:
    tables = tables_of(result)
    cells, failed = result.get("cells") or [], result.get("failed") or []
    return {
        "id": anchor,
        "name": name,
        "tables": [{"note": None} | table for table in tables],
        "comparison": comparison_of(cells, anchor),
        "picture": _picture(name, result),
        "command": result.get("command"),
        "made": ", ".join(source_parts(result)),
        "origins": [_origin(cell) for cell in cells],
        "failed": [cell | {"name": _name(cell)} for cell in failed],
    }


def _picture(name: str, result: Record) -> str | None:
    """The picture beside a result file, or else the figure of an analysis, as a data URL."""
    if "picture" in result:
        path = result["picture"]
        kind, data = PICTURES[path.suffix], path.read_bytes()
    elif result.get("analysis") in ANALYSES:
        kind, data = PICTURES[".png"], _drawn(name, result)
    else:
        return None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _drawn(name: str, result: Record) -> bytes:
    """The figure of an analysis from its data, a PNG of the same bytes every time."""
    written = io.BytesIO()
    try:
        figure = figure_of(ANALYSES[result["analysis"]], result["data"])
    except (KeyError, IndexError, TypeError) as error:
        raise RapError(
            f"the data of {name!r} are of another version ({error!r}): run "
            f"`rap analyze {result['analysis']}` again"
        ) from error
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()


def _origin(cell: Record) -> Record:
    """The command that repeats a cell, its settings, weights and versions."""
    said = [
        f"perplexity {cell['perplexity']:.4f}",
        f"{cell['kv_bytes_per_token']:,} KV bytes a token in decode and "
        f"{cell['prefill_kv_bytes_per_token']:,.0f} in prefill",
        f"weights {cell['fingerprint'][:SHORT]} of dense {cell['dense_fingerprint'][:SHORT]}",
        f"seed {cell['seed']}",
        f"{cell['seconds']:.0f} s",
        *source_parts(cell),
    ]
    published = cell.get("paper") or {}
    if published:
        figures = [f"{key} {value}" for key, value in published.items()]
        said.append(f"in the paper: {', '.join(figures)}")
    return {
        "name": _name(cell),
        "command": cell["command"],
        "settings": json.dumps(cell["settings"], sort_keys=True) if cell.get("settings") else "",
        "said": "; ".join(said),
    }


def _name(cell: Record) -> str:
    if cell["method"] == DENSE:
        return DENSE
    return f"{cell['method']} at {cell['retain']:g}, recovery {cell['recover']}"
