"""Trading widths by a measure: what is found, what it costs, and what is left alone."""

from collections.abc import Sequence

import pytest

from rap.planning.knapsack import local_search, most_measures

OFFERED = [range(1, 9)] * 6


class Counted:
    """A measure of widths with a known optimum, that counts how often it is asked."""

    def __init__(self, worth: Sequence[float]):
        self.worth, self.asked = worth, 0

    def __call__(self, widths: Sequence[int]) -> float:
        """Convex losses of every position, weighed by its worth."""
        self.asked += 1
        return sum(worth / width for worth, width in zip(self.worth, widths, strict=True))


def test_width_goes_where_it_is_worth_most() -> None:
    measure = Counted([16.0, 1, 1, 1, 1, 1])
    widths = local_search([4] * 6, OFFERED, [1] * 6, measure, rounds=20)
    assert sum(widths) == 24
    # The least sum of worth over width at 24 in all: widths in proportion to roots of worth.
    assert widths[0] == 8
    assert measure(widths) < measure([4] * 6)


def test_a_start_at_its_best_stays_after_one_look() -> None:
    measure = Counted([1.0] * 6)
    assert local_search([4] * 6, OFFERED, [1] * 6, measure, rounds=5) == [4] * 6
    assert measure.asked == 1 + 2 * 6


def test_measures_are_no_more_than_said() -> None:
    measure = Counted([9.0, 1, 4, 1, 16, 2])
    local_search([4] * 6, OFFERED, [1] * 6, measure, rounds=3)
    assert measure.asked <= most_measures(6, 3)


@pytest.mark.parametrize("heads", [[1, 1, 2, 2], [3, 1, 3, 1]])
def test_only_steps_of_one_price_are_traded(heads: list[int]) -> None:
    start, worth = [2, 2, 2, 2], [1.0, 9.0, 9.0, 1.0]
    widths = local_search(start, [range(1, 5)] * 4, heads, Counted(worth), rounds=4)
    spent = sum(n * width for n, width in zip(heads, widths, strict=True))
    assert spent == 2 * sum(heads)
    assert widths != start


def test_swaps_that_are_worse_together_are_halved() -> None:
    """Alone every narrower or wider first half helps; more than one swap at a time is refused."""

    def measure(widths: Sequence[int]) -> float:
        moved = sum(abs(width - 2) for width in widths)
        gained = sum(width - 2 for width in widths[:2]) - sum(width - 2 for width in widths[2:])
        return 100.0 if moved > 2 else -float(gained)

    assert sorted(local_search([2] * 4, [range(1, 4)] * 4, [1] * 4, measure)) == [1, 2, 2, 3]


def test_no_width_leaves_what_is_offered() -> None:
    offered = [[2, 4], [2, 4], [4], [2]]
    assert local_search([2, 4, 4, 2], offered, [1] * 4, Counted([9.0, 1, 1, 1]), rounds=9) == [
        4,
        2,
        4,
        2,
    ]
