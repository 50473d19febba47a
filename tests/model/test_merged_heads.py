"""Merged heads of every family are the dense model with its keys and values projected, float64.

What they are held against is in cases.merged_plans.
"""

from typing import Any

import pytest
import torch

import rap
from cases.family_cases import CASES, Case
from cases.merged_plans import (
    ALIKE,
    MERGED,
    check_projected,
    merged_layer,
    merged_plan,
)
from cases.models import random_tokens, tiny_model
from rap.checkpoint.load import load
from rap.model.errors import PlanError
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

names = {"ids": lambda case: case.name}


@pytest.mark.parametrize("case", MERGED, **names)
def test_it_is_the_dense_model_with_projected_keys_and_values(case: Case) -> None:
    model = case.model()
    plan = merged_plan(model, case)
    assert any(plan.layers)
    bound = {"rtol": 0, "atol": 1e-3} if case.in_float32 else ALIKE
    check_projected(model, plan, case, bound)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "phi3", "glm", "gpt_neox", "smollm3", "mixtral"]
)
def test_streamed_loaded_and_saved_are_the_same(name: str, tmp_path: Any) -> None:
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    plan = merged_plan(model, case)
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


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "persimmon"])
@torch.no_grad()
def test_eager_attention_takes_fewer_heads_than_the_family_has(family: str) -> None:
    """Two merged heads of eight: one alone would be repeated by broadcasting."""
    model = tiny_model(family, heads=8, kv_heads=8, hidden=128, dtype=torch.float64)
    method, ids = rap.Rap(retain=0.5, merge=4), random_tokens(2, 12)
    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))
    small = method.apply(model, method.plan(model, statistics))
    assert {layer.module.num_kept_heads for layer in attention_layers(small)} == {2}
    expected = small(ids).logits
    small.set_attn_implementation("eager")
    # Families' own takes the softmax in float32.
    torch.testing.assert_close(small(ids).logits, expected, rtol=0, atol=1e-5)
    assert small(ids, output_attentions=True).attentions[0].shape == (2, 8, 12, 12)
    assert rap.footprint(small).kv_bytes_per_token == 0.5 * rap.footprint(model).kv_bytes_per_token


@pytest.mark.parametrize(
    ("settings", "widths"),
    [
        ({"merge": 2}, {32}),
        ({"merge": "all"}, {64}),
        ({"merge": "auto"}, {64}),
        ({"merge": 2, "budget": "error"}, None),
        ({"merge": 2, "metric": "output", "budget": "error", "align": 4}, None),
        ({"merge": 4, "profile": "stock"}, {64}),
    ],
)
def test_plans_keep_what_was_asked_for(settings: dict, widths: set | None) -> None:
    model = tiny_model(heads=8, kv_heads=4, head_dim=32, hidden=48, dtype=torch.float64)
    method = rap.Rap(retain=0.5, **settings)
    statistics = rap.calibrate(model, random_tokens(6, 48), method.needs)
    plan = method.plan(model, statistics)
    assert plan.kept_fraction == pytest.approx(0.5)
    small = method.apply(model, plan)
    dense = rap.footprint(model)
    assert rap.footprint(small).kv_bytes_per_token == 0.5 * dense.kv_bytes_per_token
    found = {layer.key_width for layer in plan.layers}
    assert widths is None or found == widths
    if "profile" in settings:
        assert len({tuple(layer.frequency_GM[0].tolist()) for layer in plan.layers}) == 1
    full = rap.Rap(retain=1.0, **{k: x for k, x in settings.items() if k != "profile"})
    if full.merge != "auto":  # which merges fewer, for heads may not be that wide
        whole = full.apply(model, full.plan(model, statistics))
        ids = random_tokens(1, 12)
        with torch.no_grad():
            torch.testing.assert_close(whole(ids).logits, model(ids).logits, **ALIKE)


