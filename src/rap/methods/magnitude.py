"""The simplest pruning: pairs and channels with the smallest weights go."""

from dataclasses import dataclass
from typing import ClassVar

from .base import Control


@dataclass(frozen=True, kw_only=True)
class Magnitude(Control):
    """Whole pairs and value channels by the L2 norm of their rows of W_k and W_v."""

    name: ClassVar[str] = "magnitude"
    summary: ClassVar[str] = "the whole pairs and value channels with the largest weights"
