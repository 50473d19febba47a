"""generate() with every cache and search, against the dense model with the dropped parts zeroed."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from cases.models import random_tokens, tiny_model
from cases.plans import random_plan, zeroed
from rap.surgery.apply import apply

FAMILIES = ["llama", "mistral", "qwen2"]
WIDTHS = [(3, 5), None, (5, 9)]
NEW = 8


@pytest.fixture(scope="module", params=FAMILIES)
def both(request):
    """A pruned model and the zeroed dense one, in float64: no near tie changes a token."""
    model = tiny_model(request.param, heads=6, kv_heads=2, hidden=36, layers=3, dtype=torch.float64)
    plan = random_plan(model, WIDTHS)
    return apply(model, plan), zeroed(model, plan)


def _generate(model, tokens, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    mask = options.pop("attention_mask", torch.ones_like(tokens))
    return model.generate(tokens, attention_mask=mask, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "cache_implementation": "static"},
    ],
    ids=["dynamic", "static", "no cache", "beams", "beams static"],
)
def test_tokens_are_those_of_the_zeroed_dense_model(both, options):
    small, dense = both
    tokens = random_tokens(3, 7)
    found = _generate(small, tokens, **options)
    assert found.shape[1] == 7 + NEW
    assert torch.equal(found, _generate(dense, tokens, **options))
    assert len({tuple(row) for row in found[:, 7:].tolist()}) > 1, "the prompts do not matter"


def test_dynamic_static_and_no_cache_agree(both):
    small, _ = both
    tokens = random_tokens(3, 7)
    expected = _generate(small, tokens, use_cache=False)
    assert torch.equal(_generate(small, tokens), expected)
    assert torch.equal(_generate(small, tokens, cache_implementation="static"), expected)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_left_padding_equals_the_zeroed_dense_model_and_no_padding(both, cache):
    small, dense = both
    tokens = random_tokens(3, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[1, :1] = 0
    found = _generate(small, tokens, attention_mask=mask, cache_implementation=cache)
    expected = _generate(dense, tokens, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(found, expected)
    for row, start in enumerate((4, 1, 0)):
        alone = _generate(small, tokens[row : row + 1, start:])
        assert torch.equal(found[row : row + 1, start:], alone)


def test_sampling_follows_the_seed(both):
    small, dense = both
    drawn = []
    for model in (small, dense):
        torch.manual_seed(3)
        drawn.append(_generate(model, random_tokens(2, 7), do_sample=True, temperature=2.0))
    assert torch.equal(*drawn)


def _bytes(cache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_cache_bytes_are_exactly_the_kept_channels(model_type, kind):
    model = tiny_model(model_type, heads=6, kv_heads=2, hidden=36, layers=3)
    plan = random_plan(model, WIDTHS)
    sizes = []
    for each in (model, apply(model, plan)):
        if kind == "dynamic":
            cache = DynamicCache(config=each.config)
        else:
            cache = StaticCache(config=each.config, max_cache_len=20)
        each(random_tokens(2, 9), past_key_values=cache, use_cache=True)
        sizes.append(_bytes(cache))
    # 2 rows, 2 KV heads, 4 bytes; keys 2M and values C of a pruned layer, 16 each of a dense one.
    per_token = 2 * 2 * 4
    length = 9 if kind == "dynamic" else 20
    assert sizes[0] == per_token * length * 3 * 32
    assert sizes[1] == per_token * length * ((6 + 5) + 32 + (10 + 9))
    assert sizes[1] == plan.kept_fraction * sizes[0]
