"""What is generated on a page, and its links to the commands of results.

Links lead to headings of docs/results/README.md. `rap report` writes one for each folder of
results, with each file and its command.
"""

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
INDEX = "docs/results/README.md"
LINK = re.compile(r"results/README\.md#([\w-]+)")


def anchor(folder: str) -> str:
    """The anchor of a folder's heading, as GitHub and MyST make it.

    >>> anchor("smollm2-merged-0.7")
    'smollm2-merged-07'
    """
    return re.sub(r"[^\w -]", "", folder.lower()).replace(" ", "-")


def link(folder: str, page: str, label: str = "") -> str:
    """A link to the commands of a folder of results, on a page of the repository."""
    target = os.path.relpath(INDEX, Path(page).parent)
    return f"[{label or folder}]({Path(target).as_posix()}#{anchor(folder)})"


def runs(folders: Iterable[str], page: str, what: str = "Runs and commands") -> str:
    """A paragraph of links, for what stands above or below it; each folder once."""
    links = ", ".join(link(folder, page) for folder in dict.fromkeys(folders))
    return wrapped(f"{what}: {links}.")


def wrapped(paragraph: str) -> str:
    """A paragraph in lines of a page, with links in one piece."""
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)


def with_error(mean: float, error: float) -> str:
    """A share and its standard error, in Markdown that no line breaks."""
    return f"{mean:.1%}&nbsp;&plusmn;&nbsp;{error:.1%}"


def put(text: str, begin: str, end: str, generated: str, page: str | Path) -> str:
    """The text of a page with what is generated between two marks as it is now.

    Ends the program if the page has no such place.
    """
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{Path(page).name} has no place for what is generated: {begin.strip()}")
    return f"{before}{begin}\n{generated}\n{end}{after}"


def put_all(made: Mapping[str, Mapping[str, str]], begin: str, end: str) -> None:
    """Put what is generated, by page and by the name in its mark `begin`, into the pages."""
    for page, tables in made.items():
        path = REPOSITORY / page
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = put(text, begin.format(name), end, table, page)
        path.write_text(text, encoding="utf-8")


def linked(text: str) -> set[str]:
    """The anchors of the folders of results that a page links to."""
    return set(LINK.findall(text))
