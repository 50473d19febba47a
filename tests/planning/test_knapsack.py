"""Spending by error: against every possible split, of curves that are not convex."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rap.model.errors import RapError
from rap.planning.knapsack import allocate_by_error, tempered

Curves = list[list[float]]
retains = st.floats(0.01, 1, exclude_min=True)


@st.composite
def problems(draw, convex: bool = False, even: bool = False) -> tuple[Curves, dict[str, Any]]:
    """Falling curves of a few layers, whole numbers so that sums are exact; any shape, or convex.

    Layers differ in size and heads unless `even`; some sizes are no multiple of the unit.
    """
    count = draw(st.integers(1, 4))
    unit = draw(st.integers(1, 3))
    if even:
        sizes = [unit * draw(st.integers(1, 4))] * count
        heads = [draw(st.integers(1, 3))] * count
    else:
        sizes = draw(st.lists(st.integers(1, 7), min_size=count, max_size=count))
        heads = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    curves = []
    for size in sizes:
        drops = draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))
        if convex:
            drops = sorted(drops, reverse=True)
        curves.append([float(sum(drops[kept:])) for kept in range(size + 1)])
    return curves, {"sizes": sizes, "heads": heads, "unit": unit}


def total(kept: Sequence[int], heads: Sequence[int]) -> int:
    return sum(amount * count for amount, count in zip(kept, heads, strict=True))


def lost(curves: Curves, kept: Sequence[int]) -> float:
    return sum(curve[amount] for curve, amount in zip(curves, kept, strict=True))


def splits(sizes: Sequence[int], unit: int) -> list[tuple[int, ...]]:
    """Every way to keep whole units, at least one and at most all, with a last partial one."""
    return list(itertools.product(*([*range(unit, size, unit), size] for size in sizes)))


def least(sizes: Sequence[int], heads: Sequence[int], unit: int) -> float:
    """The smallest retain at which every layer can keep a unit."""
    floors = [min(unit, size) for size in sizes]
    return total(floors, heads) / total(sizes, heads)


def test_a_smaller_total_is_taken_where_it_loses_less():
    """Of layers with 3 and 2 heads, one of which needs nothing more: 7 channels beat 8."""
    curves = [[9.0, 0.0, 0.0], [9.0, 5.0, 0.0]]
    assert allocate_by_error(curves, 0.8, [2, 2], heads=[3, 2]) == [1, 2]


def test_tempered_errors_go_half_of_the_way():
    """Halving with every channel, layers that lose 256 times as much are 8 channels apart."""
    curves = [[scale * 2.0**-kept for kept in range(17)] for scale in (1, 256, 16)]
    sizes = [16] * 3
    assert allocate_by_error(curves, 0.5, sizes) == [4, 12, 8]
    assert allocate_by_error([tempered(one, 8) for one in curves], 0.5, sizes) == [6, 10, 8]
    assert tempered([2.0, 0.0], 1) == [2.0, 0.0]  # a layer that loses nothing there stays


@given(problems(), retains)
def test_no_split_within_the_budget_loses_less(problem, retain):
    curves, how = problem
    retain = max(retain, least(**how))
    kept = allocate_by_error(curves, retain, **how)
    possible = splits(how["sizes"], how["unit"])
    assert tuple(kept) in possible
    # The budget is the total nearest to what was asked for, the larger of two that are as near.
    asked = retain * total(how["sizes"], how["heads"])
    reached = {total(split, how["heads"]) for split in possible}
    nearest = min(abs(found - asked) for found in reached)
    budget = max(found for found in reached if abs(found - asked) <= nearest + 1e-9)
    within = [split for split in possible if total(split, how["heads"]) <= budget]
    best = min(lost(curves, split) for split in within)
    assert lost(curves, kept) == best
    # Of splits that lose as little, one that keeps most.
    ties = [split for split in within if lost(curves, split) == best]
    assert total(kept, how["heads"]) == max(total(split, how["heads"]) for split in ties)


@given(problems(even=True), retains)
def test_equal_layers_spend_the_whole_budget(problem, retain):
    curves, how = problem
    retain = max(retain, least(**how))
    kept = allocate_by_error(curves, retain, **how)
    asked = retain * total(how["sizes"], how["heads"])
    step = how["unit"] * how["heads"][0]
    assert abs(total(kept, how["heads"]) - asked) <= step / 2 + 1e-8


@given(problems(convex=True, even=True), retains, retains)
def test_no_layer_keeps_less_at_a_larger_retain_where_curves_are_convex(problem, first, second):
    """No exact spending of other curves can promise it: see the next test."""
    curves, how = problem
    low, high = sorted(max(retain, least(**how)) for retain in (first, second))
    small, large = (allocate_by_error(curves, retain, **how) for retain in (low, high))
    assert all(a <= b for a, b in zip(small, large, strict=True))


def test_a_layer_may_keep_less_at_a_larger_retain_where_curves_are_not_convex():
    curves = [[9.0, 9.0, 9.0, 0.0], [9.0, 9.0, 4.0, 4.0]]
    assert allocate_by_error(curves, 3 / 6, [3, 3]) == [1, 2]
    assert allocate_by_error(curves, 4 / 6, [3, 3]) == [3, 1]


@given(problems(), retains, retains)
def test_a_larger_retain_never_loses_more(problem, first, second):
    curves, how = problem
    low, high = sorted(max(retain, least(**how)) for retain in (first, second))
    small, large = (allocate_by_error(curves, retain, **how) for retain in (low, high))
    assert lost(curves, large) <= lost(curves, small)


@given(problems())
def test_retain_one_keeps_everything(problem):
    curves, how = problem
    assert allocate_by_error(curves, 1.0, **how) == how["sizes"]


def test_ties_go_to_the_lower_layer_every_time():
    for _ in range(3):
        assert allocate_by_error([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]] * 3, 8 / 15, [5] * 3) == [5, 2, 1]
        assert allocate_by_error([[9.0, 5.0, 2.0, 0.0]] * 3, 5 / 9, [3] * 3) == [2, 2, 1]


@pytest.mark.parametrize("retain", [0.0, -0.5, 1.01, float("nan")])
def test_a_retain_outside_its_range_is_refused(retain):
    with pytest.raises(RapError, match=r"outside \(0, 1\]"):
        allocate_by_error([[1.0, 0.0]], retain, [1])


def test_a_retain_below_one_unit_in_every_layer_is_refused_with_the_least_possible():
    curves = [[float(16 - kept) for kept in range(17)]] * 4
    with pytest.raises(RapError, match=r"below one step of 4 in every layer.* at least 0\.25"):
        allocate_by_error(curves, 0.1, [16] * 4, unit=4)
    assert allocate_by_error(curves, 0.25, [16] * 4, unit=4) == [4] * 4


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_cannot_be_compared_is_refused(error):
    with pytest.raises(RapError, match="curve 2 has an error of"):
        allocate_by_error([[1.0, 0.0], [error, 0.0]], 1.0, [1, 1])


def test_a_share_of_more_than_may_be_kept():
    """Half of sixteen is all of eight, and as much as is offered; more cannot be kept."""
    convex = [float(20 - n) ** 2 for n in range(9)]
    assert allocate_by_error([convex, convex], 0.5, [8, 8], dense=[16, 16]) == [8, 8]
    assert allocate_by_error([convex, convex], 0.25, [8, 8], dense=[16, 16]) == [4, 4]
    assert sum(allocate_by_error([convex, convex], 0.4, [8, 8], dense=[16, 8])) == 10
    with pytest.raises(RapError, match=r"retain 0\.6 is more than the 0\.5 that layers may keep"):
        allocate_by_error([convex, convex], 0.6, [8, 8], dense=[16, 16])
