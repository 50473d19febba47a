"""Scores and a retain ratio to how much every layer keeps, and which: pure functions.

Budgets are counted in steps of two channels of a head (a pair, or its worth of free or value
channels), so that layers with any share of rotating channels are budgeted alike.

Shapes: G KV heads, P pairs, F channels that never rotate, D head dim, L layers.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..model.errors import RapError
from .scores import LayerScores

Budget = Literal["auto", "adaptive", "uniform", "error", "tempered", "search", "retrieval"]
BY_ERROR = ("error", "tempered", "search")  # spend by the error of every width
# Layers that copy are few: half as much again for a tenth costs the others an eighteenth.
WIDE_LAYERS, WIDER = 0.1, 1.5
KeyShare = float | Literal["pooled"]


@dataclass(frozen=True)
class LayerBudget:
    """What every KV head of one layer keeps: pairs, free key channels, value channels."""

    pairs: int
    free: int
    values: int


class Selection(NamedTuple):
    """Kept dense indices, ascending, a list per KV head: what PairPlan.of_indices takes."""

    pairs: list[list[int]]
    channels: list[list[int]]
    free: list[list[int]]


def allocate(
    score_L: Sequence[float],
    retain: float,
    sizes: Sequence[int],
    *,
    heads: Sequence[int] | None = None,
    unit: int = 1,
    floor: int = 1,
) -> list[int]:
    """How much of `sizes` every layer keeps: the kept fraction proportional to the score.

    Layer l has `heads[l]` heads of its size (one if not given). Every layer starts at `floor`, then
    the budget retain * sum(heads * sizes) is spent one unit of all heads of a layer at a time, each
    to the layer with the highest score * size / (2 units + 1) (Webster, Sainte-Lague), the lower
    index on a tie. A full layer drops out, which hands its share to the others in proportion.
    Unlike the largest remainder, the order of spending does not depend on `retain`, so no layer
    ever keeps less at a larger one. The total is the nearest to the budget; retain 1 keeps all,
    with a last partial unit where `unit` does not divide a size.

    >>> allocate([3.0, 1.0], 0.5, [32, 32])
    [24, 8]

    Raises RapError if retain is outside (0, 1], a score is negative or not finite, or the floors
    alone exceed the budget.
    """
    check_retain(retain)
    for number, score in enumerate(score_L, 1):
        if not (math.isfinite(score) and score >= 0):
            raise RapError(f"score {number} is {score}: scores must be finite and >= 0")
    assert len(score_L) == len(sizes) and unit >= 1 and floor >= 0
    start = math.ceil(floor / unit) * unit
    kept = [min(start, size) for size in sizes]
    heads = [1] * len(sizes) if heads is None else heads
    costs = [count // math.gcd(*heads) for count in heads]
    spent, whole = (sum(c * n for c, n in zip(costs, each, strict=True)) for each in (kept, sizes))
    budget = retain * whole
    if spent - budget > unit * max(costs, default=1) / 2:
        raise RapError(
            f"retain {retain} is below the floor of {start} in every layer: use at least "
            f"{math.ceil(1000 * spent / whole) / 1000}, or for a smaller alignment"
        )

    def rank(layer: int) -> tuple[float, int]:
        return -score_L[layer] * sizes[layer] / (2 * (kept[layer] / unit) + 1), layer

    queue = [rank(layer) for layer, size in enumerate(sizes) if kept[layer] < size]
    heapq.heapify(queue)
    remaining = budget - spent
    while queue:
        layer = queue[0][1]
        step = min(unit, sizes[layer] - kept[layer])
        if remaining < costs[layer] * step / 2:
            break
        kept[layer] += step
        remaining -= costs[layer] * step
        if kept[layer] < sizes[layer]:
            heapq.heapreplace(queue, rank(layer))
        else:
            heapq.heappop(queue)
    return kept


def uniform(retain: float, sizes: Sequence[int], unit: int = 1) -> list[int]:
    """Every layer rounded alike to the nearest unit, half up, never above its size.

    For P = 64 pairs and retain 0.9 ... 0.5 this keeps the paper's 58, 51, 45, 38 and 32:

    >>> [uniform(retain, [64])[0] for retain in (0.9, 0.8, 0.7, 0.6, 0.5)]
    [58, 51, 45, 38, 32]

    Raises RapError if retain is outside (0, 1] or a layer would keep nothing.
    """
    check_retain(retain)
    kept = [nearest_width(retain * size, size, unit) for size in sizes]
    for size, amount in zip(sizes, kept, strict=True):
        if amount == 0:
            raise RapError(
                f"retain {retain} of {size} rounds to nothing in steps of {unit}: use more, or "
                "for a smaller alignment"
            )
    return kept


def num_wide(positions: int) -> int:
    """How many of so many layers budget `retrieval` makes wider: a tenth, one at least of two."""
    return max(1, round(WIDE_LAYERS * positions)) if positions > 1 else 0


def widened(
    retain: float,
    wide: Collection[int],
    sizes: Sequence[int],
    *,
    heads: Sequence[int],
    whole: Sequence[int],
    unit: int = 1,
) -> list[int]:
    """Widths at which `wide` positions keep WIDER times `retain`, and the others alike.

    `sizes` is the most that positions may keep, each of so many `heads`, and `whole` what `retain`
    is a share of.

    >>> widened(0.5, [2], [96] * 5, heads=[1] * 5, whole=[96] * 5)
    [42, 42, 72, 42, 42]

    Raises RapError if the others would keep nothing.
    """
    check_retain(retain)
    share = min(1.0, WIDER * retain)
    kept = {i: nearest_width(share * whole[i], sizes[i], unit) for i in wide}
    others = [i for i in range(len(sizes)) if i not in kept]
    left = retain * sum(n * h for n, h in zip(whole, heads, strict=True))
    left -= sum(n * heads[i] for i, n in kept.items())
    if unit * (sum(heads[i] for i in others) - max(heads[i] for i in others) / 2) > left:
        raise RapError(
            f"retain {retain} leaves less than one step of {unit} for layers that are not wider: "
            "use more, or budget 'uniform', or for a smaller alignment"
        )
    shared = allocate(
        [1.0] * len(others),
        min(1.0, left / sum(sizes[i] * heads[i] for i in others)),
        [sizes[i] for i in others],
        heads=[heads[i] for i in others],
        unit=unit,
        floor=unit,
    )
    kept |= dict(zip(others, shared, strict=True))
    return [kept[i] for i in range(len(sizes))]


def layer_score(scores: LayerScores) -> float:
    """Mean over heads and pairs (paper, Budget-Alloc); two free channels count as a pair."""
    return float(scores.pairs_GP.double().sum() + scores.free_GF.double().sum()) / (
        scores.channels_GD.numel() / 2
    )


def kv_budgets(
    scores: Sequence[LayerScores | None],
    retain: float,
    *,
    budget: Budget = "adaptive",
    key_share: KeyShare = 0.5,
    align: int = 1,
    ranks: Sequence[float] | None = None,
) -> list[LayerBudget | None]:
    """The budget of every layer that has scores, for the mean retain ratio `retain`.

    key_share 0.5 is balanced: one budget per layer from its key score, V as wide as K. Another
    share s gives K 2 s retain and V 2 (1 - s) retain of their channels; what exceeds all of one
    goes to the other. "pooled" lets K and V of all layers (with budget "uniform": of each layer)
    compete by score, which the paper ablates and finds to starve K. `align` is the channel count
    that widths are multiples of; 1 and 2 mean single pairs. Where only some channels rotate, pairs
    and free channels keep the same fraction. `ranks` are other scores of the layers that have some,
    for budget "adaptive" of an unpooled share.

    Raises RapError for settings outside their range, or a retain too small to keep anything.
    """
    check_retain(retain)
    if budget not in ("adaptive", "uniform"):
        raise RapError(f"unknown budget {budget!r}: use adaptive or uniform")
    check_settings(key_share, align)
    present = [layer for layer in scores if layer is not None]
    unit = max(1, align // 2)
    if key_share == "pooled":
        steps = _pooled(present, retain, budget, unit)
    else:
        ranks = [layer_score(layer) for layer in present] if ranks is None else ranks
        steps = _shared(present, ranks, retain, budget, key_share, unit)
    kept = zip(present, _sizes(present), *steps, strict=True)
    budgets = iter([layer_budget(layer.pairs_GP.shape[1], *rest) for layer, *rest in kept])
    return [None if layer is None else next(budgets) for layer in scores]


def check_settings(key_share: KeyShare, align: int) -> None:
    """Raise RapError for a share or an alignment that no budget can follow."""
    if align < 1 or (align > 1 and align % 2):
        raise RapError(f"align cannot be {align}: give 1 or an even number of channels")
    if key_share != "pooled" and not (isinstance(key_share, (int, float)) and 0 < key_share < 1):
        raise RapError(f"key_share cannot be {key_share!r}: give a number in (0, 1) or pooled")


def select(
    scores: Sequence[LayerScores | None], budgets: Sequence[LayerBudget | None]
) -> list[Selection | None]:
    """The best pairs and channels of every head within its budget, the lower index on a tie."""
    return [
        None
        if layer is None or kept is None
        else Selection(
            pairs=_top(layer.pairs_GP, kept.pairs),
            channels=_top(layer.channels_GD, kept.values),
            free=_top(layer.free_GF, kept.free),
        )
        for layer, kept in zip(scores, budgets, strict=True)
    ]


def ranking(score_GN: Tensor) -> Tensor:
    """Indices [G, N] in the order in which `select` keeps them: best first, the lower on a tie."""
    return score_GN.argsort(dim=1, descending=True, stable=True)


def _shared(
    layers: list[LayerScores],
    ranks: Sequence[float],
    retain: float,
    budget: Budget,
    share: float,
    unit: int,
) -> tuple[list[int], list[int]]:
    keys, values = 2 * share * retain, 2 * (1 - share) * retain
    keys, values = keys + max(0.0, values - 1), values + max(0.0, keys - 1)
    sizes, heads = _sizes(layers), _heads(layers)

    def spend(part: float) -> list[int]:
        part = min(1.0, part)
        try:
            if budget == "uniform":
                return uniform(part, sizes, unit)
            return allocate(ranks, part, sizes, heads=heads, unit=unit)
        except RapError as error:
            if share == 0.5:
                raise
            raise RapError(
                f"key_share {share} of retain {retain} leaves keys or values {part:.3g} of their "
                "channels, less than can be kept: use a larger retain, or a key_share nearer "
                "to 0.5"
            ) from error

    return spend(keys), spend(values)


def _pooled(
    layers: list[LayerScores], retain: float, budget: Budget, unit: int
) -> tuple[list[int], list[int]]:
    sizes = _sizes(layers)
    keys = [layer_score(layer) for layer in layers]
    values = [2 * float(layer.channels_GD.double().mean()) for layer in layers]
    if budget == "uniform":
        split = [
            allocate([key, value], retain, [size, size], unit=unit)
            for key, value, size in zip(keys, values, sizes, strict=True)
        ]
        return [kept[0] for kept in split], [kept[1] for kept in split]
    heads = _heads(layers)
    kept = allocate(keys + values, retain, sizes + sizes, heads=heads + heads, unit=unit)
    return kept[: len(layers)], kept[len(layers) :]


def _sizes(layers: list[LayerScores]) -> list[int]:
    return [layer.channels_GD.shape[1] // 2 for layer in layers]


def _heads(layers: list[LayerScores]) -> list[int]:
    return [layer.channels_GD.shape[0] for layer in layers]


def layer_budget(num_pairs: int, size: int, key_steps: int, value_steps: int) -> LayerBudget:
    """A layer that keeps so many of its `size` steps of keys, and of values."""
    pairs, free = split_steps(num_pairs, size, key_steps)
    return LayerBudget(pairs=pairs, free=free, values=2 * value_steps)


def split_steps(num_pairs: int, size: int, steps: int) -> tuple[int, int]:
    """Pairs and free key channels that `steps` of a layer's `size` steps are, in their proportion.

    Pairs are rounded half up; one at least, at any width but none, where there are pairs.
    """
    pairs = (2 * num_pairs * steps + size) // (2 * size)
    if num_pairs and steps:
        pairs = max(1, pairs)
    return pairs, 2 * (steps - pairs)


def _top(score_GN: Tensor, count: int) -> list[list[int]]:
    kept: list[list[int]] = ranking(score_GN)[:, :count].sort(dim=1).values.tolist()
    return kept


def nearest_width(target: float, size: int, unit: int) -> int:
    """The multiple of `unit` nearest to `target`, or `size` itself, which need be no multiple."""
    whole = size // unit * unit
    if target >= (whole + size) / 2:
        return size
    return min(whole, math.floor(target / unit + 0.5) * unit)


def check_retain(retain: float) -> None:
    """Raise RapError for a ratio that is no part of the cache."""
    if not 0 < retain <= 1:
        raise RapError(f"retain {retain} is outside (0, 1]: give the fraction of the cache to keep")
