"""The methods there are, by name, and the two that any score must beat: by size and by chance."""

from dataclasses import dataclass
from typing import ClassVar

from ..planning.plan import Plan
from .a3 import A3
from .base import Control, Method, traits
from .elitekv import EliteKv
from .heads import Heads
from .kvpruner import IndexedKvPruner, KvPruner
from .matryoshka import Matryoshka
from .palu import Palu
from .rap import Rap
from .starkv import StarKv
from .svdllm import SvdLlm, SvdLlm2
from .transmla import TransMla


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


METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Rap,
        KvPruner,
        IndexedKvPruner,
        Palu,
        SvdLlm,
        SvdLlm2,
        StarKv,
        EliteKv,
        TransMla,
        Matryoshka,
        Heads,
        A3,
        Random,
        Magnitude,
    )
}


def traits_of(plan: Plan) -> dict[str, str]:
    """The entries of a plan's method about itself; empty for a method unknown to this release."""
    method = METHODS.get(plan.method.get("name", ""))
    return traits(method) if method is not None else {}
