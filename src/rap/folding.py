"""Folding keys: pairs that turn nearly alike over the context share fewer slots.

Inside a group of near-equal frequencies a complex-linear map commutes with the rotation up to the
frequency mismatch, so the group is compressed by the complex SVD of C_q^1/2 C_k^1/2 instead of by
dropping pairs. Every slot rotates at the frequency of one pair of its group. Plain pairs are groups
of one, and a group that keeps all its slots is left as it is, so full width is exact.

Shapes: G KV heads, P pairs, M slots. Moments are E[x x^H] of pairs as first + i second channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class FoldedHead:
    """The kept slots of one KV head, by ascending frequency index.

    `frequency` [M] is the dense pair a slot rotates at; `key_mix`, `query_mix` complex [M, P] its
    combination of dense pairs; `error` the expected squared logit error, without softmax scale.
    """

    frequency: Tensor
    key_mix: Tensor
    query_mix: Tensor
    error: float


def fold_head(
    query_PP: Tensor,
    key_PP: Tensor,
    frequencies: Tensor,
    num_slots: int,
    context: int,
    candidates: Sequence[Sequence[float]] = EDGES,
) -> FoldedHead:
    """The best way to keep `num_slots` slots of one head, over the candidate groupings.

    The measure is `logit_error`, rotation mismatch included, over distances up to `context`.
    """
    found = [
        _fold(
            query_PP, key_PP, frequencies, num_slots, frequency_groups(frequencies, context, edges)
        )
        for edges in candidates
    ]
    roots = hermitian_root(query_PP), hermitian_root(key_PP)
    scored = [
        FoldedHead(*slots, error=logit_error(*roots, frequencies, *slots, context))
        for slots in found
    ]
    return min(scored, key=lambda head: head.error)


def frequency_groups(frequencies: Tensor, context: int, edges: Sequence[float]) -> list[int]:
    """The group number of every pair; one that turns beyond the last edge is alone in its own."""
    groups = []
    for pair, turn in enumerate((frequencies * context).tolist()):
        within = [number for number, edge in enumerate(edges) if turn < edge]
        groups.append(-1 - within[0] if within else pair)
    return groups


def spectrum(
    query_PP: Tensor,
    key_PP: Tensor,
    frequencies: Tensor,
    context: int,
    edges: Sequence[float] = EDGES[-1],
) -> Tensor:
    """Squared singular values of all directions of a head, descending [P]: what each slot saves.

    The sum beyond the first m is the squared logit error of keeping m slots, mismatch apart.
    """
    groups = frequency_groups(frequencies, context, edges)
    singular = [
        direction[0]
        for group in set(groups)
        for direction in _directions(
            query_PP, key_PP, [pair for pair, found in enumerate(groups) if found == group]
        )
    ]
    return torch.tensor(singular, dtype=torch.float64).square().sort(descending=True).values


def logit_error(
    query_root_PP: Tensor,
    key_root_PP: Tensor,
    frequencies: Tensor,
    frequency: Tensor,
    key_mix: Tensor,
    query_mix: Tensor,
    context: int,
) -> float:
    """Expected |q^H R_d k - q'^H R'_d k'|^2 over distances d, for independent q and k.

    It is the mean over d of ||C_q^1/2 (R_d - B^H R'_d A) C_k^1/2||^2, with A and B the key and
    query mixing. Distances are spaced evenly in log(1 + d) up to the root of `context`: attention
    looks at near tokens most, and a longer reach chose worse groupings (docs/log.md).
    """
    steps = torch.linspace(0, 1, NUM_DISTANCES, dtype=torch.float64)
    distances = torch.expm1(steps * torch.log1p(torch.tensor(float(context)).sqrt()))
    dense = torch.polar(torch.ones(()).double(), distances[:, None] * frequencies)
    slots = torch.polar(torch.ones(()).double(), distances[:, None] * frequencies[frequency])
    # C_q^1/2 and C_k^1/2 absorbed once, the rotations applied as diagonals per distance.
    left, right = query_root_PP @ query_mix.mH, key_mix @ key_root_PP
    full = torch.einsum("ap,dp,pb->dab", query_root_PP, dense, key_root_PP)
    kept = torch.einsum("am,dm,mb->dab", left, slots, right)
    return float((full - kept).abs().square().sum((1, 2)).mean())


def _fold(
    query_PP: Tensor, key_PP: Tensor, frequencies: Tensor, num_slots: int, groups: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    directions = []
    for group in sorted(set(groups)):
        members = [pair for pair, found in enumerate(groups) if found == group]
        directions += _directions(query_PP, key_PP, members)
    directions.sort(key=lambda direction: -direction[0])
    kept = directions[:num_slots]
    slots = []
    for group in sorted(set(groups)):
        members = [pair for pair, found in enumerate(groups) if found == group]
        chosen = [direction for direction in kept if groups[direction[1]] == group]
        slots += _plain(query_PP, members) if len(chosen) == len(members) else chosen
    slots.sort(key=lambda direction: direction[1])
    return (
        torch.tensor([direction[1] for direction in slots], dtype=torch.long),
        torch.stack([direction[2] for direction in slots]),
        torch.stack([direction[3] for direction in slots]),
    )


_Direction = tuple[float, int, Tensor, Tensor]


def _directions(query_PP: Tensor, key_PP: Tensor, members: list[int]) -> list[_Direction]:
    """Every direction of a group: singular value, snapped pair, key and query combination."""
    if len(members) == 1:
        pair = members[0]
        weight = float((query_PP[pair, pair].real * key_PP[pair, pair].real).clamp_min(0).sqrt())
        return [(weight, *slot[1:]) for slot in _plain(query_PP, members)]
    index = torch.tensor(members)
    query, key = query_PP[index[:, None], index], key_PP[index[:, None], index]
    factors = weighted_subspace(key, query, len(members))
    energy = factors.down.abs().square() * torch.diagonal(key).real
    result = []
    for number, pair in enumerate(index[energy.argmax(-1)].tolist()):
        key_mix = torch.zeros(len(query_PP), dtype=torch.complex128)
        query_mix = torch.zeros_like(key_mix)
        key_mix[index], query_mix[index] = factors.down[number], factors.up[:, number].conj()
        result.append((float(factors.singular[number]), pair, key_mix, query_mix))
    return result


def _plain(query_PP: Tensor, members: list[int]) -> list[_Direction]:
    unit = torch.eye(len(query_PP), dtype=torch.complex128)
    return [(float("inf"), pair, unit[pair], unit[pair]) for pair in members]
