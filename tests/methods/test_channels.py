"""Single channels and whole heads against stock models and simulations built another way."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rap
from cases.models import random_tokens, tiny_model
from cases.scripts import load_script
from rap.methods import METHODS
from rap.model.kinds.single_channels import partners
from rap.serving.layout import cache_layouts
from rap.studies.analyses.orphans import pair_damage

CHANNELS = load_script("experiments/quality/channels.py")
LayerChannels, index_aware, reindexed = (
    CHANNELS.LayerChannels,
    CHANNELS.index_aware,
    CHANNELS.reindexed,
)

PAIRS = 8


def calibrated(model_type: str = "llama", **settings: Any) -> tuple[Any, rap.Statistics]:
    """A tiny float64 model, and its Fisher statistics."""
    model = tiny_model(model_type, dtype=torch.float64, heads=4, kv_heads=2, **settings)
    return model, rap.calibrate(model, random_tokens(4, 48), {"fisher"})


def made(model: Any, statistics: rap.Statistics, name: str, **settings: Any) -> Any:
    """The model of a method."""
    method = METHODS[name](**settings)
    return method.apply(model, method.plan(model, statistics))


def best_channels(statistics: rap.Statistics, width: int) -> list[LayerChannels]:
    """The `width` best channels of every head by root-Fisher; half pairing: canonical is dense."""
    return [
        LayerChannels(
            *(
                layer[f"root_fisher_{projection}"].topk(width).indices.sort(1).values
                for projection in "kv"
            )
        )
        for layer in statistics.layers
    ]


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
@pytest.mark.parametrize("retain", [0.75, 0.5])
def test_narrow_rotation_is_a_smaller_head_dim(rope: str, retain: float) -> None:
    """A stock model with `head_dim` set to the number of kept channels, its W_q rescaled."""
    model, statistics = calibrated(rope=rope)
    small = made(model, statistics, "kvpruner", retain=retain)
    stock = reindexed(model, best_channels(statistics, round(16 * retain)))
    assert stock.config.head_dim == round(16 * retain)
    ids = random_tokens(2, 40, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, stock(ids).logits, rtol=0, atol=1e-9)


def test_first_frequencies_are_those_of_the_dense_head() -> None:
    """The other reading of the method; it loads and serves as any pruned checkpoint does."""
    model, statistics = calibrated()
    small = made(model, statistics, "kvpruner", retain=0.5, rotation="first")
    attention = small.model.layers[0].self_attn
    assert attention.frequency_index.tolist() == [[0, 1, 2, 3]] * 2
    assert [layout.key_width for layout in cache_layouts(small.config)] == [8, 8]
    narrow = made(model, statistics, "kvpruner", retain=0.5)
    ids = random_tokens(1, 20)
    with torch.no_grad():
        assert not torch.allclose(small(ids).logits, narrow(ids).logits, atol=0.1)
    with pytest.raises(rap.RapError, match="kind 'reindexed': tokens rotate by their place"):
        cache_layouts(narrow.config)


@pytest.mark.parametrize("retain", [0.75, 0.5])
def test_indexed_channels_are_the_dense_head_with_a_masked_cache(retain: float) -> None:
    """Full rotation of masked states, masked again: the same logits without the saving."""
    model, statistics = calibrated()
    small = made(model, statistics, "kvpruner-indexed", retain=retain)
    simulated = index_aware(model, best_channels(statistics, round(16 * retain)))
    ids = random_tokens(2, 40, seed=2)
    with torch.no_grad():
        found, wanted = small(ids).logits, simulated(ids).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert (
        rap.footprint(small).kv_bytes_per_token == retain * rap.footprint(model).kv_bytes_per_token
    )


@pytest.mark.parametrize("model_type", ["glm", "cohere", "ernie4_5"])
def test_indexed_channels_in_other_layouts(model_type: str) -> None:
    """Interleaved pairs, partial rotation: all channels are the dense model, some decode right."""
    model, statistics = calibrated(model_type)
    ids = random_tokens(1, 24, seed=3)
    whole = made(model, statistics, "kvpruner-indexed", retain=1.0)
    small = made(model, statistics, "kvpruner-indexed", retain=0.5)
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, model(ids).logits)
        cache = small(ids[:, :9], use_cache=True).past_key_values
        rest = small(ids[:, 9:], past_key_values=cache).logits
        torch.testing.assert_close(rest, small(ids).logits[:, 9:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "name"), product(["cohere", "ernie4_5"], ["kvpruner", "kvpruner-indexed"])
)
def test_channels_turn_in_the_precision_of_the_family(model_type: str, name: str) -> None:
    """Both cast queries and keys to float32 to rotate them; cohere's tables are
    bfloat16, those of ernie4_5 are not."""
    model = tiny_model(model_type, dtype=torch.bfloat16)
    statistics = rap.calibrate(model, random_tokens(2, 16), {"fisher"})
    whole, ids = made(model, statistics, name, retain=1.0), random_tokens(1, 24)
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, model(ids).logits)


def test_partners_are_found_by_hand() -> None:
    kept = torch.tensor([[0, 3, 8, 10], [1, 2, 9, 10]])  # of 8 pairs (c, c + 8)
    position, sign = partners(kept, PAIRS)
    assert sign.tolist() == [[-1, 0, 1, 0], [-1, -1, 1, 1]]
    assert position.tolist() == [[2, 0, 0, 0], [2, 3, 0, 1]]
    assert _orphans(kept) == 2 / 8
    free = torch.tensor([[0, 8, 17]])
    assert _orphans(free) == 0
    assert partners(free, PAIRS)[1].tolist() == [[-1, 1, 0]]


@pytest.mark.parametrize("retain", [0.75, 0.5])
def test_only_channel_pruning_makes_orphans(retain: float) -> None:
    model, statistics = calibrated()
    for layer, shape in _planned(rap.Rap.paper(retain=retain).plan(model, statistics)):
        order = shape.geometry.canonical_order().argsort()
        assert _orphans(order[layer.kept_channels(shape)].sort(1).values) == 0
    small = made(model, statistics, "kvpruner-indexed", retain=retain)
    kept = [layer.self_attn.kept_channels for layer in small.model.layers]
    assert all(_orphans(channels) > 0.1 for channels in kept)


def _orphans(kept_GW: Tensor) -> float:
    return pair_damage([(kept_GW, PAIRS)])["orphans"]


def _planned(plan: rap.Plan) -> list[tuple[Any, Any]]:
    return list(zip(plan.layers, plan.shapes, strict=True))


def test_partly_rotating_heads_cannot_be_taken_for_narrow_ones() -> None:
    model, statistics = calibrated("glm")
    with pytest.raises(rap.RapError, match="use kvpruner-indexed"):
        METHODS["kvpruner"](retain=0.5).plan(model, statistics)


def test_paper_recipes_budget_by_fisher() -> None:
    model, statistics = calibrated(layers=4)
    for name in ("kvpruner", "kvpruner-indexed"):
        plans = [
            make(retain=0.5).plan(model, statistics)
            for make in (METHODS[name], METHODS[name].paper)
        ]
        widths = [{cache.elements for cache in plan.caches} for plan in plans]
        assert len(widths[0]) == 1 < len(widths[1])
        assert plans[1].kept_fraction == pytest.approx(0.5, abs=1 / 32)


@pytest.mark.parametrize("biased", [False, True])
def test_heads_leave_a_stock_model(tmp_path: Path, biased: bool) -> None:
    """The dense model with o_proj blind to dropped heads, in fewer heads and plain classes."""
    model = tiny_model(
        dtype=torch.float64, heads=8, kv_heads=4, attention_bias=biased, layers=2, hidden=48
    )
    statistics = rap.calibrate(model, random_tokens(4, 48), {"fisher"})
    method = METHODS["heads"](retain=0.6)
    plan = method.plan(model, statistics)
    assert plan.kept_fraction == 0.5
    small = method.apply(model, plan)
    for layer, planned, found in zip(
        model.model.layers, plan.layers, statistics.layers, strict=True
    ):
        score = found["root_fisher_k"].sum(1) + found["root_fisher_v"].sum(1)
        kept = list(planned.kept_heads)
        assert kept == sorted(score.topk(2).indices.tolist())
        columns = layer.self_attn.o_proj.weight.data.view(48, 4, 2, 16)
        columns[:, [head for head in range(4) if head not in kept]] = 0
    small.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert (loaded.config.num_attention_heads, loaded.config.num_key_value_heads) == (4, 2)
    assert loaded.config.head_dim == 16
    ids = random_tokens(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-9)


def test_a_lone_channel_depends_on_where_it_stands() -> None:
    """q k cos(t) cos(s): moving query and key together changes the logit, as it must not."""
    model, statistics = calibrated(layers=1)
    shifted = {}
    for name in ("kvpruner-indexed", "magnitude"):
        small = made(model, statistics, name, retain=0.5)
        ids = random_tokens(1, 16)
        with torch.no_grad():
            far = torch.arange(16)[None] + 7
            moved: Tensor = small(ids, position_ids=far).logits - small(ids).logits
        shifted[name] = float(moved.abs().max())
    assert shifted["magnitude"] < 1e-5 < 0.1 < shifted["kvpruner-indexed"]
