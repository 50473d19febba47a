"""A fit that is over at once."""

from dataclasses import dataclass

from rap.recovery.layer_fit import FitConfig


@dataclass(frozen=True, kw_only=True)
class ShortFit(FitConfig):
    """Two steps on twenty short windows."""

    window: int = 48
    num_windows: int = 20
    validation_windows: int = 2
    steps: int = 2
