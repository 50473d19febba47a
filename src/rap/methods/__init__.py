"""The methods a budget can be spent with: one file each, all with the same contract."""

from .a3 import A3
from .base import Method, PairPruning
from .magnitude import Magnitude
from .palu import Palu
from .random import Random
from .rap import Rap
from .svdllm import SvdLlm

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Rap, Random, Magnitude, A3, Palu, SvdLlm)
}

__all__ = ["METHODS", "Method", "PairPruning", "Rap"]
