"""What the settings of Rap decide: widths, profiles, budgets and what calibration must collect."""

import copy
from dataclasses import replace

import pytest
import torch

import rap
from cases.models import random_tokens, tiny_model
from rap.methods import Rap
from rap.methods.dense import dense_layers
from rap.methods.values import layer_losses
from rap.model.errors import RapError
from rap.model.layers import attention_layers

NEEDS = {"fisher", "energy", "pairs", "values", "gradients"}


@pytest.fixture(scope="module")
def calibrated() -> tuple:
    """A tiny Llama with eight pairs a head, and every statistic Rap can ask for."""
    model = tiny_model("llama", dtype=torch.float64, heads=4, kv_heads=2, head_dim=16, layers=3)
    return model, rap.calibrate(model, random_tokens(4, 48), NEEDS)


@pytest.mark.parametrize("keys", ["pairs", "fold"])
def test_stock_profile_shares_widths_and_frequencies(calibrated: tuple, keys: str) -> None:
    model, statistics = calibrated
    context = 400 if keys == "fold" else None
    method = rap.Rap(retain=0.5, keys=keys, budget="uniform", profile="stock", context=context)
    plan = method.plan(model, statistics)
    lists = {tuple(head) for layer in plan.layers for head in layer.frequency_GM.tolist()}
    assert len(lists) == 1
    assert {(layer.num_pairs, layer.value_width) for layer in plan.layers} == {(4, 8)}
    assert method.apply(model, plan)(random_tokens(1, 8)).logits.isfinite().all()


@pytest.mark.parametrize("profile", ["per-head", "stock"])
def test_reach_decides_how_keys_are_folded(calibrated: tuple, profile: str) -> None:
    model, statistics = calibrated
    asked = {"retain": 0.5, "budget": "uniform", "profile": profile, "context": 400, "merge": 1}
    usual, root, long = (
        rap.Rap(**asked, reach=reach).plan(model, statistics) for reach in (None, 20, 4000)
    )
    for plan, same in ((root, True), (long, False)):
        pairs = zip(plan.layers, usual.layers, strict=True)
        assert all(torch.equal(a.key_mix_GMP2, b.key_mix_GMP2) for a, b in pairs) is same
    assert "reach" not in usual.method
    assert long.method["reach"] == 4000


