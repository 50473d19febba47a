"""Folding one head: which directions stay, at which frequencies, and how errors are compared."""

import pytest
import torch
from torch import Tensor

from cases.groupings import groupings
from rap.planning.folding import EDGES, fold_head, group_directions, logit_error, usual_reach
from rap.planning.subspace import hermitian_root

SIZE, CONTEXT = 6, 400
FREQUENCIES = torch.tensor([0.2, 0.15, 0.1, 0.05, 0.02, 0.01], dtype=torch.float64)
ONE_GROUP = (1e6,)


def moment(seed: int) -> Tensor:
    """A Hermitian second moment whose slow pairs carry as much as the fast ones."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * SIZE, SIZE, dtype=torch.complex128, generator=generator)
    scale = torch.rand(SIZE, dtype=torch.float64, generator=generator) + 0.1
    return (rows * scale).mH @ (rows * scale) / len(rows)


def energies(*diagonal: float) -> Tensor:
    """The moment of pairs that know nothing of each other."""
    return torch.tensor(diagonal, dtype=torch.complex128).diag()


@pytest.mark.parametrize("edges", [(), ONE_GROUP], ids=["alone", "one group"])
def test_the_pairs_with_most_logit_energy_stay_at_their_own_frequencies(edges):
    """Pairs without correlation fold into themselves, whatever their group."""
    query, key = energies(1, 9, 2, 1, 3, 1), energies(2, 1, 1, 1, 2, 4)  # products 2 9 2 1 6 4
    with groupings(edges):
        head = fold_head(query, key, FREQUENCIES, 3, CONTEXT)
    assert head.frequency.tolist() == [1, 4, 5]
    for mix in (head.key_mix, head.query_mix):
        assert mix.abs().argmax(-1).tolist() == [1, 4, 5]
        assert ((mix.abs() > 1e-5).sum(-1) == 1).all()


def test_the_best_of_candidates_that_differ_is_chosen():
    query, key = moment(0), moment(1)
    slow = FREQUENCIES / 10  # so that every candidate makes groups of its own
    alone = []
    for edges in EDGES:
        with groupings(edges):
            alone.append(fold_head(query, key, slow, 3, CONTEXT).error)
    assert max(alone) > 1.05 * min(alone)
    assert fold_head(query, key, slow, 3, CONTEXT).error == min(alone)


def test_a_longer_reach_keeps_far_logits_nearer():
    """Folded for near tokens alone, a head is wrong far away: what reach is for."""
    query, key = moment(4), moment(5)
    slow = FREQUENCIES / 10
    roots = hermitian_root(query), hermitian_root(key)
    near, far = (fold_head(query, key, slow, 3, CONTEXT, reach=reach) for reach in (4, 4000))
    errors = {
        reach: [
            logit_error(*roots, slow, head.frequency, head.key_mix, head.query_mix, reach)
            for head in (near, far)
        ]
        for reach in (4, 4000)
    }
    assert errors[4][0] < 0.9 * errors[4][1]
    assert errors[4000][1] < 0.9 * errors[4000][0]
    usual = fold_head(query, key, slow, 3, CONTEXT)
    assert usual.error == fold_head(query, key, slow, 3, CONTEXT, reach=CONTEXT**0.5).error


def test_a_direction_turns_with_the_pair_that_gives_it_most():
    """Most of the key's energy, not the largest entry of its combination: the two differ here."""
    differ = 0
    for seed in range(5):
        key = moment(2 * seed + 1)
        [directions] = group_directions(moment(2 * seed), key, [0] * SIZE).values()
        for direction in directions:
            entries = [float(abs(direction.key_mix[pair]) ** 2) for pair in range(SIZE)]
            given = [entries[pair] * float(key[pair, pair].real) for pair in range(SIZE)]
            assert direction.pair == given.index(max(given))
            differ += direction.pair != entries.index(max(entries))
    assert differ > 0


def test_errors_are_means_over_distances():
    """Errors of two cuts, one to the other, against every distance on its own."""
    query, key = moment(2), moment(3)
    roots = hermitian_root(query), hermitian_root(key)
    steps = torch.linspace(0, 1, 64, dtype=torch.float64)
    distances = torch.expm1(steps * torch.log1p(torch.tensor(float(CONTEXT)).sqrt().double()))
    unit, errors = torch.eye(SIZE, dtype=torch.complex128), []
    for kept, turning in (([0, 1, 3], [0, 1, 3]), ([2, 4, 5], [1, 1, 1])):
        mean = 0.0
        for distance in distances:
            turn = torch.polar(torch.ones(SIZE).double(), -distance * FREQUENCIES)
            lost = turn.diag()
            for pair, other in zip(kept, turning, strict=True):
                lost[pair, pair] -= turn[other]
            mean += float((roots[0] @ lost @ roots[1]).abs().square().sum()) / len(distances)
        slots = (torch.tensor(turning), unit[kept], unit[kept], usual_reach(CONTEXT))
        errors.append((logit_error(*roots, FREQUENCIES, *slots), mean))
    (first, by_hand), (second, other) = errors
    assert first / second == pytest.approx(by_hand / other, rel=1e-6)
