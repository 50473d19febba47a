"""Folded keys: pairs with similar frequencies over the context share fewer slots.

A logit is the real part of q^H R_d k. Moments are taken of circular pairs (a phase of its own in
every sample), of which the real part is half the square: E[Re(z)^2] = E|z|^2 / 2.

Inside a group of near-equal frequencies a complex-linear map commutes with the rotation up to the
frequency mismatch, so the group is compressed by the complex SVD of C_q^1/2 C_k^1/2 instead of by
dropping pairs. Every slot rotates at the frequency of one pair of its group. Plain pairs are groups
of one, and a group that keeps all its slots is left as it is, so full width is exact.

Everything here also folds several KV heads into one list of slots (merging.py): at one frequency
the pairs of all heads rotate alike, so that a group of pairs is that group of every head. Where a
moment is of g heads, it is of their pairs side by side, head by head, and so are the mixes.

Shapes: P pairs, M slots, S = g P pairs of g heads side by side (one head unless said: S = P).
Moments are E[x x^H] of pairs as first + i second channel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .subspace import hermitian_root, weighted_subspace

# Candidate edges in radians of theta * context; pairs between the same two edges form a group.
EDGES: tuple[tuple[float, ...], ...] = (
    (),
    (1.0,),
    (3.0,),
    (1.0, 3.0),
    (3.0, 10.0),
    (1.0, 3.0, 10.0),
    (3.0, 10.0, 30.0),
)
NUM_DISTANCES = 64
# Of the square of a complex product: what its real part has, in the mean over phases.
REAL_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Direction:
    """One complex direction of a group of pairs.

    `weight` is its singular value (root of the squared logit lost without it), `pair` the dense
    pair that weighs most in it, all heads together, and whose frequency it takes, `key_mix` and
    `query_mix` complex [S] its combination of dense pairs.
    """

    weight: float
    pair: int
    key_mix: Tensor
    query_mix: Tensor


@dataclass(frozen=True, eq=False)
class FoldedHead:
    """The kept slots of one cached head, by ascending frequency index.

    `frequency` [M] is the dense pair a slot rotates at; `key_mix`, `query_mix` complex [M, S] its
    combination of dense pairs; `error` the expected squared logit error, without softmax scale.
    """

    frequency: Tensor
    key_mix: Tensor
    query_mix: Tensor
    error: float


def fold_head(
    query_SS: Tensor,
    key_SS: Tensor,
    frequencies: Tensor,
    num_slots: int,
    context: int,
    *,
    reach: float | None = None,
    turned: bool = False,
) -> FoldedHead:
    """The best way to keep `num_slots` slots of one cached head, over the groupings of EDGES.

    Within a grouping the directions with the largest weights stay, whichever their group. Between
    groupings `logit_error` decides, rotation mismatch included; `turned` as it says. Its `reach`
    is `usual_reach(context)` if none is given.
    """
    reach = usual_reach(context) if reach is None else reach
    heads = []
    for edges in EDGES:
        groups = frequency_groups(frequencies, context, edges)
        directions = group_directions(query_SS, key_SS, groups)
        ranked = [(group, rank) for group, rows in directions.items() for rank in range(len(rows))]
        ranked.sort(key=lambda place: -directions[place[0]][place[1]].weight)
        slots: dict[int, list[int]] = {}
        for group, rank in ranked[:num_slots]:
            slots.setdefault(group, []).append(directions[group][rank].pair)
        head = fill_slots(
            query_SS, key_SS, frequencies, groups, directions, slots, reach, turned=turned
        )
        heads.append(head)
    return min(heads, key=lambda head: head.error)


def usual_reach(context: int) -> float:
    """Default distance, in tokens, over which the mismatch of slots is evaluated.

    The root of the context: attention looks at near tokens most (docs/log.md).
    """
    return float(context) ** 0.5


def frequency_groups(frequencies: Tensor, context: int, edges: Sequence[float]) -> list[int]:
    """The group number of every pair; one that turns beyond the last edge is alone in its own.

    `frequencies` [P] are in radians a token, `context` in tokens, `edges` in radians.

    >>> frequency_groups(torch.tensor([1.0, 0.1, 0.02, 0.01]), 100, edges=(3.0,))
    [0, 1, -1, -1]
    """
    groups = []
    for pair, turn in enumerate((frequencies * context).tolist()):
        within = [number for number, edge in enumerate(edges) if turn < edge]
        groups.append(-1 - within[0] if within else pair)
    return groups


def group_directions(
    query_SS: Tensor, key_SS: Tensor, groups: Sequence[int]
) -> dict[int, list[Direction]]:
    """All directions of every group of one cached head, the most important of a group first.

    `groups` are the group numbers of P pairs, the same in each of the g heads.
    """
    directions = {}
    for group in sorted(set(groups)):
        members = _members(groups, group, len(query_SS))
        query, key = query_SS[members[:, None], members], key_SS[members[:, None], members]
        factors = weighted_subspace(key, query, len(members))
        energy = factors.down.abs().square() * torch.diagonal(key).real
        # Of every pair, summed over heads: a head's own members come in one ascending run.
        size = len(members) * len(groups) // len(query_SS)
        energy = energy.unflatten(1, (-1, size)).sum(1)
        mixes = torch.zeros(2, len(members), len(query_SS), dtype=torch.complex128)
        mixes[0][:, members], mixes[1][:, members] = factors.down, factors.up.mH
        weights = factors.singular * REAL_SHARE**0.5
        rows = zip(weights.tolist(), members[energy.argmax(-1)].tolist(), strict=True)
        directions[group] = [
            Direction(weight, pair, mixes[0, rank], mixes[1, rank])
            for rank, (weight, pair) in enumerate(rows)
        ]
    return directions


def fill_slots(
    query_SS: Tensor,
    key_SS: Tensor,
    frequencies: Tensor,
    groups: Sequence[int],
    directions: Mapping[int, Sequence[Direction]],
    slots: Mapping[int, Sequence[int]],
    reach: float,
    *,
    turned: bool = False,
) -> FoldedHead:
    """A head whose best directions of every group rotate at the pairs that `slots` lists for it.

    Slots and directions are matched in order of frequency. A group that has all its slots keeps
    its plain pairs instead, those of every head.
    """
    filled: list[Direction] = []
    unit = torch.eye(len(query_SS), dtype=torch.complex128)
    for group, pairs in slots.items():
        if len(pairs) == len(directions[group]):
            places = _members(groups, group, len(query_SS)).tolist()
            filled += [
                Direction(0.0, place % len(groups), unit[place], unit[place]) for place in places
            ]
            continue
        chosen = sorted(directions[group][: len(pairs)], key=lambda direction: direction.pair)
        matched = zip(sorted(pairs), chosen, strict=True)
        filled += [replace(direction, pair=pair) for pair, direction in matched]
    filled.sort(key=lambda direction: direction.pair)
    frequency = torch.tensor([direction.pair for direction in filled])
    key_mix = torch.stack([direction.key_mix for direction in filled])
    query_mix = torch.stack([direction.query_mix for direction in filled])
    roots = hermitian_root(query_SS), hermitian_root(key_SS)
    error = logit_error(*roots, frequencies, frequency, key_mix, query_mix, reach, turned=turned)
    return FoldedHead(frequency, key_mix, query_mix, error)


def spectrum(
    query_SS: Tensor,
    key_SS: Tensor,
    frequencies: Tensor,
    context: int,
    edges: Sequence[float] = EDGES[-1],
) -> Tensor:
    """Squared weights of all directions of a head, descending [S]: what each slot saves.

    The sum beyond the first m is the squared logit error of keeping m slots, mismatch apart.
    """
    groups = frequency_groups(frequencies, context, edges)
    directions = group_directions(query_SS, key_SS, groups).values()
    weights = [direction.weight for group in directions for direction in group]
    return torch.tensor(weights, dtype=torch.float64).square().sort(descending=True).values


def logit_error(
    query_root_SS: Tensor,
    key_root_SS: Tensor,
    frequencies: Tensor,
    frequency: Tensor,
    key_mix: Tensor,
    query_mix: Tensor,
    reach: float,
    *,
    turned: bool = False,
) -> float:
    """Expected square of Re(q^H R_d k - q'^H R'_d k') over distances d, for independent q and k.

    It is the mean over d of half ||C_q^1/2 (R_d - B^H R'_d A) C_k^1/2||^2, with A and B the key and
    query mixing, and R_d = diag(e^{-i theta d}): a query stands d tokens after its key.
    With `turned`, C_q is of queries as the key sees them, R_d^H q, as gradients of keys are: those
    of queries are R_d C_q R_d^H. Distances are spaced evenly in log(1 + d) up to `reach` tokens.
    """
    distances = -spaced(reach)
    turning = torch.polar(torch.ones(()).double(), distances[:, None] * frequencies[frequency])
    frequencies = frequencies.repeat(len(key_root_SS) // len(frequencies))
    dense = torch.polar(torch.ones(()).double(), distances[:, None] * frequencies)
    # The roots are absorbed once, the rotations applied as diagonals per distance. A root of
    # R_d C_q R_d^H is C_q^1/2 R_d^H.
    if turned:
        full = query_root_SS @ key_root_SS
        left = torch.einsum("ap,dp,mp->dam", query_root_SS, dense.conj(), query_mix.conj())
    else:
        full = torch.einsum("ap,dp,pb->dab", query_root_SS, dense, key_root_SS)
        left = query_root_SS @ query_mix.mH
    kept = (left * turning[:, None]) @ (key_mix @ key_root_SS)
    return REAL_SHARE * float((full - kept).abs().square().sum((1, 2)).mean())


def spaced(reach: float) -> Tensor:
    """Distances at which logits are compared: evenly spaced in log(1 + d) up to `reach` tokens."""
    return torch.expm1(torch.linspace(0, 1, NUM_DISTANCES, dtype=torch.float64) * math.log1p(reach))


def _members(groups: Sequence[int], group: int, size: int) -> Tensor:
    """Where a group's pairs are among `size` pairs of heads side by side, head by head."""
    return torch.tensor([place for place in range(size) if groups[place % len(groups)] == group])
