"""What `rap` merges by default: as many heads as pay, none where that cannot be, or was not meant.

Where no layer is merged it is the method with separate heads, in all that it reads and makes.
"""

from typing import Any

import pytest
import torch

import rap
from cases.models import random_tokens, tiny_model
from rap.methods.base import traits
from rap.planning.plan import Plan

# Models and ratios at which nothing is merged, and why a layer says so.
ALONE = {
    "one KV head": ("llama", {"heads": 4, "kv_heads": 1}, 0.5, "one KV head leaves nothing"),
    "normalised, one KV head": ("qwen3", {"heads": 4, "kv_heads": 1}, 0.5, "one KV head"),
    "too wide a head": ("llama", {"heads": 2, "kv_heads": 2, "head_dim": 160}, 0.9, ""),
    "normalised, too wide": ("qwen3", {"heads": 2, "kv_heads": 2, "head_dim": 160}, 0.9, ""),
    "all kept": ("llama", {"heads": 4, "kv_heads": 2}, 1.0, ""),
    "all kept in steps": ("llama", {"heads": 4, "kv_heads": 2, "head_dim": 64}, 0.97, ""),
}


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans keep the same to the bit, whatever they say of themselves."""
    pairs = zip(one.layers, other.layers, strict=True)
    return all(
        type(a) is type(b)
        and a.tensors().keys() == b.tensors().keys()
        and all(torch.equal(x, b.tensors()[name]) for name, x in a.tensors().items())
        for a, b in pairs
    )


def test_the_bundled_model_has_its_two_heads_merged(reference_model: Any) -> None:
    method = rap.Rap(retain=0.5)
    windows = torch.randint(reference_model.config.vocab_size, (2, 64))
    statistics = rap.calibrate(reference_model, windows, method.needs_for(reference_model))
    plan = method.plan(reference_model, statistics)
    small = method.apply(reference_model, plan)
    assert {cache.num_heads for cache in plan.caches} == {1}
    assert plan.kept_fraction == 0.5
    assert len({layer.key_width for layer in plan.layers}) == 1  # budget `uniform`
    kept, dense = (rap.footprint(model).kv_bytes_per_token for model in (small, reference_model))
    assert kept == 0.5 * dense
    assert plan.method["merge"] == "auto"
    assert plan.method["budget"] == "uniform"
    assert same(plan, rap.Rap(retain=0.5, merge="all").plan(reference_model, statistics))


@pytest.mark.parametrize(
    ("settings", "merge"),
    [
        ({}, 4),
        ({"queries": "factored"}, 4),
        ({"queries": "absorbed"}, 2),
        ({"profile": "stock"}, 2),
    ],
)
def test_what_absorbs_its_maps_merges_no_more_than_the_weights_bear(
    settings: dict[str, Any], merge: int
) -> None:
    """Four heads as one double W_q and W_o at half of the cache, pairs leave them as they are."""
    model = tiny_model(heads=8, kv_heads=8, hidden=64)
    method = rap.Rap(retain=0.5, merge="auto", **settings)
    statistics = rap.calibrate(model, random_tokens(2, 16), method.needs_for(model))
    plan = method.plan(model, statistics)
    assert {layer.merge for layer in plan.layers} == {merge}


def test_maps_of_a_short_text_stay_of_the_size_of_weights(
    reference_model: Any, test_tokens: torch.Tensor
) -> None:
    """Of 128 tokens, which say nothing of most directions of two heads' values."""
    method = rap.Rap(retain=0.75)
    windows = test_tokens[:128].view(2, 64)
    statistics = rap.calibrate(reference_model, windows, method.needs_for(reference_model))
    plan = method.plan(reference_model, statistics)
    sizes = [float(layer.tensors()["value_up_GDC"].abs().max()) for layer in plan.layers]
    assert max(sizes) < 3


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("metric", ["loss", "output"])
def test_where_nothing_is_merged_it_is_the_method_with_separate_heads(
    name: str, metric: str
) -> None:
    family, sizes, retain, reason = ALONE[name]
    model = tiny_model(family, dtype=torch.float64, **sizes)
    default = rap.Rap(retain=retain, metric=metric)
    alone = rap.Rap(retain=retain, metric=metric, merge=1)
    assert default.needs_for(model) == alone.needs_for(model)
    assert not {"joint", "averages", "normed"} & default.needs_for(model)
    statistics = rap.calibrate(model, random_tokens(4, 32), default.needs_for(model))
    found, expected = default.plan(model, statistics), alone.plan(model, statistics)
    assert same(found, expected)
    assert all(reason in layer.note for layer in found.layers)
    assert all(layer.note.startswith("heads not merged: ") for layer in found.layers) is bool(
        reason
    )
    assert found.method == {**expected.method, "merge": "auto"}
    assert found.method["budget"] == "error"
    assert "merge" not in expected.method


def test_statistics_for_any_model_are_enough(reference_model: Any) -> None:
    """`needs` names no model: what it asks for is enough wherever the default may lead."""
    method = rap.Rap(retain=0.5)
    for kv_heads in (1, 2):
        model = tiny_model(heads=4, kv_heads=kv_heads)
        assert method.needs_for(model) <= method.needs
        statistics = rap.calibrate(model, random_tokens(2, 24), method.needs)
        assert method.plan(model, statistics).kept_fraction == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"keys": "pairs"},
        {"values": "channels"},
        {"budget": "adaptive"},
        {"budget": "search"},
        {"key_share": 0.3},
        {"key_share": "pooled"},
        {"profile": "stock"},
        {"queries": "factored"},
        {"qk_norm": "exact"},
        {"qk_norm": "rows", "norm_rows": 2},
    ],
)
def test_settings_of_separate_heads_keep_them_separate(settings: dict[str, Any]) -> None:
    method = rap.Rap(retain=0.5, **settings)
    assert method.merge == 1
    assert method == rap.Rap(retain=0.5, merge=1, **settings)
    assert "merge" not in method.describe()
    assert not {"joint", "averages"} & method.needs


@pytest.mark.parametrize("merge", ["auto", "all", 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"keys": "pairs"},
        {"values": "channels"},
        {"budget": "adaptive"},
        {"key_share": 0.3},
        {"key_share": "pooled"},
    ],
)
def test_what_excludes_merged_heads_is_refused_where_both_are_asked_for(
    settings: dict[str, Any], merge: Any
) -> None:
    with pytest.raises(rap.RapError, match=f"merge={merge} needs"):
        rap.Rap(retain=0.5, merge=merge, **settings)


@pytest.mark.parametrize(
    "settings", [{"budget": "error"}, {"metric": "output"}, {"queries": "absorbed"}, {"align": 4}]
)
def test_other_settings_leave_heads_merged(settings: dict[str, Any]) -> None:
    assert rap.Rap(retain=0.5, **settings).merge == "auto"


@pytest.mark.parametrize("name", [n for n in rap.METHODS if n != "rap"])
def test_no_other_method_has_the_setting(name: str) -> None:
    assert not hasattr(rap.METHODS[name], "merge"), traits(rap.METHODS[name])


def test_the_published_recipe_keeps_heads_separate() -> None:
    method = rap.parse_method("rap:paper", 0.5)
    assert (method.merge, method.budget) == (1, "adaptive")
    assert "merge" not in method.describe()
    assert rap.parse_method("rap:general", 0.5).merge == "auto"
