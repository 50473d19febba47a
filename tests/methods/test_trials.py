"""Cuts tried on calibration windows, and the methods that divide their budget by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor

import rap
from cases.models import random_tokens, tiny_model
from rap.calibration.run import KEPT_WINDOWS
from rap.calibration.statistics import FILE, Statistics
from rap.methods import METHODS, parse_method
from rap.methods.kvpruner import sensitivities
from rap.methods.matryoshka import searched_widths
from rap.methods.trials import Trials
from rap.model.errors import CalibrationError
from rap.planning.budgets import allocate

LAYERS, GROUPS, DIM = 4, 2, 16
NEEDS = {"windows", "fisher", "rotated", "logits", "inputs"}


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, Statistics]:
    """A tiny float64 model whose attention matters, all but that of layer 1, and its statistics."""
    model = tiny_model(
        "qwen2",
        dtype=torch.float64,
        heads=4,
        kv_heads=GROUPS,
        head_dim=DIM,
        hidden=48,
        layers=LAYERS,
    )
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data *= 0 if index == 1 else 3.0
    return model, rap.calibrate(model, random_tokens(12, 32), NEEDS)


def cuts(calibrated: tuple, name: str, **settings: Any) -> tuple[Any, dict]:
    """A method's plan, and its layers by index."""
    model, statistics = calibrated
    plan = METHODS[name](**settings).plan(model, statistics)
    return plan, dict(enumerate(plan.layers))


def perplexity(model: Any, windows: Tensor) -> float:
    """By the package's own measure."""
    return rap.perplexity(model, windows.flatten(), window=windows.shape[1], dtype=None).value


