"""The methods a budget can be spent with: one file each, all with the same contract."""

from .a3 import A3
from .base import Method, PairPruning
from .elitekv import EliteKv
from .heads import Heads
from .kvpruner import IndexedKvPruner, KvPruner
from .magnitude import Magnitude
from .matryoshka import Matryoshka
from .palu import Palu
from .random import Random
from .rap import Rap
from .svdllm import SvdLlm

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Rap,
        KvPruner,
        IndexedKvPruner,
        Palu,
        SvdLlm,
        EliteKv,
        Matryoshka,
        Heads,
        A3,
        Random,
        Magnitude,
    )
}

__all__ = ["METHODS", "Method", "PairPruning", "Rap"]
