"""The command line that repeats a grid, or one cell of it: flags for all that is no default."""

import shlex
from dataclasses import fields
from typing import Any

from ...checkpoint.device import AUTO
from .cells import Cell
from .grid import Grid
from .measurement import Measures
from .variants import DENSE

# Flags of `rap compare`, by the fields that they set; those of Measures are all `--measure`.
FLAGS = {
    "align": "--align",
    "calibration": "--calibration",
    "num_windows": "--windows",
    "window": "--window",
    "seed": "--seed",
    "bos": "--bos",
}
DTYPE = "float32"  # the default of `rap compare`


def cell_command(
    cell: Cell,
    grid: Grid,
    model: str,
    dtype: str = DTYPE,
    *,
    device: str = AUTO,
    device_map: str | None = None,
) -> str:
    """`rap compare` for one cell alone (the dense one is measured with any)."""
    method = grid.methods[0] if cell.spec == DENSE else cell.spec
    parts = ["rap", "compare", model, "--methods", method, "--retain", _number(cell.retain)]
    if cell.recover != "none":
        parts += ["--recover", cell.recover]
    for name, value in _changed(grid):
        if name in FLAGS:
            parts += [FLAGS[name], "0" if value is None else str(value)]
    for name, value in grid.recovery.items():
        if grid.applies(name, cell.recover):
            parts += ["--set", f"{name}={_text(value)}"]
    for name, value in _changed(grid.measures):
        parts += ["--measure", f"{name}={_text(value)}"]
    if dtype != DTYPE:
        parts += ["--dtype", dtype]
    if device != AUTO:
        parts += ["--device", device]
    if device_map is not None:
        parts += ["--device-map", device_map]
    return shlex.join([*parts, "-o", "runs/cell"])


def _number(value: float) -> str:
    """As short as it can be and still be that number: another one would be another cell."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _changed(settings: Grid | Measures) -> list[tuple[str, Any]]:
    return [
        (field.name, getattr(settings, field.name))
        for field in fields(settings)
        if getattr(settings, field.name) != field.default
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)
