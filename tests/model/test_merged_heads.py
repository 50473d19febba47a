"""Merged heads of every family are the dense model with its keys and values projected, float64.

Slots of one frequency mix the pairs of that frequency alone, so that the map from dense keys to
what their readers see commutes with the rotation: hooks in the dense model apply it. The maps are
made of a plan's numbers by loops that know nothing of the package's own products.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from cases.family_cases import CASES, Case
from cases.merged_plans import MERGE, MERGED, merged_layer, merged_plan
from cases.models import random_tokens, tiny_model
from rap.checkpoint.load import load
from rap.model.cache_layout import CacheLayout
from rap.model.errors import PlanError
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

RECURRENT = ("granitemoehybrid", "falcon_h1")
ALIKE = {"rtol": 0, "atol": 1e-9}  # sums of a few hundred float64 products of size 10


names = {"ids": lambda case: case.name}


def projected_by_hooks(model: Any, plan: Plan, case: Case) -> Any:
    """A copy of a stock model in which hooks map the keys and values of all heads."""
    model = copy.deepcopy(model)
    layers = getattr(model.get_decoder(), "model", model.get_decoder()).layers
    for index, (layer, planned) in enumerate(zip(layers, plan.layers, strict=True)):
        if planned is None:
            continue
        size, rotated = case.sizes(index)
        maps = _key_map(planned, size, rotated, case), _value_map(planned, size)
        attention = getattr(layer, case.attention)
        if not case.fused:
            attention.k_proj.register_forward_hook(_mapped(maps[0]))
            attention.v_proj.register_forward_hook(_mapped(maps[1]))
            continue
        heads = len(planned.value_down_GCD)
        queries = 6 * size
        if case.fused == "q, k, v":
            places = torch.arange(queries + 2 * heads * size)[queries:].chunk(2)
            attention.qkv_proj.register_forward_hook(_mapped_at(places, maps))
        else:
            rows = torch.arange(3 * queries).view(6, 3, size)
            places = rows[:, 1].flatten(), rows[:, 2].flatten()
            attention.query_key_value.register_forward_hook(_mapped_at(places, maps))
    return model


def _key_map(planned: PairPlan, size: int, rotated: int, case: Case) -> Tensor:
    """[G D, G D] from dense keys to those that the merged logits are of, in the dense order."""
    heads, pairs = len(planned.value_down_GCD), rotated // 2
    whole = torch.zeros(heads * size, heads * size, dtype=torch.float64)
    slots = planned.frequency_GM.shape[1] if pairs else 0
    for to in range(heads):
        for back in range(to // MERGE * MERGE, (to // MERGE + 1) * MERGE):
            for p in range(pairs):
                factor = sum(
                    torch.view_as_complex(planned.query_mix_GMP2[to, s, p]).conj()
                    * torch.view_as_complex(planned.key_mix_GMP2[back, s, p])
                    for s in range(slots)
                )
                a, b = complex(factor).real, complex(factor).imag
                first, second = (2 * p, 2 * p + 1) if case.interleaved else (p, p + pairs)
                row, column = to * size, back * size
                whole[row + first, column + first] = a
                whole[row + first, column + second] = -b
                whole[row + second, column + first] = b
                whole[row + second, column + second] = a
            if size > rotated:
                mixed = planned.query_free_mix_GNF[to].mT @ planned.key_free_mix_GNF[back]
                rows = slice(to * size + rotated, (to + 1) * size)
                whole[rows, back * size + rotated : (back + 1) * size] = mixed
    return whole


def _value_map(planned: PairPlan, size: int) -> Tensor:
    heads = len(planned.value_down_GCD)
    whole = torch.zeros(heads * size, heads * size, dtype=torch.float64)
    for to in range(heads):
        for back in range(to // MERGE * MERGE, (to // MERGE + 1) * MERGE):
            block = planned.value_up_GDC[to] @ planned.value_down_GCD[back]
            whole[to * size : (to + 1) * size, back * size : (back + 1) * size] = block
    return whole


def _mapped(matrix: Tensor) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output @ matrix.mT


def _mapped_at(places: Any, maps: Any) -> Callable[..., Tensor]:
    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        for where, matrix in zip(places, maps, strict=True):
            output[..., where] = output[..., where] @ matrix.mT
        return output

    return hook


@pytest.mark.parametrize("case", MERGED, **names)
def test_it_is_the_dense_model_with_projected_keys_and_values(case: Case) -> None:
    model = case.model()
    plan = merged_plan(model, case)
    assert any(plan.layers)
    small, expected = apply(model, plan), projected_by_hooks(model, plan, case)
    ids = random_tokens(2, 11)
    bound = {"rtol": 0, "atol": 1e-3} if case.in_float32 else ALIKE
    # A recurrent state beside attention is cached in float32.
    by_step = {"rtol": 0, "atol": 1e-4} if case.name in RECURRENT else bound
    with torch.no_grad():
        found, wanted = small(ids).logits, expected(ids).logits
        torch.testing.assert_close(found, wanted, **bound)
        assert not torch.allclose(model(ids).logits, wanted, atol=1e-2)
        # Token by token from the cache, whose layout is the plan's.
        cache = small(ids[:, :6], use_cache=True).past_key_values
        for place in range(6, 11):
            step = small(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            torch.testing.assert_close(step.logits[:, 0], found[:, place], **by_step)
    for index, layout in enumerate(plan.caches):
        if plan.layers[index] is not None and hasattr(cache.layers[index], "keys"):
            keys, values = cache.layers[index].keys, cache.layers[index].values
            assert layout == CacheLayout(keys.shape[1], keys.shape[-1], values.shape[-1])
            assert keys.shape[1] == attention_layers(model)[index].shape.num_kv_heads // MERGE


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
    alone, merged = (rap.Rap(retain=0.5, **x).plan(model, statistics) for x in ({}, {"merge": 1}))
    assert alone == merged
    assert "merge" not in alone.method


def test_what_cannot_be_merged_stays_and_says_why() -> None:
    for family, kv_heads, reason in (
        ("qwen3", 2, "QK-norm weighs single channels"),
        ("llama", 1, "one KV head leaves nothing to merge"),
    ):
        model = tiny_model(family, heads=4, kv_heads=kv_heads, dtype=torch.float64)
        method = rap.Rap(retain=0.5, merge="auto")
        statistics = rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))
        plan = method.plan(model, statistics)
        assert {layer.note for layer in plan.layers} == {f"heads not merged: {reason}"}
        assert plan.kept_fraction == 0.5
        uniform = rap.Rap(retain=0.5, budget="uniform").plan(model, statistics)
        assert all(
            torch.equal(mine.frequency_GM, other.frequency_GM)
            for mine, other in zip(plan.layers, uniform.layers, strict=True)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"merge": 3}, "4 KV heads cannot be merged by 3: use one of 1, 2, 4"),
        ({"merge": 0}, "merge 0 is not possible"),
        ({"merge": 2, "keys": "pairs"}, "needs keys 'fold' and values 'subspace'"),
        ({"merge": 2, "budget": "adaptive"}, "needs budget 'uniform', 'error' or 'search'"),
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
    sizes = case.sizes(0)
    good = merged_layer(shape.num_kv_heads, *sizes, torch.Generator().manual_seed(0))
    good.check(0, shape)
    tensors = good.tensors()
    for name, replaced, message in (
        ("frequency_GM", tensors["frequency_GM"][:1].expand(3, -1), "has 3 KV heads"),
        ("value_down_GCD", None, "has 2 KV heads, the model has 4"),
        ("key_mix_GMP2", tensors["key_mix_GMP2"][:2], "key_mix_GMP2 has 2 KV heads"),
        ("value_up_GDC", tensors["value_up_GDC"][..., :3], "folds 3 channels back"),
    ):
        changed = {**tensors, name: replaced}
        with pytest.raises(PlanError, match=message):
            PairPlan(**{k: x for k, x in changed.items() if x is not None}).check(0, shape)
