"""Pairs and channels kept by the size of their weights, or by chance: what any score must beat."""

from dataclasses import dataclass
from typing import ClassVar

from .base import Control


@dataclass(frozen=True, kw_only=True)
class Magnitude(Control):
    """RoPE pairs and value channels by the L2 norm of their rows of W_k and W_v."""

    name: ClassVar[str] = "magnitude"
    summary: ClassVar[str] = "the whole pairs and value channels with the largest weights"


@dataclass(frozen=True, kw_only=True)
class Random(Control):
    """RoPE pairs and value channels at random, the same for the same `seed`."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "whole pairs and value channels, by chance"