def test_one_head_each_is_the_method_without_merging() -> None:
    model = tiny_model(heads=8, kv_heads=4, dtype=torch.float64)
    statistics = rap.calibrate(model, random_tokens(6, 48), rap.Rap(merge=2).needs)
    alone = rap.Rap(retain=0.5, merge=1).plan(model, statistics)
    assert {layer.num_heads for layer in alone.layers} == {4}
    assert "merge" not in alone.method


def test_what_cannot_be_merged_stays_and_says_why() -> None:
    for family, kv_heads, reason in (
        ("qwen3", 2, "QK-norm weighs single channels"),
        ("llama", 1, "one KV head leaves nothing to merge"),
    ):
        model = tiny_model(family, heads=4, kv_heads=kv_heads, dtype=torch.float64)
        method = rap.Rap(retain=0.5, merge="auto", queries="absorbed")
        statistics = rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))
        plan = method.plan(model, statistics)
        assert {layer.note for layer in plan.layers} == {f"heads not merged: {reason}"}
        assert plan.kept_fraction == 0.5
        alone = rap.Rap(retain=0.5, merge=1).plan(model, statistics)
        for mine, other in zip(plan.layers, alone.layers, strict=True):
            assert mine.tensors().keys() == other.tensors().keys()
            assert all(torch.equal(x, other.tensors()[n]) for n, x in mine.tensors().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"merge": 3}, "4 KV heads cannot be merged by 3: use one of 1, 2, 4"),
        ({"merge": 0}, "merge cannot be 0"),
        ({"merge": 2, "keys": "pairs"}, "needs keys 'fold' and values 'subspace'"),
        ({"merge": 2, "budget": "adaptive"}, "needs another budget than 'adaptive'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict, message: str) -> None:
    model = tiny_model(heads=8, kv_heads=4, dtype=torch.float64)
    statistics = rap.calibrate(model, random_tokens(4, 32), rap.Rap(merge=2).needs)
    with pytest.raises(rap.RapError, match=message):
        rap.Rap(retain=0.5, **settings).plan(model, statistics)


def test_plans_of_merged_heads_are_checked() -> None:
    model = tiny_model(heads=8, kv_heads=4, dtype=torch.float64)
    case = CASES[0]
    shape = attention_layers(model)[0].shape
    drawn = torch.Generator().manual_seed(0)
    good = merged_layer(shape.num_kv_heads, *case.sizes(0), drawn)
    good.check(0, shape)
    tensors = good.tensors()
    ones = torch.ones(shape.num_heads, dtype=torch.float64)
    for changed, message in (
        ({"frequency_GM": tensors["frequency_GM"][:1].expand(3, -1)}, "has 3 KV heads"),
        ({"value_down_GCD": None}, "has 2 KV heads, the model has 4"),
        ({"key_mix_GMP2": tensors["key_mix_GMP2"][:2]}, "key_mix_GMP2 has 2 KV heads"),
        ({"key_mix_GMP2": None, "query_mix_GMP2": None}, "merged heads need mixes, and no norms"),
        ({"query_ratio_H": ones}, "merged heads need mixes, and no norms of keys"),
        ({"value_up_GDC": tensors["value_up_GDC"][..., :3]}, "folds 3 channels back"),
    ):
        _refused(good, changed, shape, message)


def test_merged_channels_without_rotation_need_mixes_too() -> None:
    case = next(case for case in CASES if case.name == "gpt_neox")
    shape = attention_layers(case.model())[0].shape
    drawn = torch.Generator().manual_seed(0)
    good = merged_layer(shape.num_kv_heads, *case.sizes(0), drawn)
    good.check(0, shape)
    dropped = {"key_free_mix_GNF": None, "query_free_mix_GNF": None}
    _refused(good, dropped, shape, "merged heads need mixes of channels without rotation")


def _refused(good: PairPlan, changed: dict[str, Any], shape: Any, message: str) -> None:
    """A plan that is `good` but for some tensors, dropped where they are None, says why."""
    fields = {name: x for name, x in {**good.tensors(), **changed}.items() if x is not None}
    with pytest.raises(PlanError, match=message):
        PairPlan(**fields).check(0, shape)
