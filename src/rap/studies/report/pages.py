"""Result files as a folder of Markdown pages by topic, and an index: result file, command, page.

The topics are in the folder's own `topics.yaml`, in the order of the index:

    quality: {title: Quality of a cut, results: [ladder/*.json, needle/needle.json]}

A pattern is of the end of a path. What no topic names gets a page called after its folder.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...model.errors import RapError
from .report import commit_of, markdown_page, markdown_table, read_results, title_of

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
        f"* [{topic.title}]({topic.name}.md): {'; '.join(map(title_of, ones))}"
        for topic, ones in grouped
    ]
    page = {id(one): topic for topic, ones in grouped for one in ones}
    rows = [
        [
            _link(one["path"], folder),
            f"`{one['command']}`" if one.get("command") else "",
            commit_of(one),
            f"[{page[id(one)].name}]({page[id(one)].name}.md)",
        ]
        for one in results
    ]
    header = ["result file", "command that writes it", "code", "shown in"]
    files = {"header": header, "rows": rows}
    return "\n".join(
        [
            "# Results",
            "",
            "Built by `rap report` from result files; no figure is typed.",
            "",
            *contents,
            "",
            "## Every result file and its command",
            "",
            markdown_table(files),
            "",
        ]
    )


def _link(path: Path, folder: Path) -> str:
    """A link to a result file, called by its path without the way up."""
    target = Path(os.path.relpath(path, folder))
    shown = "/".join(part for part in target.parts if part != "..")
    return f"[{shown}]({target.as_posix()})"
