"""Trading width between layers, by a measure of the whole: a pure function of that measure.

Prices of widths, layer by layer, take cuts for independent. Where the cut whole can be measured,
every layer is tried a step narrower and a step wider, and the swaps that this promises most of are
made, as many at once as the measure confirms.
"""

from collections.abc import Callable, Sequence

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
