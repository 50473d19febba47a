"""Pages of result files: one self-contained HTML page, or a folder of Markdown pages by topic.

The HTML page has tables, figures, and where every number is from: what it says is gathered here,
how it is marked up stands in page.html.j2. The folder has an index, a heading for each folder of
results: file, command, page. Its topics are in its own `topics.yaml`, in the order of the index:

    quality: {title: Quality of a cut, results: [ladder/*.json, needle/needle.json]}

A pattern is of the end of a path. What no topic names gets a page called after its folder.
"""

import base64
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ...model.errors import RapError
from ..analyses import ANALYSES
from ..analyses.study import figure_of
from .comparison import DENSE, comparison_of
from .report import (
    PICTURES,
    SHORT,
    commit_of,
    markdown_page,
    numeric,
    page_head,
    read_results,
    source_parts,
    tables_of,
    title_of,
    told_apart,
)

Record = dict[str, Any]

FOLDER, TEMPLATE = Path(__file__).parent, "page.html.j2"


def html_report(sources: Sequence[Path]) -> str:
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
    names = told_apart([(title_of(one), one) for one in results])
    sections = [
        _section(f"r{number}", name, one)
        for number, (name, one) in enumerate(zip(names, results, strict=True))
    ]
    return environment.get_template(TEMPLATE).render(title="Results", sections=sections)


def _section(anchor: str, name: str, result: Record) -> Record:
    tables = tables_of(result)
    cells, failed = result.get("cells") or [], result.get("failed") or []
    return {
        "id": anchor,
        "name": name,
        "tables": [{"note": None, "numeric": numeric(table)} | table for table in tables],
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
        f"{cell['kv_bytes_per_token']:,} KV bytes/token in decode and "
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


TOPICS, INDEX = "topics.yaml", "README.md"


@dataclass(frozen=True)
class Topic:
    """One page: its file is `name`.md; `results` are patterns such as `needle/*.json`."""

    name: str
    title: str
    results: Sequence[str] = field(default=())

    def place(self, path: Path) -> int | None:
        """Which of the patterns a path is of, None if none."""
        return next((n for n, one in enumerate(self.results) if path.match(one)), None)


def read_topics(folder: Path) -> list[Topic]:
    """The topics of a folder of pages, none without its file; RapError if that is not as above."""
    path = folder / TOPICS
    if not path.is_file():
        return []
    try:
        topics = yaml.safe_load(path.read_text(encoding="utf-8"))
        return [
            Topic(str(name), str(one["title"]), [str(pattern) for pattern in one["results"]])
            for name, one in topics.items()
        ]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise RapError(
            f"{path} is damaged ({error!r}): write `name: {{title: ..., results: [...]}}` lines"
        ) from error


def markdown_pages(sources: Sequence[Path], folder: Path) -> dict[str, str]:
    """File name to text, the index first, for pages that will lie in `folder`.

    Raises RapError as of `read_results`, and for damaged topics.
    """
    results = read_results(sources)
    grouped = _grouped(results, read_topics(folder))
    index = _index(results, grouped, folder)
    pages = {f"{topic.name}.md": markdown_page(ones, topic.title) for topic, ones in grouped}
    return {INDEX: index, **pages}


Grouped = list[tuple[Topic, list[dict[str, Any]]]]


def _grouped(results: Sequence[dict[str, Any]], topics: Sequence[Topic]) -> Grouped:
    """Every topic with its results, in the order of its patterns; the rest by their folders."""
    left, grouped = list(results), []
    for topic in topics:
        placed = [(topic.place(result["path"]), result) for result in left]
        here = [(place, result) for place, result in placed if place is not None]
        left = [result for place, result in placed if place is None]
        if here:
            grouped.append((topic, [one for _, one in sorted(here, key=lambda pair: pair[0])]))
    for name in dict.fromkeys(_folder(result) for result in left):
        ones = [result for result in left if _folder(result) == name]
        same = next((found for topic, found in grouped if topic.name == name), None)
        if same is not None:  # a page of that name is there already
            same += ones
        else:
            grouped.append((Topic(name, name.replace("-", " ").capitalize()), ones))
    return grouped


def _folder(result: dict[str, Any]) -> str:
    return str(result["path"].absolute().parent.name)


def _index(results: Sequence[dict[str, Any]], grouped: Grouped, folder: Path) -> str:
    contents = [
        f"* [{topic.title}]({topic.name}.md): {len(ones)} result file{'s' * (len(ones) != 1)}"
        for topic, ones in grouped
    ]
    page = {id(one): topic for topic, ones in grouped for one in ones}
    sections: dict[str, list[str]] = {}
    for one in results:
        parts = [f"* {_link(one['path'], folder)}"]
        parts += [f"`{one['command']}`"] if one.get("command") else []
        parts += [f"code {commit}"] if (commit := commit_of(one)) else []
        parts.append(f"shown in [{page[id(one)].title}]({page[id(one)].name}.md)")
        sections.setdefault(_folder(one), []).append("; ".join(parts))
    files = [line for name, ones in sections.items() for line in (f"### {name}", "", *ones, "")]
    return "\n".join(
        [
            *page_head("Results"),
            *contents,
            "",
            "## Every result file and its command",
            "",
            *files,
        ]
    )


def _link(path: Path, folder: Path) -> str:
    """A link to a result file, called by its path without the way up."""
    target = Path(os.path.relpath(path, folder))
    shown = "/".join(part for part in target.parts if part != "..")
    return f"[{shown}]({target.as_posix()})"
