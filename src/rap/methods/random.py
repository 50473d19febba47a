"""The control of every comparison: pairs and channels kept by chance."""

from dataclasses import dataclass
from typing import ClassVar

from .base import Control


@dataclass(frozen=True, kw_only=True)
class Random(Control):
    """Whole pairs and value channels at random, the same for the same `seed`."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "whole pairs and value channels, by chance"
