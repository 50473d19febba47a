"""Folding by given groups of pairs, where the package chooses among its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from rap.planning import folding, shared


@contextmanager
def groupings(*candidates: Sequence[float]) -> Iterator[None]:
    """Inside, folds choose among these groupings, each of its edges in radians."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (folding, shared):
            patch.setattr(module, "EDGES", candidates)
        yield
