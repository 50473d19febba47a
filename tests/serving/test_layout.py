"""What an engine reads from the config of a pruned checkpoint, and what it refuses."""

import pytest
import torch

from cases.family_cases import CASES, random_case_plan
from cases.merged_plans import merged_layer
from cases.models import tiny_model
from cases.plans import plan_of, random_plan
from cases.served import SERVED
from rap.model.cache_layout import CacheLayout, PairEntry, dense_layout
from rap.model.errors import CheckpointError, UnsupportedModelError
from rap.model.layers import attention_layers
from rap.serving.layout import (
    cache_layouts,
    cached_heads,
    check_division,
    dense_head_dims,
    dense_layouts,
    padded_width,
)
from rap.serving.verify import kept_fraction
from rap.surgery.apply import apply

CPU_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


@pytest.fixture(scope="module")
def config():
    model = tiny_model("llama")
    return apply(model, random_plan(model, [(3, 10), None])).config


def test_layouts_of_every_layer(config):
    assert cache_layouts(config) == [CacheLayout(2, 6, 10), None]
    assert cache_layouts(config)[0].width == 10
    assert cache_layouts(config)[0].elements == 32
    assert PairEntry(pairs=3, free=2, values=7).key_width == 8


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda rap: rap.pop("layers"), "no `rap` section with layer widths"),
        (lambda rap: rap["layers"].pop(), "lists widths for 1 layers, the model has 2"),
        (lambda rap: rap.update(version=99), "format version 99.*upgrade the package"),
        (lambda rap: rap["layers"][0].pop("values"), "layer 0 has impossible widths"),
        (lambda rap: rap["layers"][0].update(values=0), "layer 0 has impossible widths"),
        (lambda rap: rap["layers"][0].update(pairs=9), "18 key and 10 value channels of a head"),
        (lambda rap: rap["layers"][0].update(free=11), "17 key and 10 value channels of a head"),
        (lambda rap: rap["layers"][0].update(heads=4), "caches 4 heads, into which 2 KV heads"),
        (lambda rap: rap["layers"][0].update(heads=1, pairs=17), "34 key and 10 value channels"),
    ],
)
def test_wrong_sections_are_refused(config, edit, sentence):
    section = {**config.rap, "layers": [dict(config.rap["layers"][0]), None]}
    edit(section)
    changed = type(config)(**{**config.to_dict(), "rap": section})
    with pytest.raises(CheckpointError, match=sentence):
        cache_layouts(changed)


@pytest.mark.parametrize(("family", "heads"), [("llama", 2), ("gpt_neox", 4), ("persimmon", 4)])
def test_a_field_that_a_family_does_not_read_says_nothing_of_its_heads(family, heads):
    model = tiny_model(family, heads=4, kv_heads=2, hidden=64)
    assert model.config.num_key_value_heads == 2
    assert cached_heads(model.config) == [heads] * model.config.num_hidden_layers
    assert attention_layers(model)[0].shape.num_kv_heads == heads


@pytest.mark.parametrize(
    ("name", "sizes", "heads"),
    [
        ("llama", [16, 16, 16], [2, 2, 2]),
        ("gemma3n_text", [16] * 5, [2, 2, 2, 0, 0]),
        ("gemma4_text", [16, 16, 24, 16, 24], [2, 2, 2, 0, 0]),
        ("gemma4_text:tied", [16, 24, 24], [2, 1, 1]),
    ],
)
def test_layers_differ_in_what_they_cache(name, sizes, heads):
    """Heads without a window may be wider and fewer; a reader of another's cache has none."""
    case = next(case for case in CASES if case.name == name)
    model = case.model()
    plan = random_case_plan(model, case)
    config = apply(model, plan).config
    assert (dense_head_dims(config), cached_heads(config)) == (sizes, heads)
    assert kept_fraction(config, []) == pytest.approx(plan.kept_fraction)
    assert cache_layouts(config)[0] is None


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_a_config_says_what_the_layers_of_its_model_cache(case):
    """Engines read it before there is a model, all else from the model."""
    model = case.model()
    layers = attention_layers(model)
    assert dense_layouts(model.config) == [dense_layout(layer.shape) for layer in layers]


@pytest.fixture(scope="module")
def merged():
    """Of 6 KV heads: one merged head, three, the dense layer, and heads kept apart."""
    model = tiny_model("llama", heads=12, kv_heads=6, hidden=48, layers=4)
    generator = torch.Generator().manual_seed(0)
    layers = [
        merged_layer(6, 16, 16, generator, merge=merge, slots=slots, width=width)
        for merge, slots, width in ((6, 20, 48), (2, 5, 9))
    ]
    apart = random_plan(model, [None, None, None, (3, 10)]).layers[3]
    plan = plan_of(model, [*layers, None, apart])
    return plan, apply(model, plan).config


def test_merged_layers_cache_fewer_heads_that_may_be_wider(merged):
    plan, config = merged
    wanted = [CacheLayout(1, 40, 48), CacheLayout(3, 10, 9), None, CacheLayout(6, 6, 10)]
    assert cache_layouts(config) == wanted
    assert [one or CacheLayout(6, 16, 16) for one in wanted] == plan.caches
    assert kept_fraction(config, []) == pytest.approx(plan.kept_fraction)


def test_cached_heads_are_divided_over_devices_or_replicated(merged):
    """3 heads are refused on 2 devices; 1 is replicated on any; 6 need 1, 2, 3, 6 or 12."""
    _, config = merged
    for possible in (1, 3, 6, 12):
        check_division(config, possible)
    sentence = "layer 1 caches 3 heads, which 2 devices cannot divide; use --tensor-parallel-size "
    with pytest.raises(UnsupportedModelError, match=f"{sentence}1, 3, 6, 12$"):
        check_division(config, 2)
    with pytest.raises(UnsupportedModelError, match="layer 1 caches 3 heads, which 4 devices"):
        check_division(config, 4)


def test_devices_that_are_named_divide_the_query_heads_too():
    model = tiny_model("llama", heads=12, kv_heads=4, hidden=48, layers=1)
    layer = merged_layer(4, 16, 16, torch.Generator().manual_seed(0))
    config = apply(model, plan_of(model, [layer])).config
    with pytest.raises(UnsupportedModelError, match=r"-size 1, 2, 4, 6, 12$"):
        check_division(config, 3)


def test_a_layer_that_reads_the_cache_of_another_has_no_heads_to_divide():
    case = next(case for case in CASES if case.name == "gemma3n_text")
    model = case.model()
    config = apply(model, random_case_plan(model, case)).config
    check_division(config, 2)


@pytest.mark.parametrize(("width", "padded"), [(8, 32), (32, 32), (44, 64), (90, 96), (512, 512)])
def test_width_is_padded_to_the_next_size(width, padded):
    assert padded_width(width, CPU_SIZES.__contains__, "CPU_ATTN") == padded


def test_width_that_no_size_holds_is_refused_with_the_sizes():
    with pytest.raises(CheckpointError, match=r"SMALL takes no head of 96 .*; it takes 32, 64:"):
        padded_width(96, {32, 64}.__contains__, "SMALL")
    with pytest.raises(CheckpointError, match=r"it takes 8, 16, 24, .*, \.\.\., 248, 256:"):
        padded_width(257, lambda size: size % 8 == 0 and size <= 256, "FLASH_ATTN")
