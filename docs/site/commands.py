"""The reference page of the command line, generated from the commands before every build."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rap.cli import EXIT_CODES, TOPICS
from rap.cli import app as rap_app
from rap.cli.setup import command_tree

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PAGE = Path("reference") / "commands.md"
HIDDEN = {"--help", "--install-completion", "--show-completion"}


def write_page(app: "Sphinx") -> None:
    """Write the page into the sources, where git ignores it; an unchanged one is left alone."""
    path, text = Path(app.srcdir) / PAGE, page()
    if not path.is_file() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")


def page() -> str:
    """The whole page as Markdown."""
    root: Any = typer.main.get_command(rap_app)
    places = dict(command_tree(root))
    lines = [
        "# Command line",
        "",
        "Generated from the commands. The value of an option comes from the command line, then",
        "from a YAML file (`--config run.yaml`, with flag names as keys), then from its default.",
        "A section of the file that is named after a command, such as `compress:`, is of that",
        "command alone. Section `shared` is for YAML anchors, and `paper` for published figures.",
        "Results are printed to standard output, everything else to standard error. `--json`",
        "prints one JSON object. Colors and progress bars appear only on a terminal, and not if",
        "`NO_COLOR` is set.",
        "",
        "`rap completion bash` (or `zsh`, `fish`) prints a script that completes commands, options",
        "and files.",
        "",
        "## Exit codes",
        "",
        "| code | meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
        "",
    ]
    for topic, entries in TOPICS.items():
        lines += [f"## {topic}", ""]
        for name, entry in entries.items():
            own = [place for place in places if place.split()[:1] == [name]]
            for place in own:
                lines += _command(place, places[place], entry.example if place == name else "")
    return "\n".join(lines)


def _command(place: str, command: Any, example: str) -> Iterator[str]:
    # A subcommand stands one level below its group.
    yield f"{'#' * (2 + len(place.split()))} rap {place}"
    yield ""
    yield (command.help or "").strip()
    yield ""
    if example:
        yield from ("```sh", example, "```", "")
    arguments = [one for one in command.params if not one.opts[0].startswith("-")]
    options = [one for one in command.params if one.opts[0].startswith("-")]
    rows = [(one, one.name.upper()) for one in arguments]
    rows += [(one, ", ".join(sorted(one.opts, key=len))) for one in options]
    rows = [row for row in rows if not HIDDEN & set(row[0].opts)]
    if rows:
        yield from ("| argument, option | default | description |", "|---|---|---|")
    for one, shown in rows:
        text = (getattr(one, "help", None) or "").replace("|", "\\|").replace("<", "&lt;")
        names = " ".join(f"`{part}`" for part in shown.split(", "))
        yield f"| {names} | {_default(one)} | {text} |"
    yield ""


def _default(one: Any) -> str:
    if one.required:
        return "required"
    value = getattr(one, "default", None)
    if value is None or value is False or value == [] or callable(value):
        return ""
    shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return f"`{shown}`"


def setup(app: "Sphinx") -> dict[str, bool]:
    """Write the page before sources are read."""
    app.connect("builder-inited", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
