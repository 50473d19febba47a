"""The paper's claims about quality on the bundled model, cut without training.

Every figure is the float32 perplexity of the same eight windows of 512 tokens of the test novels.
"""

from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

import rap
from cases.plans import plan_of
from cases.scripts import load_script
from rap import PairPlan, Rap
from rap.data.text import load_windows

CHANNELS = load_script("experiments/quality/channels.py")
LayerChannels, best_channels, index_aware, reindexed = (
    CHANNELS.LayerChannels,
    CHANNELS.best_channels,
    CHANNELS.index_aware,
    CHANNELS.reindexed,
)

WINDOW, NUM_WINDOWS = 512, 8
RETAINS = (0.9, 0.8, 0.7, 0.6, 0.5)


@pytest.fixture(scope="module")
def statistics(reference_model, tokenizer):
    """Fisher statistics of eight calibration windows."""
    windows = load_windows("bundled", tokenizer, num_windows=NUM_WINDOWS, window=WINDOW)
    return rap.calibrate(reference_model, windows, {"fisher"})


@pytest.fixture(scope="module")
def measured(test_tokens):
    """Perplexity of a model on the windows, printed with its name."""

    def measure(name: str, model) -> float:
        value = rap.perplexity(model, test_tokens, window=WINDOW, max_windows=NUM_WINDOWS).value
        print(f"{name}: {value:.2f}")
        return value

    return measure


@pytest.fixture(scope="module")
def pairs(reference_model, statistics, measured) -> dict[float, float]:
    """Perplexity at every retain ratio by the paper's recipe, dense at 1."""
    found = {1.0: measured("dense", reference_model)}
    for retain in RETAINS:
        plan = Rap.paper(retain=retain, align=1).plan(reference_model, statistics)
        assert plan.kept_fraction == pytest.approx(retain, abs=0.01)
        found[retain] = measured(f"pairs at {retain}", rap.apply(reference_model, plan))
    return found


def test_perplexity_rises_smoothly_as_the_cache_shrinks(pairs):
    values = [pairs[retain] for retain in (1.0, *RETAINS)]
    # Two neighbours may swap by the noise of 4,088 scored tokens; 0.2 % is far below any step.
    assert all(larger > 0.998 * smaller for smaller, larger in pairwise(values))
    assert min(values[1:]) > 0.998 * values[0]
    # No cliff: a step multiplies perplexity by at most 1.25, and half the cache by 1.7. The first
    # bundled model, which used no context, stayed below 1.15 and 1.3; to this one the paper's cut
    # costs more (1.22 and 1.59), because it takes away the recall that the model has learned.
    assert all(b < 1.25 * a for a, b in pairwise(values))
    assert 1.05 < values[-1] / values[0] < 1.7


@pytest.mark.parametrize("retain", [0.7, 0.5])
def test_pairs_beat_as_many_single_channels(reference_model, statistics, measured, pairs, retain):
    plan = Rap.paper(retain=retain, align=1).plan(reference_model, statistics)
    channels = best_channels(plan, statistics.layers)
    widths = [layer.keys_GW.shape[1] for layer in channels]
    assert widths == [layer.key_width for layer in plan.layers]
    aware = measured(f"channels at {retain}, index-aware", index_aware(reference_model, channels))
    assert aware > 1.01 * pairs[retain]


def test_pairs_beat_reindexed_channels(reference_model, statistics, measured, pairs):
    plan = Rap.paper(retain=0.7, align=1, budget="uniform").plan(reference_model, statistics)
    stock = reindexed(reference_model, best_channels(plan, statistics.layers))
    value = measured("channels at 0.7, re-indexed, uniform budget", stock)
    same = measured("pairs at 0.7, uniform budget", rap.apply(reference_model, plan))
    assert value > 1.1 * max(pairs[0.7], same)


def test_fisher_beats_random(reference_model, statistics, measured, pairs):
    for seed in range(3):
        chance = Rap.paper(retain=0.7, align=1, score="random", seed=seed)
        small = rap.apply(reference_model, chance.plan(reference_model, statistics))
        assert measured(f"random pairs at 0.7, seed {seed}", small) > 1.1 * pairs[0.7]


def _all_channels(model, keys=None) -> list[LayerChannels]:
    every = torch.arange(64).expand(2, -1)
    return [LayerChannels(every if keys is None else keys, every) for _ in model.model.layers]


def test_simulations_that_drop_nothing_are_the_dense_model(reference_model, test_tokens):
    ids = test_tokens[:64].view(1, -1)
    dense = reference_model(ids).logits
    for simulate in (index_aware, reindexed):
        found = simulate(reference_model, _all_channels(reference_model))(ids).logits
        # A float32 forward in another order of operations.
        torch.testing.assert_close(found, dense, atol=1e-4, rtol=1e-4)


def test_index_aware_channels_equal_pairs_when_pairs_are_kept(reference_model, test_tokens):
    """The steelman differs from whole pairs in the choice of channels alone."""
    whole = torch.stack([torch.tensor([*range(3, 20), *range(35, 52)])] * 2)
    channels = _all_channels(reference_model, whole)
    aware = index_aware(reference_model, channels)
    layer = PairPlan.of_indices([range(3, 20)] * 2, [range(64)] * 2)
    plan = plan_of(reference_model, [layer] * 6)
    ids = test_tokens[:64].view(1, -1)
    found = aware(ids).logits
    expected = rap.apply(reference_model, plan)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, reference_model(ids).logits, atol=0.1)


def test_index_aware_cache_holds_kept_channels_only(reference_model, test_tokens):
    lone = torch.stack([torch.arange(0, 32)] * 2)  # the first half of every pair
    aware = index_aware(reference_model, _all_channels(reference_model, lone))
    cache = aware(test_tokens[:8].view(1, -1), use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    for layer in cache.layers:
        assert (layer.keys[..., :32] != 0).any(dim=2).all()
        assert (layer.keys[..., 32:] == 0).all()
