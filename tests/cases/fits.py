"""A fit that is over at once."""

from dataclasses import dataclass

from rap.recovery.layer_fit import FitConfig

SHORT = {"window": 48, "num_windows": 20, "validation_windows": 2, "steps": 2}


@dataclass(frozen=True, kw_only=True)
class ShortFit(FitConfig):
    """Two steps on twenty short windows."""

    window: int = SHORT["window"]
    num_windows: int = SHORT["num_windows"]
    validation_windows: int = SHORT["validation_windows"]
    steps: int = SHORT["steps"]
