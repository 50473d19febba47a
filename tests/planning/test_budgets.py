"""Budgets: exact totals, caps, floors, monotone in the retain ratio, and the paper's figures."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rap.model.errors import RapError
from rap.planning.budgets import (
    LayerBudget,
    allocate,
    kv_budgets,
    layer_score,
    select,
    split_steps,
    uniform,
)
from rap.planning.plan import PairPlan
from rap.planning.scores import LayerScores

scores = st.floats(0, 1e6, allow_subnormal=False)
retains = st.floats(0.01, 1, exclude_min=True)


@st.composite
def problems(draw):
    """Scores, sizes and unit of a few layers; some sizes are no multiple of the unit."""
    num_layers = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(4, 70), min_size=num_layers, max_size=num_layers))
    ranks = draw(st.lists(scores, min_size=num_layers, max_size=num_layers))
    return ranks, sizes, draw(st.sampled_from([1, 2, 4]))


def lowest_retain(sizes, unit):
    return min(1.0, len(sizes) * unit / sum(sizes))


def make_scores(heads=2, pairs=16, free=0, seed=0, key_scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return LayerScores(
        pairs_GP=key_scale * torch.rand(heads, pairs, generator=generator),
        free_GF=key_scale * torch.rand(heads, free, generator=generator) / 2,
        channels_GD=torch.rand(heads, 2 * pairs + free, generator=generator) / 2,
    )


@given(problems(), retains)
def test_the_total_is_the_nearest_possible_and_every_layer_within_floor_and_size(problem, retain):
    ranks, sizes, unit = problem
    retain = max(retain, lowest_retain(sizes, unit))
    kept = allocate(ranks, retain, sizes, unit=unit)
    assert abs(sum(kept) - retain * sum(sizes)) <= unit / 2 + 1e-9
    for amount, size in zip(kept, sizes, strict=True):
        assert min(unit, size) <= amount <= size
        assert amount % unit == 0 or amount == size


@given(problems(), retains, retains)
def test_no_layer_keeps_less_at_a_larger_retain(problem, first, second):
    ranks, sizes, unit = problem
    low, high = sorted(max(r, lowest_retain(sizes, unit)) for r in (first, second))
    small = allocate(ranks, low, sizes, unit=unit)
    large = allocate(ranks, high, sizes, unit=unit)
    assert all(a <= b for a, b in zip(small, large, strict=True))


@given(problems())
def test_retain_one_keeps_everything(problem):
    ranks, sizes, unit = problem
    assert allocate(ranks, 1.0, sizes, unit=unit) == sizes
    assert uniform(1.0, sizes, unit) == sizes


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6), st.integers(1, 12))
def test_budgets_are_proportional_where_the_proportions_are_whole(shares, repeats):
    # Webster gives exact quotas when all are whole numbers of units and no cap binds.
    size = max(shares) * repeats
    retain = sum(shares) * repeats / (size * len(shares))
    kept = allocate([float(s) for s in shares], retain, [size] * len(shares), floor=0)
    assert kept == [share * repeats for share in shares]


def test_a_full_layer_hands_its_share_on_in_proportion():
    # Quotas 24 : 4 : 2 of 30; the first is capped at 16, the others share 14 as 2 : 1.
    kept = allocate([12.0, 2.0, 1.0], 30 / 48, [16, 16, 16])
    assert kept == [16, 9, 5]


def test_ties_go_to_the_lower_layer_every_time():
    for _ in range(3):
        assert allocate([1.0, 1.0, 1.0], 0.5, [5, 5, 5]) == [3, 3, 2]


def test_a_layer_without_score_keeps_only_its_floor():
    assert allocate([0.0, 1.0], 0.5, [10, 10], floor=2) == [2, 8]


def test_layers_of_other_sizes_keep_the_same_fraction_at_the_same_score():
    assert allocate([3.0, 3.0], 0.5, [64, 32]) == [32, 16]


def test_a_layer_of_more_heads_costs_more():
    """Half of 32 is 16, in steps of one and three: 8 + 3 * 3 is nearer to it than 8 + 3 * 2."""
    assert allocate([3.0, 1.0], 0.5, [8, 8], heads=[2, 6]) == [8, 3]
    assert allocate([3.0, 1.0], 0.5, [8, 8], heads=[6, 2]) == [5, 1]
    assert allocate([3.0, 1.0], 0.5, [8, 8], heads=[2, 2]) == [6, 2]


@pytest.mark.parametrize("budget", ["adaptive", "uniform"])
@pytest.mark.parametrize("share", [0.5, 0.6, "pooled"])
@pytest.mark.parametrize("seed", range(4))
def test_layers_with_other_numbers_of_heads_keep_the_ratio_of_all(budget, share, seed):
    """Four local layers of 16 heads and one global one of 4 wide heads, as Gemma 4 has them."""
    generator = torch.Generator().manual_seed(seed)

    def scores(heads, width):
        pairs = torch.rand(heads, width // 2, generator=generator) + 0.01
        channels = torch.rand(heads, width, generator=generator) + 0.01
        return LayerScores(pairs_GP=pairs, free_GF=torch.zeros(heads, 0), channels_GD=channels)

    layers = [*(scores(16, 64) for _ in range(4)), scores(4, 128)]
    kept = kv_budgets(layers, 0.5, budget=budget, key_share=share, align=2)
    cached = [
        (2 * one.pairs + one.values) * layer.pairs_GP.shape[0]
        for one, layer in zip(kept, layers, strict=True)
    ]
    whole = sum(2 * layer.channels_GD.numel() for layer in layers)
    assert sum(cached) / whole == pytest.approx(0.5, abs=0.01)


def test_a_share_that_leaves_too_little_is_named_with_the_ratio_asked_for():
    for budget in ("adaptive", "uniform"):
        with pytest.raises(RapError, match=r"key_share 0.95 of retain 0.3 leaves keys or values"):
            kv_budgets([make_scores()], 0.3, budget=budget, key_share=0.95, align=8)


@pytest.mark.parametrize("retain", [0.0, -0.5, 1.01, float("nan")])
def test_a_retain_outside_its_range_is_refused(retain):
    for call in (
        lambda: allocate([1.0], retain, [8]),
        lambda: uniform(retain, [8]),
        lambda: kv_budgets([make_scores()], retain),
    ):
        with pytest.raises(RapError, match=r"outside \(0, 1\]"):
            call()


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -1.0])
def test_a_score_that_cannot_rank_is_refused(score):
    with pytest.raises(RapError, match="score 2 is"):
        allocate([1.0, score], 0.5, [8, 8])


def test_a_retain_below_the_floors_is_refused_with_the_least_possible():
    with pytest.raises(RapError, match=r"below the floor of 4 .* at least 0\.25"):
        allocate([1.0, 2.0, 3.0, 4.0], 0.1, [16] * 4, unit=4)
    assert allocate([1.0, 2.0, 3.0, 4.0], 0.25, [16] * 4, unit=4) == [4] * 4
    with pytest.raises(RapError, match="rounds to nothing"):
        uniform(0.1, [16], unit=4)


def test_uniform_budgets_are_the_papers():
    kept = [uniform(retain, [64])[0] for retain in (0.9, 0.8, 0.7, 0.6, 0.5)]
    assert [round(pairs / 64, 3) for pairs in kept] == [0.906, 0.797, 0.703, 0.594, 0.5]


@given(st.integers(4, 70), retains, st.sampled_from([1, 2, 4]))
def test_uniform_is_the_nearest_step(size, retain, unit):
    steps = [*range(unit, size, unit), size]
    target = max(retain * size, unit)
    [kept] = uniform(target / size, [size], unit) if target <= size else [size]
    assert kept in steps
    assert abs(kept - target) <= min(abs(step - target) for step in steps) + 1e-9


@given(
    st.integers(1, 5),
    st.floats(0.25, 1),
    st.sampled_from(["adaptive", "uniform"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(16, 0), (15, 2), (8, 16), (4, 24), (0, 32)]),
)
def test_balanced_budgets_are_as_wide_for_values_as_for_keys(layers, retain, budget, align, rope):
    pairs, free = rope
    found = [make_scores(pairs=pairs, free=free, seed=seed) for seed in range(layers)]
    budgets = kv_budgets(found, retain, budget=budget, align=align)
    for kept in budgets:
        assert kept.values == 2 * kept.pairs + kept.free
        assert kept.values % align == 0
        assert min(pairs, 1) <= kept.pairs <= pairs
        assert 0 <= kept.free <= free
        # Pairs and free channels keep the same fraction, to the nearest pair.
        assert abs(kept.pairs - pairs * kept.values / 32) <= 1
    width = sum(kept.values for kept in budgets) / (32 * layers)
    assert abs(width - retain) <= max(align, 2) / 32


@pytest.mark.parametrize("budget", ["adaptive", "uniform"])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.65, 0.9])
def test_a_key_share_divides_the_same_total(share, budget):
    found = [make_scores(pairs=64, seed=seed) for seed in range(4)]
    for retain in (0.3, 0.5, 0.7, 1.0):
        budgets = kv_budgets(found, retain, budget=budget, key_share=share)
        keys = sum(kept.pairs for kept in budgets) / 256
        values = sum(kept.values for kept in budgets) / 512
        # What a share asks beyond all of one side goes to the other.
        wanted = min(1, max(2 * share * retain, 2 * retain - 1))
        assert keys == pytest.approx(wanted, abs=0.5 / 64 + 1e-9)
        assert keys + values == pytest.approx(2 * retain, abs=1 / 64 + 1e-9)


def test_a_layer_that_rotates_a_little_keeps_a_pair():
    [kept] = kv_budgets([make_scores(pairs=4, free=24)], 1 / 16)
    assert kept == LayerBudget(pairs=1, free=0, values=2)


def test_pooling_starves_the_side_with_less_mass():
    found = [make_scores(pairs=64, seed=seed, key_scale=0.25) for seed in range(4)]
    for budget in ("adaptive", "uniform"):
        budgets = kv_budgets(found, 0.5, budget=budget, key_share="pooled")
        keys = sum(kept.pairs for kept in budgets) / 256
        values = sum(kept.values for kept in budgets) / 512
        assert keys == pytest.approx(0.2, abs=0.02)
        assert keys + values == pytest.approx(1.0, abs=4 / 64)


def test_two_free_channels_count_as_a_pair_in_the_layer_score():
    pairs, free = torch.tensor([[3.0, 5.0]]), torch.tensor([[1.0, 2.0, 4.0, 6.0]])
    score = layer_score(LayerScores(pairs, free, torch.zeros(1, 8)))
    assert score == (3 + 5 + 1 + 2 + 4 + 6) / 4


def test_an_adaptive_budget_follows_the_layer_score():
    weak, strong = make_scores(pairs=64), make_scores(pairs=64, key_scale=3)
    assert layer_score(strong) == pytest.approx(3 * layer_score(weak))
    low, high = kv_budgets([weak, strong], 0.4)
    assert (low.pairs, high.pairs) == (13, 38)


def test_the_layer_score_is_the_mean_over_heads_and_pairs():
    found = make_scores(heads=3, pairs=5)
    assert layer_score(found) == pytest.approx(float(found.pairs_GP.mean()))


def test_layers_without_scores_are_passed_over():
    found = [None, make_scores(), None]
    budgets = kv_budgets(found, 0.5)
    assert budgets == [None, LayerBudget(pairs=8, free=0, values=16), None]
    chosen = select(found, budgets)
    assert [kept is None for kept in chosen] == [True, False, True]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"budget": "even"}, "unknown budget"),
        ({"align": 3}, "align cannot be 3"),
        ({"align": 0}, "align cannot be 0"),
        ({"key_share": 1.0}, "key_share"),
        ({"key_share": "values"}, "key_share"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(RapError, match=message):
        kv_budgets([make_scores()], 0.5, **setting)


@given(st.integers(0, 9), st.integers(0, 100))
def test_selection_keeps_the_best_and_breaks_ties_by_the_lower_index(count, seed):
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values, so that ties are the rule.
    values = torch.randint(3, (2, 9), generator=generator).float()
    layer = LayerScores(pairs_GP=values, free_GF=values, channels_GD=values)
    [kept] = select([layer], [LayerBudget(count, count, count)])
    for row, indices in zip(values.tolist(), kept.pairs, strict=True):
        best = sorted(range(9), key=lambda index: (-row[index], index))[:count]
        assert indices == sorted(best)
    assert kept.pairs == kept.free == kept.channels


def test_selections_of_a_larger_retain_contain_those_of_a_smaller_one():
    found = [make_scores(pairs=8, free=16, seed=seed) for seed in range(3)]
    chosen = [select(found, kv_budgets(found, retain)) for retain in (0.3, 0.5, 0.7, 0.9)]
    for small, large in itertools.pairwise(chosen):
        for layer_small, layer_large in zip(small, large, strict=True):
            for few, many in zip(layer_small.pairs, layer_large.pairs, strict=True):
                assert set(few) <= set(many)


def test_a_selection_is_what_a_layer_plan_takes():
    found = [make_scores(pairs=12, free=8)]
    [kept] = kv_budgets(found, 0.5)
    plan = PairPlan.of_indices(*select(found, [kept])[0])
    assert (plan.num_pairs, plan.num_free, plan.value_width) == (kept.pairs, kept.free, kept.values)


@pytest.mark.parametrize(("steps", "kept"), [(0, (0, 0)), (8, (4, 8)), (16, (8, 16)), (5, (3, 4))])
def test_steps_divide_between_pairs_and_free_channels(steps, kept):
    """Heads of 32 channels, 16 of which rotate: half of every step to each."""
    assert split_steps(8, 16, steps) == kept
