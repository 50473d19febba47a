"""Refined slots and latents: never worse than what they begin with, and nothing left to gain."""

import pytest
import torch

from rap.planning import merging
from rap.planning.folding import fold_head, logit_error, spaced, usual_reach
from rap.planning.losses import value_subspace
from rap.planning.merging import lifted, refine_latent, refine_slots
from rap.planning.subspace import hermitian_root

HEADS, PAIRS, CONTEXT = 2, 6, 400
SIZE = HEADS * PAIRS
FREQUENCIES = torch.tensor([0.9, 0.4, 0.05, 0.02, 0.01, 0.005], dtype=torch.float64)
REACH = usual_reach(CONTEXT)


def moment(seed, size=SIZE, dtype=torch.complex128, batch=()):
    """A second moment [..., n, n] whose parts have something in common."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*batch, 2 * size, size, dtype=dtype, generator=generator)
    rows = rows @ torch.randn(size, size, dtype=dtype, generator=generator)
    return rows.mH @ rows / rows.shape[-2]


def lost(read, key, frequency, key_mix, query_mix, turned):
    """Twice the squared logit error, distance by distance, which autograd can read."""
    total = torch.zeros((), dtype=torch.float64)
    for distance in spaced(REACH):
        dense = torch.polar(torch.ones(()).double(), -distance * FREQUENCIES.repeat(HEADS)).diag()
        slots = torch.polar(torch.ones(()).double(), -distance * FREQUENCIES[frequency])
        reader = dense @ read @ dense.mH if turned else read
        rest = dense - query_mix.mH @ slots.diag() @ key_mix
        total = total + (reader @ rest @ key @ rest.mH).diagonal().sum().real
    return total / len(spaced(REACH))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("width", [3, 8])
def test_slots_lose_less_at_the_same_frequencies(width, turned):
    read, key = moment(0), moment(1)
    head = fold_head(read, key, FREQUENCIES, width, CONTEXT, turned=turned)
    refined = refine_slots(head, read, key, FREQUENCIES, REACH, turned=turned)
    assert torch.equal(refined.frequency, head.frequency)
    assert refined.error < 0.9 * head.error
    mixes = (refined.key_mix, refined.query_mix)
    roots = hermitian_root(read), hermitian_root(key)
    assert refined.error == logit_error(
        *roots, FREQUENCIES, head.frequency, *mixes, REACH, turned=turned
    )
    explicit = lost(read, key, head.frequency, *mixes, turned)
    assert refined.error == pytest.approx(0.5 * float(explicit), rel=1e-6)
    # Weights and caches keep the range of the dense ones.
    torch.testing.assert_close(mixes[0].norm(dim=1), mixes[1].norm(dim=1))


@pytest.mark.parametrize("turned", [False, True])
def test_more_rounds_never_lose_more_and_end_where_nothing_is_left_to_gain(turned, monkeypatch):
    read, key = moment(2), moment(3)
    head = fold_head(read, key, FREQUENCIES, 5, CONTEXT, turned=turned)
    found = []
    for rounds in (1, 2, 5, 20, 120):
        monkeypatch.setattr(merging, "ROUNDS", rounds)
        found.append(refine_slots(head, read, key, FREQUENCIES, REACH, turned=turned))
    errors = [head.error, *(one.error for one in found)]
    assert errors == sorted(errors, reverse=True)
    slopes = []
    for one in (head, found[-1]):
        mixes = [x.clone().requires_grad_() for x in (one.key_mix, one.query_mix)]
        lost(read, key, one.frequency, *mixes, turned).backward()
        slopes.append(sum(float(x.grad.abs().square().sum()) for x in mixes))
    assert slopes[1] < 1e-3 * slopes[0]


def test_slots_of_all_pairs_stay_as_they_are():
    read, key = moment(4), moment(5)
    head = fold_head(read, key, FREQUENCIES, SIZE, CONTEXT)
    assert refine_slots(head, read, key, FREQUENCIES, REACH) is head


def test_pairs_that_say_nothing_leave_slots_finite():
    """A moment without full rank: what is never seen asks for nothing."""
    idle = torch.ones(SIZE, dtype=torch.complex128)
    idle[[2, 7]] = 0
    read, key = moment(6), moment(7) * idle[:, None] * idle
    head = fold_head(read, key, FREQUENCIES, 4, CONTEXT, turned=True)
    refined = refine_slots(head, read, key, FREQUENCIES, REACH, turned=True)
    assert refined.error < head.error
    assert float(refined.key_mix.abs().max()) < 1e3 * float(head.key_mix.abs().max())


MERGE, QUERIES, DIM = 2, 3, 6


def value_moments(seed, groups=2):
    """Moments [N, g R, V, V] of every query head's own, read by its KV head's channels alone."""
    size, heads = MERGE * DIM, MERGE * QUERIES
    values = moment(seed, size, torch.float64, (groups, heads))
    readers = torch.zeros(groups, heads, size, size, dtype=torch.float64)
    own = moment(seed + 1, DIM, torch.float64, (groups, heads))
    for head in range(heads):
        block = slice(head // QUERIES * DIM, (head // QUERIES + 1) * DIM)
        readers[:, head, block, block] = own[:, head]
    return values, readers


def value_loss(values, factors):
    rest = torch.eye(values[0].shape[-1]).double() - factors.up @ factors.down
    return torch.einsum("nhij,njk,nhkl,nil->n", values[1], rest, values[0], rest)


def test_a_latent_loses_less_for_its_query_heads_together(monkeypatch):
    values = value_moments(10)
    factors = value_subspace(values, 5)
    losses = [value_loss(values, factors)]
    for rounds in (1, 2, 5, 50):
        monkeypatch.setattr(merging, "ROUNDS", rounds)
        refined = refine_latent(values, factors, MERGE)
        losses.append(value_loss(values, refined))
        torch.testing.assert_close(refined.down.norm(dim=2), refined.up.norm(dim=1))
    losses = torch.stack(losses)
    assert (losses.diff(dim=0) <= 1e-9 * losses[0]).all()
    assert (losses[3] < 0.97 * losses[0]).all()
    sides = [x.clone().requires_grad_() for x in (refined.down, refined.up)]
    rest = torch.eye(MERGE * DIM).double() - sides[1] @ sides[0]
    torch.einsum("nhij,njk,nhkl,nil->", values[1], rest, values[0], rest).backward()
    assert all(float(x.grad.abs().max()) < 1e-2 * float(losses[0].min()) for x in sides)


def test_a_latent_of_one_reader_is_the_best_there_is():
    """Where the closed form is exact nothing is refined, and all channels stay as they are."""
    values = moment(20, DIM, torch.float64, (2, 1)), moment(21, DIM, torch.float64, (2, 1))
    factors = value_subspace(values, 4)
    refined = refine_latent(values, factors, 1)
    torch.testing.assert_close(refined.up @ refined.down, factors.up @ factors.down)
    whole = value_subspace(values, DIM)
    assert refine_latent(values, whole, 1) is whole


def of_few(seed, size=SIZE, dtype=torch.complex64, batch=()):
    """A moment of fewer tokens than directions, summed in single precision as calibration does."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*batch, size // 3, size, dtype=dtype, generator=generator)
    return (rows.mH @ rows / rows.shape[-2]).to(torch.promote_types(dtype, torch.float64))


def test_moments_of_full_rank_stay_as_they_are():
    assert torch.equal(lifted(moment(0)), moment(0))
    few = of_few(0)
    least = torch.linalg.eigvalsh(lifted(few))[0] / few.diagonal().real.mean()
    assert float(least) == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_slots_of_few_tokens_stay_of_one_size(seed, turned, monkeypatch):
    monkeypatch.setattr(merging, "ROUNDS", 20)
    read, key = of_few(seed), of_few(seed + 10)
    head = fold_head(read, key, FREQUENCIES, 8, CONTEXT, turned=turned)
    refined = refine_slots(head, read, key, FREQUENCIES, REACH, turned=turned)
    assert float(refined.key_mix.abs().max()) < 2 * float(head.key_mix.abs().max())
