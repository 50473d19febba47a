"""Factored layers of every family: the dense model with its keys and values projected, float64.

What they are held against is in cases.merged_plans. Absorbed layers are held against the same in
test_merged_heads, so that the two forms are equal where both are possible.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import rap
from cases.family_cases import CASES, Case
from cases.merged_plans import ALIKE, MAPPED, check_projected, merged_plan
from cases.models import random_tokens, tiny_model
from rap.calibration import moments
from rap.checkpoint.load import load
from rap.model.cache_layout import FactoredEntry
from rap.model.errors import PlanError
from rap.model.factored import FactoredAttention
from rap.model.kinds.factored import FactoredPlan
from rap.model.layers import attention_layers
from rap.model.modeling import layer_entries
from rap.planning.plan import Plan
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

NORMED = [case for case in MAPPED if case.norms]
names = {"ids": lambda case: case.name}


def test_families_with_normalised_keys_are_among_them() -> None:
    assert {"qwen3", "gemma3_text", "olmo2", "apertus", "afmoe", "qwen3_next"} <= {
        case.name for case in NORMED
    }


@pytest.mark.parametrize("case", MAPPED, **names)
def test_it_is_the_dense_model_with_projected_keys_and_values(case: Case) -> None:
    model = case.model()
    plan = merged_plan(model, case, mapped=True)
    assert any(isinstance(layer, FactoredPlan) for layer in plan.layers)
    # Norms work in float32 whatever the model does: a few 1e-7 of states of size ten and more.
    bound = {"rtol": 0, "atol": 1e-4} if case.norms else ALIKE
    if case.in_float32:
        bound = {"rtol": 0, "atol": 1e-3}
    check_projected(model, plan, case, bound)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "olmo2", "phi3", "afmoe"])
def test_streamed_loaded_and_saved_are_the_same(name: str, tmp_path: Any) -> None:
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    plan = merged_plan(model, case, mapped=True)
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan
    model.save_pretrained(tmp_path / "dense")
    apply_streamed(tmp_path / "dense", plan, tmp_path / "streamed")
    small = apply(model, plan)
    small.save_pretrained(tmp_path / "memory")
    files = [tmp_path / place / "model.safetensors" for place in ("streamed", "memory")]
    assert files[0].read_bytes() == files[1].read_bytes()
    ids = random_tokens(1, 9)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "streamed")(ids).logits, small(ids).logits)


def _planned(model: Any, **settings: Any) -> tuple[rap.Rap, Plan]:
    method = rap.Rap(**{"retain": 0.5, **settings})
    statistics = rap.calibrate(model, random_tokens(6, 48), method.needs_for(model))
    return method, method.plan(model, statistics)


@pytest.mark.parametrize(
    ("hidden", "settings", "queries", "outputs"),
    [
        # W = 64 of heads of 32: 64 * 256 products absorbed, 32 * (256 + 64) factored.
        (256, {"merge": 4}, True, True),
        (48, {"merge": 4}, False, False),
        (256, {"merge": 2}, False, False),
        (256, {"merge": 4, "queries": "absorbed"}, False, False),
        (256, {"merge": 4, "profile": "stock"}, False, False),
        (48, {"queries": "factored"}, True, True),
        (48, {}, False, False),
    ],
)
def test_auto_takes_the_form_with_fewer_products(
    hidden: int, settings: dict, queries: bool, outputs: bool
) -> None:
    model = tiny_model(heads=8, kv_heads=4, head_dim=32, hidden=hidden)
    method, plan = _planned(model, **settings)
    entries = [layer.entry() for layer in plan.layers]
    found = {
        (isinstance(x, FactoredEntry) and x.queries, isinstance(x, FactoredEntry) and x.outputs)
        for x in entries
    }
    assert found == {(queries, outputs)}
    small = method.apply(model, plan)
    costs = rap.footprint(small)
    assert costs.kv_bytes_per_token == 0.5 * rap.footprint(model).kv_bytes_per_token
    if settings == {"merge": 4} and queries:
        absorbed, other = _planned(model, merge=4, queries="absorbed")
        wider = rap.footprint(absorbed.apply(model, other))
        assert costs.projection_flops < wider.projection_flops
        assert costs.attention_parameters < wider.attention_parameters
        assert "W_q and W_o stay dense, with a map per head" in plan.about()[0]
        assert "W_q and W_o have 2.00 of their dense size" in other.about()[0]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "olmo2", "persimmon:norm", "afmoe"])
@pytest.mark.parametrize("metric", ["loss", "output"])
def test_heads_behind_a_norm_are_merged_better_than_their_pairs_are_pruned(
    name: str, metric: str
) -> None:
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    ids = random_tokens(4, 24)
    with torch.no_grad():
        wanted = model(ids).logits
        errors = []
        for settings in ({"merge": 2}, {"merge": 2, "queries": "absorbed"}):
            method, plan = _planned(model, metric=metric, **settings)
            assert all(layer is None or layer.merge == 2 for layer in plan.layers) is (
                "queries" not in settings
            )
            errors.append((method.apply(model, plan)(ids).logits - wanted).square().mean())
        assert errors[0] < errors[1]
        whole = _planned(model, metric=metric, merge=2, retain=1.0)
        small = whole[0].apply(model, whole[1])
        torch.testing.assert_close(small(ids).logits, wanted, rtol=0, atol=1e-4)


def test_maps_are_chosen_by_what_is_behind_the_norm() -> None:
    model = tiny_model("qwen3", heads=8, kv_heads=4)
    method = rap.Rap(merge=2)
    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))
    seen = method.seen(method.dense(model), statistics)
    for before, after in zip(statistics.layers, seen.layers, strict=True):
        normed = {name: x for name, x in before.items() if name.startswith(moments.NORMED)}
        assert len(normed) > 3
        for name, moment in normed.items():
            assert torch.equal(after[name.removeprefix(moments.NORMED)], moment)
    assert not torch.allclose(statistics.layers[0]["key_moment"], seen.layers[0]["key_moment"])


def test_one_kv_head_behind_a_norm_says_so_and_is_folded_on_demand() -> None:
    model = tiny_model("gemma3_text", heads=4, kv_heads=1, query_pre_attn_scalar=24)
    _, plan = _planned(model, merge="auto")
    assert plan.about() == ["layers 0-1: heads not merged: one KV head leaves nothing to merge"]
    _, folded = _planned(model, queries="factored")
    assert {type(layer) for layer in folded.layers} == {FactoredPlan}
    assert all(layer.merge == 1 and layer.mixes_keys for layer in folded.layers)


def test_engines_without_a_place_for_maps_say_so() -> None:
    model = tiny_model(heads=8, kv_heads=4, head_dim=32)
    method, plan = _planned(model, queries="factored")
    config = method.apply(model, plan).config
    for engine, reason in (("plain", "no plain config"),):
        with pytest.raises(rap.RapError, match=reason):
            layer_entries(config, 2, engine)


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in ({"keys": "pairs"}, {"profile": "stock"}):
        with pytest.raises(rap.RapError, match="queries 'factored' needs keys 'fold'"):
            rap.Rap(queries="factored", **settings)
    model, method = tiny_model("qwen3", heads=8, kv_heads=4), rap.Rap(merge=2)
    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs | {"energy"})
    with pytest.raises(rap.RapError, match="needs the statistics normed"):
        method.plan(model, statistics)


def test_plans_of_factored_layers_are_checked() -> None:
    model = tiny_model(heads=8, kv_heads=4, head_dim=32)
    _, plan = _planned(model, queries="factored")
    good, shape = plan.layers[0], attention_layers(model)[0].shape
    good.check(0, shape)
    for changes, message in (
        ({"queries": False, "outputs": False}, "maps queries or outputs"),
        ({"query_ratio_H": torch.ones(8)}, "own norms"),
    ):
        with pytest.raises(PlanError, match=message):
            replace(good, **changes).check(0, shape)
    module = attention_layers(apply(model, plan))[0].module
    assert isinstance(module, FactoredAttention)
    assert not hasattr(module, "kept_channels")
