"""A comparison as one result file: a record of every cell, and tables in the paper's form."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import cells as folders
from .cells import Cell
from .tables import tables

KEPT_VERSIONS = ("rap", "commit", "python", "packages", "device", "time")


def summarize(
    name: str,
    cells: Sequence[Cell],
    folder: Callable[[Cell], Path],
    provenance: dict[str, Any],
    *,
    paper: Sequence[dict[str, Any]] = (),
    command: Callable[[Cell], str] = str,
) -> dict[str, Any]:
    """Everything that is known of the `cells`: finished ones as records, failed ones apart.

    `paper` entries name a `method`, `retain` and `recover`, and join the cell of these three;
    `command` gives the command line that repeats one cell.
    """
    records, failed = [], []
    for cell in cells:
        where = folder(cell)
        result, error = folders.finished(where), folders.failure(where)
        about = {
            "cell": cell.name,
            "method": cell.spec,
            "retain": cell.retain,
            "recover": cell.recover,
        }
        if result is not None:
            published = _published(paper, about)
            shared = {"command": command(cell), **({"paper": published} if published else {})}
            records.append({**about, **shared, **_record(cell, result)})
        elif error is not None:
            failed.append({**about, "command": command(cell), "error": error["error"]})
    shown = tables(name, records, failed)
    return {
        "title": f"Methods side by side: {name}",
        "tables": shown,
        "cells": records,
        "failed": failed,
        "paper": list(paper),
        "command": provenance["command"],
        "provenance": provenance,
    }


def _published(paper: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any] | None:
    for entry in paper:
        if all(entry.get(key, "none") == about[key] for key in ("method", "retain", "recover")):
            return {k: v for k, v in entry.items() if k not in ("method", "retain", "recover")}
    return None


def _record(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    made = result["provenance"]
    kept = {key: value for key, value in result.items() if key not in ("provenance", "recovery")}
    recovery = result.get("recovery") or {}
    return {
        **kept,
        "settings": cell.config.get("method"),
        "recovery": {k: v for k, v in recovery.items() if k.startswith("perplexity")},
        "dense_fingerprint": cell.config["dense_fingerprint"],
        "seed": cell.config["seed"],
        # Cells of an older release have no commit.
        "provenance": {key: made.get(key) for key in KEPT_VERSIONS},
    }
