"""Check a built site: every link and file inside it exists, and nothing is loaded from elsewhere.

Links to other sites are not followed: the check works offline.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a page loads what it needs, and those by which it points elsewhere.
LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}
POINTS = {("a", "href")}


class Page(HTMLParser):
    """What a page loads, where it points, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.points: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.unresolved = 0  # links that MyST left as text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in one element."""
        found = dict(attrs)
        # Other links of a head (canonical, next, ...) name pages, and load nothing.
        named = tag == "link" and found.get("rel") not in ("stylesheet", "icon", "preload")
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if value and (tag, name) in LOADS and not named:
                self.loads.append(value)
            if value and (tag, name) in POINTS:
                self.points.append(value)
        self.unresolved += (tag, found.get("class")) == ("span", "xref myst")


def violations(site: Path) -> list[str]:
    """Links that lead nowhere and files from other servers, a line each."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    return [line for path in pages for line in _of_page(path, pages, site)]


def _of_page(path: Path, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    shown = path.relative_to(site)
    if count := pages[path].unresolved:
        yield f"{shown}: {count} links to no page of the site"
    for target in pages[path].loads:
        if urlsplit(target).scheme not in ("", "data") or urlsplit(target).netloc:
            yield f"{shown}: loads {target} from another server"
    for target in (*pages[path].loads, *pages[path].points):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        goal = goal / "index.html" if goal.is_dir() else goal
        if not goal.is_file():
            yield f"{shown}: {target} leads nowhere"
        elif goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
            yield f"{shown}: {target} has no such anchor"


def main(folder: str) -> int:
    """The exit code: 1 if something is wrong, which is printed."""
    site = Path(folder).resolve()
    found = violations(site)
    count = len(list(site.rglob("*.html")))
    print("\n".join(found) or f"{count} pages, every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