def test_shrinkage_turns_the_subspace_of_the_values_and_nothing_else(calibrated: tuple) -> None:
    model, statistics = calibrated
    usual, shrunk = (
        rap.Rap(retain=0.5, align=2, shrinkage=share, merge=1).plan(model, statistics)
        for share in (0, 1)
    )
    assert "shrinkage" not in usual.method
    assert shrunk.method["shrinkage"] == 1
    for before, after in zip(usual.layers, shrunk.layers, strict=True):
        assert before.num_pairs == after.num_pairs
        assert before.value_width == after.value_width
        assert not torch.allclose(before.value_down_GCD, after.value_down_GCD, rtol=1e-3)
    # Where every direction counts alike there is none to choose by the text.
    alone = rap.Rap(retain=0.5, align=2, shrinkage=1e9, merge=1).plan(model, statistics)
    for layer in alone.layers:
        projection = layer.value_up_GDC @ layer.value_down_GCD
        torch.testing.assert_close(projection, projection.mT, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("asked", [{"shrinkage": -1.0}, {"shrinkage": 1.0, "values": "channels"}])
def test_shrinkage_without_a_subspace_is_refused(asked: dict) -> None:
    with pytest.raises(rap.RapError, match=r"shrinkage (cannot be -1.0|is of a value subspace)"):
        rap.Rap(retain=0.5, **asked)


@pytest.mark.parametrize("asked", [{"reach": 0}, {"context": 0}, {"context": -5}])
def test_a_distance_of_no_token_is_refused(asked: dict) -> None:
    with pytest.raises(rap.RapError, match=f"{next(iter(asked))} cannot be"):
        rap.Rap(retain=0.5, **asked)


@pytest.mark.parametrize("asked", [{"reach": 20}, {"context": 400}])
def test_what_folding_is_told_is_refused_where_nothing_is_folded(asked: dict) -> None:
    with pytest.raises(rap.RapError, match="use keys 'fold', or remove both"):
        rap.Rap(retain=0.5, keys="pairs", **asked)
    method = rap.Rap(retain=0.5, merge=1, **asked)
    model = tiny_model("qwen3", dtype=torch.float64)
    statistics = rap.calibrate(model, random_tokens(2, 16), method.needs_for(model))
    with pytest.raises(rap.RapError, match="remove both"):
        method.plan(model, statistics)


def test_general_is_the_setting_that_it_names(calibrated: tuple) -> None:
    model, statistics = calibrated
    general, written = (
        rap.parse_method(text, 0.5, align=2).plan(model, statistics)
        for text in ("rap:general:merge=1", "rap:shrinkage=1:reach=1024:merge=1")
    )
    for one, other in zip(general.layers, written.layers, strict=True):
        assert one.tensors().keys() == other.tensors().keys()
        assert all(torch.equal(x, other.tensors()[name]) for name, x in one.tensors().items())
    assert {"shrinkage": 1, "reach": "far"}.items() <= general.method.items()


def test_general_is_for_models_whose_keys_cannot_be_folded_too() -> None:
    model = tiny_model("qwen3", dtype=torch.float64)
    method = rap.parse_method("rap:general", 0.5)
    statistics = rap.calibrate(model, random_tokens(2, 16), method.needs_for(model))
    assert method.plan(model, statistics).kept_fraction <= 0.5


@pytest.mark.parametrize(
    "text",
    ["rap:paper:metric=output", "rap:keys=pairs:values=channels:budget=uniform:metric=output"],
)
def test_a_metric_that_nothing_reads_is_refused(text: str) -> None:
    with pytest.raises(rap.RapError, match="nothing reads metric 'output' with these settings"):
        rap.parse_method(text, 0.5)


@pytest.mark.parametrize(
    "text", ["rap:paper:keys=fold", "rap:paper:values=subspace", "rap:paper:budget=error"]
)
def test_a_metric_of_folds_subspaces_or_errors_is_read(text: str) -> None:
    assert rap.parse_method(f"{text}:metric=output", 0.5).metric == "output"


def test_stock_profile_shares_frequencies_where_keys_are_normalised() -> None:
    method = rap.Rap(retain=0.5, profile="stock")
    model = tiny_model("qwen3", dtype=torch.float64)
    statistics = rap.calibrate(model, random_tokens(4, 64), method.needs_for(model))
    plan = method.plan(model, statistics)
    assert len({tuple(head) for one in plan.layers for head in one.frequency_GM.tolist()}) == 1


def test_per_head_profile_lets_heads_differ(calibrated: tuple) -> None:
    model, statistics = calibrated
    plan = rap.Rap(retain=0.5, keys="pairs", budget="uniform").plan(model, statistics)
    assert len({tuple(head) for layer in plan.layers for head in layer.frequency_GM.tolist()}) > 1


@pytest.mark.parametrize("keys", ["pairs", "fold"])
def test_stock_profile_at_full_width_is_dense(calibrated: tuple, keys: str) -> None:
    model, statistics = calibrated
    method = rap.Rap(retain=1.0, keys=keys, values="channels", budget="uniform", profile="stock")
    small = method.apply(model, method.plan(model, statistics))
    ids = random_tokens(1, 20, seed=5)
    assert torch.equal(small(ids).logits, model(ids).logits)


@pytest.mark.parametrize("budget", ["error", "tempered"])
@pytest.mark.parametrize("metric", ["loss", "output"])
def test_error_budget_meets_the_ratio(calibrated: tuple, metric: str, budget: str) -> None:
    model, statistics = calibrated
    for retain in (0.3, 0.5, 0.7, 0.9):
        method = rap.Rap(retain=retain, budget=budget, metric=metric, merge=1)
        plan = method.plan(model, statistics)
        # Half a step of one layer: 2 of 3 * 32 channels, up or down.
        assert plan.kept_fraction == pytest.approx(retain, abs=1 / 48)


def test_tempered_widths_are_nearer_to_equal_ones_than_those_of_errors() -> None:
    model = tiny_model("llama", dtype=torch.float64, heads=4, kv_heads=2, head_dim=16, layers=3)
    method = rap.Rap(retain=0.5, budget="uniform", align=2, merge=2)
    statistics = rap.calibrate(model, random_tokens(4, 48), replace(method, budget="error").needs)
    plans = [
        replace(method, budget=budget).plan(model, statistics)
        for budget in ("uniform", "tempered", "error")
    ]
    assert [plan.kept_fraction for plan in plans] == [0.5] * 3
    apart = [sum(abs(layer.value_width - 16) for layer in plan.layers) for plan in plans]
    assert 0 == apart[0] < apart[1] < apart[2]


def test_keys_and_values_compete_where_they_are_pooled(calibrated: tuple) -> None:
    """As much cache as with one width for both, at a smaller expected loss."""
    model, statistics = calibrated
    dense = dense_layers(model).with_statistics(statistics)
    for retain in (0.3, 0.5, 0.7):
        lost = {}
        for share in (0.5, "pooled"):
            method = rap.Rap(retain=retain, key_share=share, align=2, merge=1)
            plan = method.plan(model, statistics)
            assert plan.kept_fraction == pytest.approx(retain, abs=1 / 96)
            lost[share] = 0.0
            for index, layer in enumerate(plan.layers):
                keys, values = layer_losses(dense.layers[index], dense.context)
                lost[share] += keys[layer.key_width // 2] + values[layer.value_width // 2]
        assert lost["pooled"] < lost[0.5]
        assert any(layer.key_width != layer.value_width for layer in plan.layers)
        small = method.apply(model, plan)
        for layer, kept in zip(attention_layers(small), plan.layers, strict=True):
            assert layer.module.key_width == kept.key_width
            assert layer.module.value_width == kept.value_width


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"keys": "pairs", "values": "channels", "budget": "uniform"}, {"fisher"}),
        ({"budget": "uniform", "merge": 1}, {"energy", "pairs", "values", "gradients"}),
        ({"budget": "uniform", "metric": "output", "merge": 1}, {"energy", "pairs", "values"}),
        ({"budget": "adaptive", "metric": "output"}, {"fisher", "pairs", "values"}),
        ({"merge": 1}, {"energy", "pairs", "values", "gradients"}),
        ({"metric": "output", "merge": 1}, {"energy", "pairs", "values"}),
        ({}, {"energy", "pairs", "values", "gradients", "joint", "averages"}),
        ({"metric": "output"}, {"energy", "pairs", "values", "joint", "averages"}),
        ({"keys": "pairs", "metric": "output"}, {"fisher", "energy", "pairs", "values"}),
        (
            {"keys": "pairs", "score": "magnitude", "budget": "uniform"},
            {"values", "gradients"},
        ),
    ],
)
def test_only_what_is_used_is_collected(settings: dict, needs: set[str]) -> None:
    assert rap.Rap(**settings).needs == needs


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({}, "auto"),
        ({"merge": 1}, "error"),
        ({"merge": 2}, "uniform"),
        ({"merge": "auto", "profile": "stock"}, "uniform"),
        ({"key_share": "pooled"}, "error"),
        ({"key_share": "pooled", "metric": "output"}, "uniform"),
        ({"profile": "stock"}, "uniform"),
        ({"key_share": 0.3}, "uniform"),
    ],
)
def test_budget_follows_the_profile(settings: dict, budget: str) -> None:
    assert rap.Rap(**settings).budget == budget


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retain": 0.0}, "retain cannot be 0.0: it should be greater than 0"),
        ({"retain": 1.5}, "retain cannot be 1.5"),
        ({"score": "nonsense"}, "unknown score"),
        ({"keys": "nonsense"}, "keys cannot be"),
        ({"values": "nonsense"}, "values cannot be"),
        ({"budget": "nonsense"}, "budget cannot be"),
        ({"profile": "nonsense"}, "profile cannot be"),
        ({"metric": "nonsense"}, "metric cannot be"),
        ({"budget": "error", "key_share": 0.3}, "key_share cannot be 0.3"),
        ({"budget": "error", "key_share": "pooled", "metric": "output"}, "cannot be pooled"),
        ({"profile": "stock", "budget": "adaptive"}, "uniform"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(rap.RapError, match=message):
        rap.Rap(**settings)


@pytest.mark.parametrize("changed", ["other weights", "one weight", "no record"])
def test_statistics_of_other_weights_are_refused(calibrated: tuple, changed: str) -> None:
    model, _ = calibrated
    method = rap.Rap(keys="pairs", values="channels", budget="uniform")
    found = rap.calibrate(model, random_tokens(1, 16), method.needs)
    method.plan(model, found)
    if changed == "no record":
        found = replace(found, fingerprint="")
    elif changed == "one weight":
        model = copy.deepcopy(model)
        model.lm_head.weight.data[0, 0] += 1e-3
    else:
        model = tiny_model(seed=1)
    with pytest.raises(rap.RapError, match=r"other weights .*: calibrate this model"):
        method.plan(model, found)


@pytest.mark.parametrize("gone", [8, 32])
@pytest.mark.parametrize(
    "settings", [{}, {"metric": "output"}, {"merge": 1, "metric": "output"}, {"profile": "stock"}]
)
def test_heads_and_layers_whose_output_nothing_reads_are_pruned_like_others(
    settings: dict, gone: int
) -> None:
    """Pruned models mask a head by its columns of W_o, and layers that were added begin so."""
    model = tiny_model("llama", heads=4, kv_heads=2, head_dim=8, layers=2)
    model.model.layers[1].self_attn.o_proj.weight.data[:, :gone] = 0
    method = rap.Rap(retain=0.5, **settings)
    statistics = rap.calibrate(model, random_tokens(4, 48), method.needs_for(model))
    small = method.apply(model, method.plan(model, statistics))
    assert small(random_tokens(1, 8)).logits.isfinite().all()


def test_a_small_part_of_merged_heads_is_possible_where_none_of_separate_ones_is():
    """A fifth of three heads of 64 channels is a head of 32, and of each head too little for 32."""
    model = tiny_model(heads=3, kv_heads=3, head_dim=64, hidden=96, dtype=torch.float32)
    asked = {"retain": 0.2, "align": 32, "profile": "stock"}
    with pytest.raises(RapError, match="rounds to nothing in steps of 16"):
        Rap(**asked, merge=1).check_model(model)
    method = Rap(**asked, merge="auto")
    method.check_model(model)
    plan = method.plan(model, rap.calibrate(model, random_tokens(2, 64), method.needs_for(model)))
    assert {(layer.merge, layer.key_width, layer.value_width) for layer in plan.layers} == {
        (3, 32, 32)
    }
    with pytest.raises(RapError, match="keeps nothing of a merged head"):
        replace(method, retain=0.05).check_model(model)


def test_merged_heads_by_error_have_the_steps_of_all_their_heads():
    model = tiny_model(heads=8, kv_heads=4, head_dim=16, hidden=64, dtype=torch.float32)
    with pytest.raises(RapError, match="is below one step of 2 in every layer"):
        Rap(retain=0.1, align=4, budget="error", merge=1).check_model(model)
    Rap(retain=0.1, align=4, budget="error", merge=4).check_model(model)
