"""Layers with a sliding window beside layers with full attention: left dense, and counted apart.

Their cache stops growing, so that `retain` is of the cache of the others.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

import rap
from cases.command import run
from cases.models import random_tokens, tiny_model
from rap.cli.groups import PruningOptions
from rap.evaluation.cost.random_models import uniform_config
from rap.model.layers import attention_window, windowed_layers
from rap.planning.plan import Plan
from rap.studies.compare.measurement import prefill_bytes

WINDOW = 8
HYBRIDS = {
    "gemma3_text": {"sliding_window": WINDOW},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True},
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
METHODS = (
    "rap",
    "rap:merge=1:budget=search",
    "rap:merge=1:budget=error",
    "rap:merge=all",
    "rap:paper",
    "a3",
    "random",
)


def hybrid(model_type: str = "gemma3_text") -> Any:
    """Four layers, two of which slide."""
    return tiny_model(model_type, layers=4, layer_types=list(TYPES), **HYBRIDS[model_type])


def planned(model: Any, method: str, retain: float = 0.5) -> tuple[Plan, Any]:
    """The plan of a method for a model, and the pruned model."""
    chosen = rap.parse_method(method, retain=retain)
    statistics = rap.calibrate(model, random_tokens(2, 24), chosen.needs_for(model))
    plan = chosen.plan(model, statistics)
    return plan, chosen.apply(model, plan)


@pytest.mark.parametrize(
    ("model_type", "fields", "layers", "window"),
    [
        ("gemma2", {"sliding_window": 16}, {0, 2}, 16),
        ("llama4_text", {"attention_chunk_size": 32}, {0, 1, 2}, 32),
        ("qwen2", {"sliding_window": 16}, set(), None),
        # All of a kind: nothing grows more than the rest.
        ("ministral", {"sliding_window": 16}, set(), None),
        ("mistral", {"sliding_window": 16}, set(), None),
        ("llama", {}, set(), None),
    ],
)
def test_windows_are_read_from_the_config(
    model_type: str, fields: dict, layers: set, window: int | None
) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, **fields)
    assert windowed_layers(config) == layers
    assert attention_window(config) == window


@pytest.mark.parametrize("method", METHODS)
def test_layers_with_a_window_stay_dense_and_the_others_keep_the_fraction(method: str) -> None:
    model = hybrid()
    plan, small = planned(model, method)
    assert plan.spared == (0, 2)
    assert [layer is None for layer in plan.layers] == [True, False, True, False]
    assert plan.kept_fraction == pytest.approx(0.5, abs=0.04)
    dense, kept = rap.footprint(model), rap.footprint(small)
    assert kept.kv_bytes_per_token == plan.kept_fraction * dense.kv_bytes_per_token
    assert kept.windowed_kv_bytes_per_token == dense.windowed_kv_bytes_per_token
    for index in plan.spared:
        for name, weight in model.model.layers[index].named_parameters():
            assert torch.equal(small.model.layers[index].get_parameter(name), weight)


@pytest.mark.parametrize("method", ["rap:layers=all", "rap:merge=all:layers=all"])
def test_all_layers_are_pruned_where_that_is_asked_for(method: str) -> None:
    model = hybrid()
    plan, small = planned(model, method)
    assert plan.spared == ()
    assert None not in plan.layers
    assert plan.method["layers"] == "all"
    kept, dense = (rap.footprint(one).windowed_kv_bytes_per_token for one in (small, model))
    assert kept < 0.6 * dense


@pytest.mark.parametrize("method", ["rap", "rap:layers=all"])
@torch.no_grad()
def test_bytes_at_a_context_are_those_in_the_cache(method: str) -> None:
    """The library's cache drops what has left the window, but for the token that is read next."""
    _, small = planned(hybrid(), method)
    for context in (3, WINDOW - 1, 40):
        cache = small(input_ids=random_tokens(1, context), use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        cost = rap.footprint(small)
        dropped = cost.windowed_kv_bytes_per_token if context > WINDOW else 0
        assert held == cost.kv_bytes(context) - dropped


def test_a_layout_of_one_width_prunes_every_layer() -> None:
    for method in ("rap:profile=stock", "rap:profile=stock:merge=2"):
        plan, _ = planned(hybrid("qwen2"), method)
        assert plan.spared == ()
        assert None not in plan.layers
    plan, _ = planned(hybrid("qwen2"), "heads")
    assert plan.spared == ()


def test_low_rank_methods_leave_them_dense_as_well() -> None:
    model = hybrid("qwen2")
    plan, small = planned(model, "palu")
    assert plan.spared == (0, 2)
    assert plan.kept_fraction == pytest.approx(0.5, abs=0.04)
    assert isinstance(small.model.layers[0].self_attn, type(model.model.layers[0].self_attn))
    assert small.model.layers[1].self_attn.reconstruction


def test_what_was_spared_is_in_the_file(tmp_path: Any) -> None:
    plan, _ = planned(hybrid(), "rap")
    plan.save(tmp_path / "plan.safetensors")
    loaded = Plan.load(tmp_path / "plan.safetensors")
    assert loaded == plan
    assert loaded.spared == (0, 2)
    assert loaded.about()[-1].startswith("layers 0 2: dense, because a sliding window bounds")
    without, _ = planned(tiny_model(), "rap")
    without.save(tmp_path / "other.safetensors")
    assert Plan.load(tmp_path / "other.safetensors").spared == ()
    assert "layers" not in without.method  # as in records of earlier releases


def test_models_that_are_timed_leave_them_dense_as_well() -> None:
    for merge in (1, "auto"):
        entries = uniform_config(hybrid().config, 0.5, merge=merge).rap["layers"]
        assert [entry is None for entry in entries] == [True, False, True, False]


def test_commands_tell_what_grows_and_what_is_bounded(tmp_path: Any) -> None:
    model = hybrid()
    model.save_pretrained(tmp_path / "dense")
    shown = run("inspect", tmp_path / "dense", "--retain", 0.5)
    a_layer = 2 * 2 * 16 * 4  # keys and values of two heads of 16 channels in float32
    assert f"dense, {2 * a_layer:,} KV bytes per token" in shown.out
    assert f"{a_layer:,} KV bytes per token" in shown.out
    bound = f"a sliding window of {WINDOW} tokens, {2 * a_layer * WINDOW:,} bytes in all"
    assert bound in shown.out
    assert "stay dense without --layers all" in shown.out
    for given, layers in ((None, "full"), ("all", "all")):
        method = PruningOptions(retain=0.5, layers=given).build("bundled", 0)
        assert method.layers == layers


def test_flops_and_cached_bytes_stop_growing_at_the_window() -> None:
    model = hybrid()
    cost = rap.footprint(model)
    shape = model.config
    per_layer = 2 * shape.num_attention_heads * 2 * shape.head_dim
    assert (cost.mixing_flops, cost.windowed_mixing_flops) == (2 * per_layer, 2 * per_layer)
    growth = cost.attention_flops(WINDOW) - cost.attention_flops(WINDOW - 1)
    assert growth == 4 * per_layer
    assert (
        cost.attention_flops(100) - cost.attention_flops(WINDOW) == (100 - WINDOW) * 2 * per_layer
    )
    assert prefill_bytes(model) == cost.kv_bytes_per_token
