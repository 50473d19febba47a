"""What `rap recover` trains by: a preset with changed settings, and the training data."""

from dataclasses import dataclass
from typing import Annotated

import typer

from ..data.held_out import split
from ..methods.settings import read_settings
from ..model.errors import RapError
from ..recovery.config import RecoveryConfig, preset
from ..recovery.layer_fit import FitConfig, fit_config
from ..recovery.stages import RECOVERIES

RECIPES = [name for name in RECOVERIES if name not in ("none", "projections")]
Recipe = Annotated[
    str, typer.Option("--preset", "--recover", help=f"One of: {', '.join(RECIPES)}.")
]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", help="Training data, as --calibration of compress; repeatable."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Preset setting such as steps=100; repeatable (for fit+X, of X)."),
]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What recovers: a preset with changed settings, and the texts that it reads."""

    recipe: Recipe = "fit"
    text: Texts = None
    changes: Changes = None

    @property
    def texts(self) -> list[str]:
        """What is read where nothing was given, too."""
        return self.text or ["bundled"]

    def split(self, evaluate: str) -> tuple[list[str], str | None]:
        """What is trained on, and the evaluation dataset (None for 'none'), which it leaves out."""
        shown = split(",".join(self.texts), None if evaluate == "none" else evaluate)[1]
        return [split(text, shown)[0] for text in self.texts], shown


def configured(recipe: str, changes: list[str], seed: int) -> RecoveryConfig | FitConfig | None:
    """Settings of a recipe's last part with `name=value` changes; None if it has none.

    Raises RapError for an unknown recipe or setting.
    """
    if recipe not in RECIPES:
        raise RapError(f"unknown recovery preset {recipe!r}: use one of {', '.join(RECIPES)}")
    values, last = read_settings(changes), recipe.rpartition("+")[2]
    if last == "fit":
        return fit_config(**{"seed": seed, **values})
    if recipe != "closed-form":
        return preset(last, **{"seed": seed, **values})
    if values:
        raise RapError(f"closed-form has no setting {', '.join(values)}: leave it out")
    return None
