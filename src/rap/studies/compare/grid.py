"""The grid of a comparison: what is asked, and the cells that it comes to.

A cell is a resolved configuration, and the folder that holds its result.

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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...checkpoint.files import read_json, whole_directory, write_json
from ...data.bos import check_bos
from ...data.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from ...methods import Method, parse_method
from ...model.errors import RapError
from ...recovery.config import PRESETS, RecoveryConfig, recovery_config
from ...recovery.layer_fit import FitConfig, fit_config
from ...recovery.stages import check_recovery
from .measurement import Measures
from .variants import DENSE

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
        """The folder's name: readable first, then a hash that distinguishes configurations."""
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
        """The cell whose model this one distils, if its recovery begins layer by layer."""
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


OF_FIT = "fit."


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every method at every retain ratio after every recovery, on one calibration.

    `align` and `seed` reach the methods that have such a setting, so that all spend the same
    budget: by default single pairs, for widths in multiples of 8 miss most ratios by some percent.
    All windows of text begin as `bos` says, one of `bos.BOS_CHOICES`.
    `recovery` changes settings of every recovery that distils (`recovery.config.RecoveryConfig`),
    and after `fit.` those of every fit (`recovery.layer_fit.FitConfig`).
    """

    methods: tuple[str, ...]
    retains: tuple[float, ...] = (0.7, 0.5)
    recoveries: tuple[str, ...] = ("none",)
    align: int | None = 2
    calibration: str = "bundled"
    num_windows: int = CALIBRATION_WINDOWS
    window: int = CALIBRATION_WINDOW
    seed: int = 0
    bos: str = "auto"
    recovery: Mapping[str, Any] = field(default_factory=dict)
    measures: Measures = field(default_factory=Measures)

    def __post_init__(self) -> None:
        check_bos(self.bos)
        for name in ("methods", "retains", "recoveries"):
            if not getattr(self, name):
                raise RapError(f"a comparison needs {name}: name at least one, or remove the list")
        for name in self.recoveries:
            check_recovery(name)
            self._recovery(name)
        self._check_settings()
        # Every method is made once here, so that a bad setting is refused before any work.
        for spec in self.methods:
            for retain in self.retains:
                parse_method(spec, retain, **self.common)

    def _check_settings(self) -> None:
        """RapError for settings that no recovery can have, or that none asked for has."""
        for name in self.recovery:
            if not any(self.applies(name, recovery) for recovery in self.recoveries):
                raise RapError(
                    f"cannot set {name} of {', '.join(self.recoveries)}: fit.NAME=VALUE applies "
                    f"to fit, NAME=VALUE to one of {', '.join(PRESETS)}"
                )

    @staticmethod
    def applies(setting: str, recovery: str) -> bool:
        """Whether a recovery has a part that such a setting of `recovery` is of."""
        parts = recovery.split("+")
        return "fit" in parts if setting.startswith(OF_FIT) else parts[-1] in PRESETS

    @property
    def common(self) -> dict[str, Any]:
        """Settings of all methods that have them."""
        return {"align": self.align, "seed": self.seed}

    def distillation(self, recovery: str) -> RecoveryConfig | None:
        """The settings of a recovery's distillation, alone or after `fit`; None without one."""
        name = recovery.rpartition("+")[2]
        changes = {key: x for key, x in self.recovery.items() if not key.startswith(OF_FIT)}
        return recovery_config(name, **{"seed": self.seed, **changes}) if name in PRESETS else None

    def fit(self, recovery: str) -> FitConfig | None:
        """The settings of a recovery's fit; None without one."""
        if not self.applies(OF_FIT, recovery):
            return None
        given = ((key.partition(OF_FIT), value) for key, value in self.recovery.items())
        changes = {name: value for (_, of_fit, name), value in given if of_fit}
        return fit_config(**{"seed": self.seed, **changes})

    def cells(self, dense_fingerprint: str, dtype: str, bos: int | None = None) -> list[Cell]:
        """The dense cell first, then all without recovery, then recovery by recovery.

        `bos` is the token that windows begin with, which makes other cells of them than without.
        """
        shared = {
            "dense_fingerprint": dense_fingerprint,
            "dtype": dtype,
            "measures": self.measures.settings(),
            "seed": self.seed,
            **({} if bos is None else {"bos": bos}),
        }
        cells = [Cell(DENSE, 1.0, "none", None, {**shared, "spec": DENSE})]
        for recover in self.recoveries:
            for retain in self.retains:
                cells += [self._cell(spec, retain, recover, shared) for spec in self.methods]
        return cells

    def _recovery(self, name: str) -> dict[str, Any]:
        """The settings of all that a recovery does: others make another cell."""
        distilled, fit = self.distillation(name), self.fit(name)
        settings: dict[str, Any] = {"recovery": asdict(distilled) if distilled else None}
        return settings | ({"fit": asdict(fit)} if fit else {})

    def _cell(self, spec: str, retain: float, recover: str, shared: dict[str, Any]) -> Cell:
        method = parse_method(spec, retain, **self.common)
        calibration = {
            "text": self.calibration,
            "num_windows": self.num_windows,
            "window": self.window,
        }
        config = {
            **shared,
            "spec": spec,
            "retain": retain,
            "recover": recover,
            **self._recovery(recover),
            "method": method.describe(),
            "calibration": calibration,
        }
        return Cell(spec, retain, recover, method, config)
