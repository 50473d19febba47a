"""The methods a budget can be spent with: one file each, all with the same contract."""

from .base import Method, PairPruning
from .naming import parse_method
from .rap import Rap
from .registry import METHODS, traits_of

__all__ = ["METHODS", "Method", "PairPruning", "Rap", "parse_method", "traits_of"]
