"""Spending a budget where it removes most error, exactly: pure functions.

Errors by width need not be convex: pairs and channels that are kept as they are may do little one
by one and much together. Spending a step at a time then strands layers, so all splits are compared,
by dynamic programming over the total that is spent.

Prices of widths, layer by layer, take layers for independent. Where the pruned whole can be
measured, every layer is tried a step narrower and a step wider, and the swaps that this promises
most of are made, as many at once as the measure confirms.

Shapes: B totals, from what all layers keep at least to what they keep at most.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..model.errors import RapError
from .budgets import check_retain

# Two totals are as near to what was asked for if only rounding tells them apart.
_ROUNDING = 1e-9


def allocate_by_error(
    errors: Sequence[Sequence[float]],
    retain: float,
    sizes: Sequence[int],
    *,
    heads: Sequence[int] | None = None,
    unit: int = 1,
    dense: Sequence[int] | None = None,
) -> list[int]:
    """How much of `sizes` every layer keeps, for the smallest total of the layers' own errors.

    `errors[l][n]` is layer l's error when each of its `heads[l]` heads (one if not given) keeps n
    of its size, n = 0 ... size. Layers keep whole units, at least one, with a last partial unit
    where `unit` does not divide a size. The budget is the possible total nearest to
    retain * sum(heads * sizes), the larger of two that are as near. Of the splits within it that
    have the least error this is one that keeps most, in lower layers first. `dense` are the sizes
    that `retain` is a share of, where layers may not keep all of it.

    The total error never rises with `retain`. Where layers are alike and errors convex in n, no
    layer keeps less at a larger ratio either; elsewhere the optimum may move what it spent.

    Raises RapError if retain is outside (0, 1], below one unit in every layer or above all that
    layers may keep, or an error is not finite.
    """
    check_retain(retain)
    for number, curve in enumerate(errors, 1):
        for error in curve:
            if not math.isfinite(error):
                raise RapError(f"curve {number} has an error of {error}: errors must be finite")
    heads = [1] * len(sizes) if heads is None else heads
    widths = offered_widths(sizes, unit)
    asked = above_floor(retain, sizes, heads, unit, dense)
    # Prices of widths above the floor, in the largest step that divides them all.
    prices = [
        [count * (n - each[0]) for n in each] for count, each in zip(heads, widths, strict=True)
    ]
    step = math.gcd(*(price for each in prices for price in each)) or 1
    prices = [[price // step for price in each] for each in prices]
    offered = [[curve[n] for n in each] for curve, each in zip(errors, widths, strict=True)]
    chosen = _cheapest(offered, prices, asked / step)
    return [each[option] for each, option in zip(widths, chosen, strict=True)]


def above_floor(
    retain: float,
    sizes: Sequence[int],
    heads: Sequence[int],
    unit: int,
    dense: Sequence[int] | None = None,
) -> float:
    """What `retain` leaves above one unit in every head of every layer, below 0 by rounding alone.

    Of the `dense` sizes, where it is a share of other than those that may be kept. Raises RapError
    for less, and for more than all `sizes`.
    """
    widths = offered_widths(sizes, unit)
    floor = sum(count * each[0] for count, each in zip(heads, widths, strict=True))
    most = sum(count * size for count, size in zip(heads, sizes, strict=True))
    whole = most if dense is None else sum(c * n for c, n in zip(heads, dense, strict=True))
    asked = retain * whole - floor
    if asked < -unit * min(heads) / 2:
        raise RapError(
            f"retain {retain} is below one step of {unit} in every layer: use at least "
            f"{math.ceil(1000 * floor / whole) / 1000}, or for a smaller alignment"
        )
    if retain * whole - most > unit * min(heads) / 2:
        largest = math.floor(1000 * most / whole) / 1000
        raise RapError(
            f"retain {retain} is more than the {largest} that layers may keep: use a smaller "
            "retain, or merge fewer heads"
        )
    return asked


def tempered(errors: Sequence[float], alike: int) -> list[float]:
    """A layer's errors by width over the root of that at width `alike`, which all layers have.

    Errors over the whole of it would make all layers equal there, and so their widths nearly; over
    its root, the logarithms of layers' scales are half as far apart. A layer without error stays.

    >>> tempered([4.0, 1.0, 0.25], 1), tempered([16.0, 4.0, 1.0], 1)
    ([4.0, 1.0, 0.25], [8.0, 2.0, 0.5])
    """
    scale = math.sqrt(errors[alike]) if errors[alike] > 0 else 1.0
    return [error / scale for error in errors]


def offered_widths(sizes: Sequence[int], unit: int) -> list[list[int]]:
    """What each of `sizes` may keep, ascending: whole units, and all of it."""
    return [[*range(unit, size, unit), size] for size in sizes]


def _cheapest(
    errors: Sequence[Sequence[float]], prices: Sequence[Sequence[int]], asked: float
) -> list[int]:
    """The option of every layer whose errors add up to the least, for a total price near `asked`.

    Layers are added last to first, so that the way back through the tables begins with the first.
    """
    least_B = torch.zeros(1, dtype=torch.float64)
    tables = []
    for error, price in zip(reversed(errors), reversed(prices), strict=True):
        grown_B = torch.full((len(least_B) + price[-1],), math.inf, dtype=torch.float64)
        option_B = torch.zeros(len(grown_B), dtype=torch.int32)
        for option in reversed(range(len(price))):
            reach = slice(price[option], price[option] + len(least_B))
            summed_B = least_B + error[option]
            better = summed_B < grown_B[reach]
            grown_B[reach] = torch.where(better, summed_B, grown_B[reach])
            option_B[reach] = torch.where(better, option, option_B[reach])
        least_B = grown_B
        tables.append(option_B)
    possible = least_B.isfinite().nonzero().flatten()
    distances = (possible - asked).abs()
    within = possible[: 1 + int((distances <= distances.min() + _ROUNDING).nonzero().max())]
    total = int(within[least_B[within] == least_B[within].min()].max())
    chosen = []
    for option_B, price in zip(reversed(tables), prices, strict=True):
        option = int(option_B[total])
        chosen.append(option)
        total -= price[option]
    return chosen


Measure = Callable[[Sequence[int]], float]
Swap = tuple[int, int]  # the position that gives a step, and the one that gets it


def local_search(
    start: Sequence[int],
    offered: Sequence[Sequence[int]],
    heads: Sequence[int],
    measure: Measure,
    *,
    rounds: int = 1,
) -> list[int]:
    """Widths of the same total as `start`, at which `measure` is no larger, and mostly smaller.

    `offered[l]` are the widths that position l may have, ascending, `start[l]` one of them; a
    channel of position l costs `heads[l]`. A round measures every position a step narrower and a
    step wider, pairs those that lose least with those that gain most where the steps cost alike,
    and makes all these swaps, or the better half of them, or the best quarter, ...: the first that
    measures smaller. It takes up to 2 L + log2 L + 1 measures of L positions. The search ends
    after so many `rounds`, or when no swap helps.
    """
    widths, least = list(start), measure(start)
    for _ in range(rounds):
        swaps = _promising(widths, least, offered, heads, measure)
        while swaps:
            traded = _traded(widths, swaps, offered)
            found = measure(traded)
            if found < least:
                widths, least = traded, found
                break
            swaps = swaps[: len(swaps) // 2]
        if not swaps:
            break
    return widths


def most_measures(positions: int, rounds: int) -> int:
    """How often `local_search` may measure."""
    return 1 + rounds * (2 * positions + positions.bit_length())


def _promising(
    widths: Sequence[int],
    now: float,
    offered: Sequence[Sequence[int]],
    heads: Sequence[int],
    measure: Measure,
) -> list[Swap]:
    """Swaps whose two steps, each measured alone, add up to a gain: the largest gain first."""
    changed: dict[int, dict[int, tuple[int, float]]] = {-1: {}, 1: {}}
    for step, found in changed.items():
        for place in range(len(widths)):
            moved = _moved(widths, place, step, offered)
            if moved is not None:
                price = abs(moved[place] - widths[place]) * heads[place]
                found[place] = price, measure(moved) - now
    givers = sorted(changed[-1], key=lambda place: changed[-1][place][1])
    takers = sorted(changed[1], key=lambda place: changed[1][place][1])
    swaps: list[Swap] = []
    for giver in givers:
        price, loss = changed[-1][giver]
        used = {place for swap in swaps for place in swap}
        fitting = (t for t in takers if t not in used | {giver} and changed[1][t][0] == price)
        taker = next(fitting, None)
        if giver not in used and taker is not None and loss + changed[1][taker][1] < 0:
            swaps.append((giver, taker))
    return sorted(swaps, key=lambda swap: changed[-1][swap[0]][1] + changed[1][swap[1]][1])


def _traded(
    widths: Sequence[int], swaps: Sequence[Swap], offered: Sequence[Sequence[int]]
) -> list[int]:
    traded = list(widths)
    for giver, taker in swaps:
        for place, step in ((giver, -1), (taker, 1)):
            moved = _moved(traded, place, step, offered)
            assert moved is not None
            traded = moved
    return traded


def _moved(
    widths: Sequence[int], place: int, step: int, offered: Sequence[Sequence[int]]
) -> list[int] | None:
    """The widths with one a step further; None at the end of what is offered."""
    position = list(offered[place]).index(widths[place]) + step
    if not 0 <= position < len(offered[place]):
        return None
    return [*widths[:place], offered[place][position], *widths[place + 1 :]]