def test_windows_are_kept_when_asked_for(calibrated: tuple, tmp_path: Path) -> None:
    model, statistics = calibrated
    assert torch.equal(statistics.windows, random_tokens(12, 32)[:KEPT_WINDOWS])
    assert rap.calibrate(model, random_tokens(2, 16), {"inputs"}).windows is None
    statistics.save(tmp_path / "statistics")
    loaded = Statistics.load(tmp_path / "statistics")
    assert torch.equal(loaded.windows, statistics.windows)
    assert loaded.windows.dtype == torch.long
    older = {"layers": [None], "num_windows": 1, "window": 2, "needs": [], "fingerprint": ""}
    FILE.save(tmp_path / "older", [None], older)
    assert Statistics.load(tmp_path / "older").windows is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kvpruner", {}),
        ("kvpruner", {"rotation": "first"}),
        ("kvpruner-indexed", {}),
        ("elitekv", {"pairs": 3}),
        ("matryoshka", {}),
        ("svdllm", {}),
        ("palu", {}),
    ],
)
def test_a_trial_is_what_the_plan_would_give(calibrated: tuple, name: str, settings: dict) -> None:
    """Perplexity and last hidden states as of the model that is built and evaluated apart."""
    model, statistics = calibrated
    plan, all_cuts = cuts(calibrated, name, retain=0.5, **settings)
    trials, windows = Trials(model, statistics), statistics.windows
    before = (rap.fingerprint_model(model), [*model.modules()], torch.get_rng_state())
    model.train()
    assert trials.perplexity({}) == pytest.approx(perplexity(model, windows), rel=1e-6)
    for chosen in (all_cuts, {2: all_cuts[2]}):
        layers = tuple(chosen.get(index) for index in range(LAYERS))
        small = METHODS[name](retain=0.5, **settings).apply(model, replace(plan, layers=layers))
        assert trials.perplexity(chosen) == pytest.approx(perplexity(small, windows), rel=1e-6)
        with torch.no_grad():
            dense, found = (m.eval().model(windows).last_hidden_state for m in (model, small))
        moved = float((found - dense).norm() / dense.norm())
        assert moved > 0.01
        # Of a batch of windows norms round to float32 as of single ones, matrix products differ.
        assert trials.change(chosen) == pytest.approx(moved, rel=1e-4)
        model.train()
    assert all(module.training for module in model.modules())
    assert rap.fingerprint_model(model) == before[0]
    assert [*model.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_trial_that_fails_leaves_the_model_whole(calibrated: tuple) -> None:
    model, statistics = calibrated
    modules = [*model.modules()]
    _, found = cuts(calibrated, "matryoshka", retain=0.5)
    trials = Trials(model, statistics)
    broken = found[0].tensors()
    broken["q_proj.weight"] = broken["q_proj.weight"] * torch.nan
    for measure in (trials.perplexity, trials.change):
        with pytest.raises(CalibrationError, match="trial pruning of layers 0, 2 gives nan"):
            measure({0: replace(found[0], weights=broken), 2: found[2]})
        assert [*model.modules()] == modules
    with pytest.raises(RuntimeError, match="size mismatch"):
        trials.change({0: replace(found[0], layer_entry=replace(found[0].entry(), keys=3))})
    assert [*model.modules()] == modules
    assert trials.change({}) == 0


def test_a_trial_reaches_a_model_that_is_spread_over_devices(calibrated: tuple) -> None:
    """There the dense module's own `forward` is that of a hook."""
    model, statistics = calibrated
    _, found = cuts(calibrated, "svdllm", retain=0.3)
    wanted = Trials(model, statistics).change(found)
    twin = tiny_model(
        "qwen2", dtype=torch.float64, heads=4, kv_heads=2, head_dim=DIM, hidden=48, layers=LAYERS
    )
    twin.load_state_dict(model.state_dict())
    dispatch_model(twin, {"": "cpu"}, force_hooks=True)
    assert "forward" in vars(twin.model.layers[0].self_attn)
    assert Trials(twin, statistics).change(found) == pytest.approx(wanted)
    assert wanted > 0.1


@pytest.mark.parametrize("name", ["kvpruner", "kvpruner-indexed"])
def test_sensitivity_shares_by_what_each_layer_alone_adds(calibrated: tuple, name: str) -> None:
    """Against models with a single layer cut, each built and evaluated apart."""
    model, statistics = calibrated
    method = METHODS[name](retain=0.5, budget="sensitivity")
    alike, _ = cuts(calibrated, name, retain=0.5)
    added = []
    dense = perplexity(model, statistics.windows)
    for index in range(LAYERS):
        alone = tuple(x if i == index else None for i, x in enumerate(alike.layers))
        small = method.apply(model, replace(alike, layers=alone))
        added.append(max(0.0, perplexity(small, statistics.windows) - dense))
    assert added[1] < 1e-6 < max(added)
    kept = allocate(added, 0.5, [DIM // 2] * LAYERS)
    plan = method.plan(model, statistics)
    assert [cache.elements for cache in plan.caches] == [2 * 2 * GROUPS * pairs for pairs in kept]
    assert plan.kept_fraction == 0.5
    assert plan.caches[1].elements == min(cache.elements for cache in plan.caches)


def test_layers_that_add_nothing_are_cut_alike(calibrated: tuple) -> None:
    model, statistics = calibrated
    _, found = cuts(calibrated, "kvpruner", retain=0.5)
    trials = Trials(model, statistics)
    assert sensitivities(trials, [(1, found[1])] * 3) == [1.0] * 3
    assert sensitivities(trials, [(1, found[1]), (0, found[0])])[0] == 0.0


def test_windows_are_asked_for_and_missed(calibrated: tuple) -> None:
    model, _ = calibrated
    method = METHODS["kvpruner"](retain=0.5, budget="sensitivity")
    assert method.needs == {"fisher", "windows"}
    assert METHODS["kvpruner"](retain=0.5).needs == {"fisher"}
    without = rap.calibrate(model, random_tokens(2, 16), {"fisher"})
    with pytest.raises(CalibrationError, match="kvpruner needs the statistics windows"):
        method.plan(model, without)


def test_the_search_of_widths_by_hand() -> None:
    """Four widths of 16, so steps of 2; a width's error is its weight times what it has lost."""
    weight = (1.0, 2.0, 4.0, 100.0)
    asked = []

    def change(widths: Any) -> float:
        asked.append(list(widths))
        return sum(w * (16 - width) ** 2 for w, width in zip(weight, widths, strict=True))

    assert searched_widths([1] * 4, [16] * 4, 1.0, change) == [16] * 4
    assert not asked
    # 13 of 64 channels go: three widths lose two in each round, the last one loses one.
    assert searched_widths([1] * 4, [16] * 4, 51 / 64, change) == [11, 12, 12, 16]
    assert len(asked) == 12
    assert asked[:4] == [[14, 16, 16, 16], [16, 14, 16, 16], [16, 16, 14, 16], [16, 16, 16, 14]]
    assert asked[4] == [12, 14, 14, 16]


@pytest.mark.parametrize("retain", [0.9, 0.61, 0.5, 0.25, 0.1])
def test_the_search_of_widths_spends_the_budget(retain: float) -> None:
    heads, dims = [1, 2, 2, 4], [16, 16, 24, 7]
    whole = sum(n * dim for n, dim in zip(heads, dims, strict=True))

    def change(widths: Any) -> float:
        return sum((dim / width) ** 2 for dim, width in zip(dims, widths, strict=True))

    found = searched_widths(heads, dims, retain, change)
    kept = sum(n * width for n, width in zip(heads, found, strict=True))
    # To the nearest channel of the narrowest tensor that was lowered last.
    assert abs(kept - retain * whole) <= 2
    assert all(1 <= width <= dim for width, dim in zip(found, dims, strict=True))


@pytest.mark.parametrize("retain", [0.75, 0.5])
def test_adaptive_widths_move_the_output_less(calibrated: tuple, retain: float) -> None:
    model, statistics = calibrated
    trials = Trials(model, statistics)
    plan, found = cuts(calibrated, "matryoshka", retain=retain, widths="adaptive")
    assert plan.kept_fraction == retain
    _, alike = cuts(calibrated, "matryoshka", retain=retain)
    assert trials.change(found) < 0.95 * trials.change(alike)
    # What nothing reads goes first.
    assert found[1].entry().keys == min(layer.entry().keys for layer in found.values())
    assert found[1].entry().values == min(layer.entry().values for layer in found.values())
    full, _ = cuts(calibrated, "matryoshka", retain=1.0, widths="adaptive")
    assert full.kept_fraction == 1


@pytest.mark.parametrize("retain", [0.7, 0.5])
def test_the_sweep_takes_the_best_number_of_pairs(calibrated: tuple, retain: float) -> None:
    """Each number planned, built and evaluated apart."""
    model, statistics = calibrated
    best = parse_method("elitekv:plus", retain)
    assert (best.pairs, best.whiten) == ("sweep", True)
    figures = {}
    for pairs in range(1, DIM // 2 + 1):
        method = METHODS["elitekv"](retain=retain, pairs=pairs, whiten=True)
        if 2 * retain * GROUPS * DIM - 2 * pairs * GROUPS >= 1:
            small = method.apply(model, method.plan(model, statistics))
            figures[pairs] = perplexity(small, statistics.windows)
    plan = best.plan(model, statistics)
    assert len(figures) == {0.7: 8, 0.5: 7}[retain]
    assert {layer.entry().elite for layer in plan.layers} == {min(figures, key=figures.get)}
    assert plan.kept_fraction == pytest.approx(retain, abs=1 / 64)


def test_a_sweep_with_no_room_says_so(calibrated: tuple) -> None:
    model, statistics = calibrated
    with pytest.raises(rap.RapError, match="1 elite pairs leave nothing of retain"):
        METHODS["elitekv"].plus(retain=0.05).plan(model, statistics)
