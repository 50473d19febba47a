"""One YAML file for several commands: sections named after them, and data that is no option.

model: org/model        options of every command that reads the file
compress: {recover: paper}      options of `rap compress` alone
paper: [{method: rap, ...}]     published figures, which `rap compare` shows beside its own
"""

from pathlib import Path
from typing import Any

import typer
import yaml

from ..errors import RapError

DATA = ("paper",)


def own_entries(context: typer.Context, path: Path, entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that concern this command: those outside sections, then those of its own."""
    commands = getattr(context.find_root().command, "commands", {})
    own = entries.get(str(context.command.name), {})
    if not isinstance(own, dict):
        raise RapError(f"--config {path}: section {context.command.name} holds no options")
    return {key: value for key, value in entries.items() if key not in {*commands, *DATA}} | own


def read_figures(path: Path | None) -> list[dict[str, Any]]:
    """The published figures of a file, none without one.

    Each names the `method`, `retain` and `recover` of a cell, and the `source` of its figures.
    """
    if path is None:
        return []
    found = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("paper") or []
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise RapError(f"--config {path}: paper must be a list of figures, each with a method")
    return found
