"""One list of slots for all heads: who has a vote in it, and which grouping wins."""

import pytest
import torch
from torch import Tensor

from cases.groupings import groupings
from rap.planning.folding import spectrum
from rap.planning.shared import shared_slots

CONTEXT = 400
# So slow that pairs may fold without a mismatch, and from fast to slow.
SLOW = torch.full((4,), 1e-4, dtype=torch.float64)
MIXED = torch.tensor([0.2, 0.15, 0.1, 0.05, 0.02, 0.01], dtype=torch.float64)


def energies(*diagonal: float) -> Tensor:
    """The moment [1, P, P] of a head whose pairs know nothing of each other."""
    return torch.tensor([diagonal], dtype=torch.complex128).diag_embed()


def moment(seed: int, size: int = 6) -> Tensor:
    """The moment [1, P, P] of pairs that do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * size, size, dtype=torch.complex128, generator=generator)
    order = torch.randperm(size, generator=generator)
    rows = rows * torch.logspace(0, -1, size, dtype=torch.float64)[order]
    return (rows.mH @ rows / len(rows))[None]


@pytest.mark.parametrize(("metric", "expected"), [("output", [0, 1]), ("loss", [2, 3])])
def test_every_head_has_one_vote_or_weighs_what_it_loses(metric, expected):
    ones, quiet, loud = energies(1, 1, 1, 1), energies(6, 5, 1, 1), energies(9, 9, 99, 98)
    layers = [(quiet, ones), (loud, ones), (ones, quiet)]
    with groupings(()):
        heads = shared_slots(layers, SLOW, 2, CONTEXT, metric)
    assert [[head.frequency.tolist() for head in layer] for layer in heads] == [[expected]] * 3


def test_a_vote_counts_squared_logits():
    """Pair 0 leads by the sum of weights, 4 + 4 to 7 + 0.3; by energy pair 1 does."""
    ones = energies(1, 1, 1)
    layers = [(energies(16, 49, 0.1), ones), (energies(16, 0.09, 48.91), ones)]
    with groupings(()):
        heads = shared_slots(layers, SLOW[:3], 1, CONTEXT, "output")
    assert [head.frequency.tolist() for [head] in heads] == [[1], [1]]


def test_a_slot_takes_the_pair_that_weighs_most_in_it():
    """One group and one slot: the frequency of what leads in two heads, each with its own mix."""
    ones = energies(1, 1, 1, 1)
    layers = [(energies(*row), ones) for row in ((1, 9, 2, 1), (1, 2, 1, 9), (2, 1, 1, 9))]
    with groupings((1.0,)):
        heads = shared_slots(layers, SLOW, 1, CONTEXT, "output")
    assert [head.frequency.tolist() for [head] in heads] == [[3]] * 3
    assert [int(head.key_mix.abs().argmax()) for [head] in heads] == [1, 3, 3]


@pytest.mark.parametrize("seed", [70, 100])
def test_the_grouping_with_the_smallest_share_of_errors_wins(seed):
    """Of three heads one has keys a thousand times larger, which decides absolute errors alone."""
    candidates = [(), (10.0,), (30.0,)]
    layers = [(moment(seed + 2 * head + 1), moment(seed + 2 * head)) for head in range(3)]
    layers[2] = (1e3 * layers[2][0], layers[2][1])

    def folded(*edges):
        with groupings(*edges):
            found = shared_slots(layers, MIXED, 3, CONTEXT, "output")
        return [head.error for [head] in found]

    shares, sums = [], []
    for edges in candidates:
        errors = folded(edges)
        totals = [spectrum(q[0], k[0], MIXED, CONTEXT, edges).sum() for k, q in layers]
        shares.append(sum(error / float(t) for error, t in zip(errors, totals, strict=True)))
        sums.append(sum(errors))
    best = shares.index(min(shares))
    assert best != sums.index(min(sums))
    assert folded(*candidates) == folded(candidates[best])


def test_a_head_that_is_all_zero_has_no_vote():
    ones, none = energies(1, 2, 3, 4), energies(0, 0, 0, 0)
    with groupings(()):
        alone, beside = (
            shared_slots(layers, SLOW, 2, CONTEXT, "output")
            for layers in ([(ones, ones)], [(ones, ones), (none, none)])
        )
    assert torch.equal(beside[0][0].frequency, alone[0][0].frequency)
    assert float(beside[1][0].error) == 0
