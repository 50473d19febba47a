"""The methods a budget can be spent with: one file each, all with the same contract."""

from .base import Method, PairPruning
from .rap import Rap

METHODS: dict[str, type[Method]] = {method.name: method for method in (Rap,)}

__all__ = ["METHODS", "Method", "PairPruning", "Rap"]
