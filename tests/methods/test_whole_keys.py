"""Baselines whose keys are whole where the family normalizes and rotates them: QK-norm families."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import rap
from cases.family_cases import CASES
from cases.models import random_tokens
from rap.calibration.run import calibrate
from rap.methods import parse_method
from rap.model.layers import attention_layers, rotary_factor, rotary_module
from rap.recovery.layer_fit import FitConfig

# Norms of heads, of all heads at once, LayerNorms of interleaved heads, a module for every head,
# norms behind the rotation (of some layers alone), and frequencies by layer type.
NAMES = ["qwen3", "olmo2", "cohere:norm", "stablelm:norm", "hunyuan_v1_dense", "llama4_text"]
NAMES += ["gemma3_text"]
METHODS = ["palu", "palu:group_size=1", "svdllm", "starkv", "matryoshka"]


def family(name: str) -> Any:
    """A tiny model of a family whose norms weigh every channel by itself."""
    model = next(case for case in CASES if case.name == name).model(dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    for layer in attention_layers(model):
        for name in layer.norm.names if layer.norm else ():
            for weight in getattr(layer.module, name).parameters():
                weight.data = 0.5 + torch.rand(weight.shape, generator=generator)
    return model


def pruned(model: Any, method: str, retain: float) -> Any:
    """The model that a method makes of it."""
    asked = parse_method(method, retain)
    statistics = calibrate(model, random_tokens(4, 16), asked.needs_for(model))
    return asked.apply(model, asked.plan(model, statistics))


@torch.no_grad()
def in_two_steps(model: Any, tokens: Tensor) -> Tensor:
    """Logits of the tokens from the fifth on, behind a cache of the first five."""
    cache = model(tokens[:, :5], use_cache=True).past_key_values
    logits: Tensor = model(tokens[:, 5:], past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_all_of_the_cache_is_the_dense_model(name: str, method: str) -> None:
    model = family(name)
    small = pruned(model, method, 1.0)
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(small(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_two_steps(small, tokens), expected[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "hunyuan_v1_dense", "gemma3_text"])
def test_kept_heads_have_the_norms_of_the_dense_model(name: str) -> None:
    """What the others add is taken from the dense model, by zeros in their columns of W_o."""
    model = family(name)
    asked = parse_method("heads", 0.5)
    plan = asked.plan(model, calibrate(model, random_tokens(4, 16), asked.needs_for(model)))
    small = asked.apply(model, plan)
    for layer, planned in zip(attention_layers(model), plan.layers, strict=True):
        assert layer.shape is not None
        gone = [x for x in range(layer.shape.num_kv_heads) if x not in planned.kept_heads]
        columns = layer.module.o_proj.weight.data.unflatten(1, (layer.shape.num_kv_heads, -1))
        columns[:, gone] = 0
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(small(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["palu", "matryoshka"])
@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "gemma3_text"])
def test_half_of_the_cache_decodes_as_it_reads(name: str, method: str) -> None:
    """And as its checkpoint does, which has the dense model's norms."""
    small = pruned(family(name), method, 0.5)
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        expected = small(tokens).logits
    torch.testing.assert_close(in_two_steps(small, tokens), expected[:, 5:], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_has_the_norms_of_the_dense_model(tmp_path: Any) -> None:
    model = family("qwen3")
    small = pruned(model, "palu", 0.5)
    small.save_pretrained(tmp_path)
    again = rap.load(str(tmp_path), dtype="float32")
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, small(tokens).logits)
    dense, kept = (x.model.layers[1].self_attn.k_norm.weight for x in (model, again))
    assert torch.equal(dense, kept)


@pytest.mark.parametrize("name", ["qwen3", "cohere:norm", "stablelm:norm", "hunyuan_v1_dense"])
def test_covariances_are_of_the_keys_that_the_dense_model_caches(name: str) -> None:
    model, windows = family(name), random_tokens(3, 16)
    statistics = calibrate(model, windows, {"rotated"})
    cache = DynamicCache()  # without a config: of every token, also where a window drops them
    with torch.no_grad():
        model(windows, past_key_values=cache)
    for layer, found in zip(attention_layers(model), statistics.layers, strict=True):
        if layer.shape is None:
            continue
        keys_BGTD = cache.layers[layer.index].keys[..., layer.shape.geometry.canonical_order()]
        keys_GND = keys_BGTD.transpose(0, 1).flatten(1, 2)
        centred = keys_GND - keys_GND.mean(1, keepdim=True)
        expected = centred.mT @ centred / keys_GND.shape[1]
        scale = float(expected.abs().max())
        torch.testing.assert_close(found["rotated_key_moment"], expected, rtol=0, atol=1e-4 * scale)


def test_a_fit_brings_reconstructed_keys_nearer() -> None:
    """Behind their norm, at the frequencies of the layer's type."""
    model, windows = family("gemma3_text"), random_tokens(8, 32)
    small = pruned(model, "palu", 0.5)

    def divergence(other: Any) -> float:
        with torch.no_grad():
            dense, own = model(windows).logits, other(windows).logits
        return float((dense.softmax(-1) * (dense.log_softmax(-1) - own.log_softmax(-1))).sum())

    fitted = rap.recover(small, model, windows, FitConfig(steps=20))
    assert divergence(fitted) < 0.8 * divergence(small)


def test_a_layer_type_has_its_own_rotary_factor() -> None:
    """YaRN of the layers with full attention, none of those with a window."""
    model = family("gemma3_text")
    rotary = rotary_module(model)
    rotary.full_attention_attention_scaling = 1.25
    layers = attention_layers(model)
    assert [rotary_factor(rotary, layer.module) for layer in layers] == [1.0, 1.25, 1.0]
