"""A cell of the grid: its resolved configuration, and the folder that holds its result.

    OUT/cells/<name>/config.json    what was asked, resolved to the last default
    OUT/cells/<name>/result.json    what was measured; the cell is finished
    OUT/cells/<name>/error.json     or why it failed; it is tried again by the next run
    OUT/models/<name>/              the model, as a checkpoint, if it is to be kept

A folder appears whole or not at all. Its name ends in a hash of the configuration, so a changed
configuration is another cell and an unchanged one is never run twice.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...checkpoint.files import read_json, whole_directory, write_json
from ...methods import Method

CONFIG, RESULT, ERROR = "config.json", "result.json", "error.json"
FORMAT = 1  # raised when a cell of an older release must be measured again


@dataclass(frozen=True, eq=False)
class Cell:
    """One model to make and measure; `method` is None for the dense row.

    `config` is JSON-able and decides the cell's name.
    """

    spec: str
    retain: float
    recover: str
    method: Method | None
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name: readable first, then what tells configurations apart."""
        return self._named(self.config)

    @property
    def model_name(self) -> str:
        """The folder of the model that is measured: the same for other measures of it."""
        return self._named({key: value for key, value in self.config.items() if key != "measures"})

    def _named(self, config: dict[str, Any]) -> str:
        text = json.dumps({"format": FORMAT, **config}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        words = re.sub(r"[^A-Za-z0-9_.=-]+", "-", self.spec)
        return f"{words}-{self.retain:g}-{self.recover}-{digest}"

    def fitted(self) -> "Cell":
        """The cell whose model this one distils, if its recovery begins with a fit."""
        config = {**self.config, "recover": "fit", "recovery": None}
        return replace(self, recover="fit", config=config)

    def __str__(self) -> str:
        if self.method is None:
            return self.spec
        return f"{self.spec} at {self.retain:g}, recovery {self.recover}"


def finished(folder: Path) -> dict[str, Any] | None:
    """The result of a finished cell, or None; RapError if it is damaged."""
    return _read(folder / RESULT)


def failure(folder: Path) -> dict[str, Any] | None:
    """The record of a failed cell, or None; RapError if it is damaged."""
    return _read(folder / ERROR)


def store(
    folder: Path,
    cell: Cell,
    *,
    result: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> None:
    """Write a cell's folder: its configuration, and its result or its error."""
    with whole_directory(folder, own=True) as partial:
        write_json(partial / CONFIG, cell.config)
        write_json(partial / (RESULT if error is None else ERROR), error or result)


def _read(path: Path) -> dict[str, Any] | None:
    remedy = f"remove {path.parent}, and repeat the command"
    return read_json(path, remedy) if path.is_file() else None
