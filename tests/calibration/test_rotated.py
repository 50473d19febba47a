"""Statistics of rotated keys are those of what a model caches, whatever its rotation."""

import pytest
import torch
from transformers import DynamicCache

import rap
from cases.family_cases import CASES, Case
from cases.models import random_tokens
from rap.model.layers import attention_layers

# Keys of pairs in halves and interleaved, of parts of heads, normalised before and after rotation,
# turned clockwise, and longer by YaRN's factor.
NAMES = ("llama", "cohere", "phi", "gpt_neox", "qwen3", "hunyuan_v1_dense", "nanochat", "glm4")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "partial_rotary_factor": 0.5}
YARN |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("case", [x for x in CASES if x.name in NAMES], ids=lambda x: x.name)
@torch.no_grad()
def test_covariances_are_those_of_cached_keys(case: Case, rope: dict | None) -> None:
    if rope is not None and case.name not in ("phi", "gpt_neox", "glm4"):
        pytest.skip("a part of its heads cannot rotate")
    fields = {"rope_parameters": rope, "max_position_embeddings": 512} if rope else {}
    model, ids = case.model(dtype=torch.float32, **fields), random_tokens(3, 40)
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    statistics = rap.calibrate(model, ids, {"rotated"})
    for layer in attention_layers(model):
        order = layer.shape.geometry.canonical_order()
        keys_GND = cache.layers[layer.index].keys.transpose(0, 1).flatten(1, 2)[..., order]
        keys_GND = keys_GND - keys_GND.mean(1, keepdim=True)
        expected = keys_GND.mT @ keys_GND / keys_GND.shape[1]
        found = statistics.layers[layer.index]["rotated_key_moment"]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))
