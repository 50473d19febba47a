"""Which pairs to keep, or slots, when heads and layers must share one list.

Shapes: G KV heads, P pairs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model.errors import RapError
from .folding import (
    EDGES,
    Direction,
    FoldedHead,
    fill_slots,
    frequency_groups,
    group_directions,
    usual_reach,
)
from .losses import Metric, Moments


def shared_pairs(score_GP: Sequence[Tensor], num_pairs: int) -> list[int]:
    """The `num_pairs` pairs that all heads of all layers keep in the uniform layout, ascending.

    A layer's scores are divided by their sum, so that every layer has one vote, then summed over
    heads and layers; the lower index wins a tie. Raises RapError if there are not that many pairs,
    layers differ in their number of pairs, or no score is positive.
    """
    sizes = sorted({scores.shape[-1] for scores in score_GP})
    if len(sizes) != 1:
        raise RapError(f"layers have {sizes} pairs: one list of pairs needs equal layers")
    if not 1 <= num_pairs <= sizes[0]:
        raise RapError(f"cannot keep {num_pairs} of {sizes[0]} pairs in every head")
    votes = torch.zeros(sizes[0], dtype=torch.float64)
    for scores in score_GP:
        total = scores.double().sum()
        if total > 0:
            votes += scores.double().sum(0).cpu() / total.cpu()
    if not votes.any():
        raise RapError("every score is zero: calibrate on a text that the model can read")
    kept: list[int] = votes.argsort(descending=True, stable=True)[:num_pairs].sort().values.tolist()
    return kept


def shared_frequencies(frequencies: Sequence[Tensor | None]) -> Tensor:
    """The one list of dense frequencies [P] of all layers (None: no attention).

    Raises RapError, naming two layers, if they rotate differently: one list of slots has no meaning
    there.
    """
    present = [(index, own) for index, own in enumerate(frequencies) if own is not None]
    first, shared = present[0]
    for index, own in present:
        if not torch.equal(own, shared):
            raise RapError(
                f"layers {first} and {index} rotate at other frequencies (local and global, or "
                "without positions): no list of slots serves both, use profile 'per-head'"
            )
    return shared


def shared_slots(
    moments: Sequence[Moments],
    frequencies: Tensor,
    num_slots: int,
    context: int,
    metric: Metric,
    *,
    reach: float | None = None,
) -> list[list[FoldedHead]]:
    """Folded slots at one list of frequencies for all heads, [layer][head], each with its own mix.

    `moments` are those of every layer's keys in units of `metric` (`losses.key_moments`). For every
    grouping of EDGES the number of slots of each group follows the share of logit energy its
    directions carry over all heads, and each slot takes the pair that weighs most in that rank of
    the group; the grouping with the smallest sum of errors wins. Losses of heads compare as they
    are. Of their errors by "output" every head has one vote: error and energy are divided by its
    total. A group that keeps all its slots stays plain. `reach` as in `folding.fold_head`.
    """
    reach = usual_reach(context) if reach is None else reach
    loss = metric == "loss"  # readers are gradients of keys
    heads = [(read, key) for layer in moments for key, read in zip(*layer, strict=True)]
    best: list[FoldedHead] = []
    lowest = float("inf")
    for edges in EDGES:
        groups = frequency_groups(frequencies, context, edges)
        by_head = [group_directions(query, key, groups) for query, key in heads]
        # A head that is all zero loses nothing, whatever it is divided by.
        totals = [(not loss and _total(directions)) or 1.0 for directions in by_head]
        slots = _shared_list(by_head, totals, num_slots)
        filled = [
            fill_slots(query, key, frequencies, groups, directions, slots, reach, turned=loss)
            for (query, key), directions in zip(heads, by_head, strict=True)
        ]
        error = sum(head.error / total for head, total in zip(filled, totals, strict=True))
        if error < lowest:
            best, lowest = filled, error
    per_layer = iter(best)
    return [[next(per_layer) for _ in keys] for keys, _ in moments]


def _total(groups: Mapping[int, Sequence[Direction]]) -> float:
    return sum(direction.weight**2 for group in groups.values() for direction in group)


def _shared_list(
    heads: Sequence[Mapping[int, Sequence[Direction]]], totals: Sequence[float], num_slots: int
) -> dict[int, list[int]]:
    """The pairs whose frequencies the slots of every group take, in the ranks' order."""
    votes: dict[tuple[int, int], dict[int, float]] = {}
    for groups, total in zip(heads, totals, strict=True):
        for number, group in groups.items():
            for rank, direction in enumerate(group):
                share = votes.setdefault((number, rank), {})
                share[direction.pair] = share.get(direction.pair, 0.0) + direction.weight**2 / total
    ranked = sorted(votes, key=lambda place: (-sum(votes[place].values()), place))
    slots: dict[int, list[int]] = {}
    for number, rank in sorted(ranked[:num_slots]):
        share = votes[number, rank]
        slots.setdefault(number, []).append(max(share, key=lambda pair: (share[pair], -pair)))
    return slots
