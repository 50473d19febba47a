"""One YAML file for several commands: sections named after them, and data that is no option.

    compress: {recover: paper}     options of `rap compress` alone
    evaluate: {bos: none, retrieval: {length: 4096}}
                                   of all `rap evaluate` commands, and of `rap evaluate retrieval`
    shared: &shared {model: m}     for sections to include, as `<<: *shared`
    paper: [{method: rap, ...}]    published figures, which `rap compare` shows beside its own

Without sections all entries are options of the command that reads the file.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
import yaml

from ..model.errors import RapError

DATA = ("paper", "shared")


def own_entries(context: typer.Context, entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that concern this command: those outside sections, then those of its own.

    A section is a mapping under the name of a command or a group of commands, whose section may
    have sections of its commands; `recover: fast` is an option all the same.
    """
    path: list[Any] = [context]
    while path[0].parent is not None:
        path.insert(0, path[0].parent)
    chosen: dict[str, Any] = {}
    for group, step in pairwise(path):
        commands = getattr(group.command, "commands", {})
        sections = {key for key in commands if isinstance(entries.get(key), dict)}
        chosen |= {key: value for key, value in entries.items() if key not in {*sections, *DATA}}
        name = str(step.command.name)
        entries = entries[name] if name in sections else {}
    return chosen | entries


def read_figures(path: Path | None) -> list[dict[str, Any]]:
    """The published figures of a file, none without one.

    Each names the `method`, `retain` and `recover` of a cell, and the `source` of its figures.
    Raises RapError for anything but a list of such entries.
    """
    if path is None:
        return []
    figures = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("paper") or []
    if not isinstance(figures, list) or not all(isinstance(entry, dict) for entry in figures):
        raise RapError(f"--config {path}: paper must be a list of figures, each with a method")
    return figures
