"""Measured cost against its formula, and against the paper's tables at 8B shapes on meta."""

import functools
import json
from dataclasses import asdict

import pytest
import torch

from cases.family_cases import CASES, random_case_plan
from cases.footprint_formula import LayerWidths, formula, layer_widths
from cases.models import random_tokens, tiny_model
from rap.evaluation.cost.footprint import (
    Footprint,
    footprint,
)
from rap.model.errors import UnsupportedModelError
from rap.model.layers import attention_layers
from rap.model.modeling import config_class, model_class
from rap.surgery.apply import apply

KIB = 1024
BIASES = {"llama": "", "mistral": "", "qwen2": "qkv"}
LARGE = {
    "llama": {"vocab_size": 128256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "mistral": {"vocab_size": 32000},
}
DENSE_TOTAL = {"llama": 8_030_261_248, "mistral": 7_241_732_096}  # as published
# Table `effsweep`, column RAP: retain and attention parameters and FLOPs over dense.
EFFSWEEP = {0.9: 0.906, 0.8: 0.797, 0.7: 0.703, 0.6: 0.594, 0.5: 0.500}


def prune(model_type, fields, widths, dtype, device="cpu"):
    """A pruned model of random weights; a width is kept (pairs, values), None leaves it dense."""
    entries = [{"pairs": w[0], "free": 0, "values": w[1]} if w else None for w in widths]
    config = config_class(model_type)(**fields, rap={"version": 1, "layers": entries})
    with torch.device(device):
        return model_class(model_type)(config).to(dtype)


@functools.cache
def large_model(model_type, pairs):
    """Llama-3-8B or Mistral-7B shapes on meta in float16; `pairs` kept per layer, () for dense."""
    fields = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
        **LARGE[model_type],
    }
    if pairs:
        return prune(model_type, fields, [(m, 2 * m) for m in pairs], torch.float16, "meta")
    config = config_class(model_type).__base__(**fields)
    with torch.device("meta"):
        return model_class(model_type).__bases__[1](config).to(torch.float16)


@functools.cache
def large_footprint(model_type, pairs=()):
    return footprint(large_model(model_type, pairs))


TINY = {"layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 16, "hidden": 24}
WIDTHS = {
    "dense": None,
    "pruned": [(5, 10), (2, 4), (8, 16)],
    "uneven": [(5, 3), None, (1, 16)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("model_type", BIASES)
def test_measured_equals_formula(model_type, widths, dtype):
    model = tiny_model(model_type, dtype=dtype, **TINY)
    if WIDTHS[widths]:
        fields = {k: v for k, v in model.config.to_dict().items() if k != "model_type"}
        model = prune(model_type, fields, WIDTHS[widths], dtype)
    assert footprint(model) == formula(model.config, dtype, BIASES[model_type])


def test_tied_weights_and_output_biases_count_once():
    model = tiny_model(tie_word_embeddings=True, attention_bias=True)
    assert footprint(model) == formula(model.config, torch.float32, "qkvo")


def test_widths_of_a_config_count_channels_that_never_rotate():
    config = tiny_model("glm", layers=2).config
    config.rap = {"layers": [{"pairs": 3, "free": 4, "values": 5}, None]}
    assert layer_widths(config) == [
        LayerWidths(4, 2, 32, key_width=10, value_width=5),
        LayerWidths(4, 2, 32, key_width=16, value_width=16),
    ]


def test_a_tiny_model_by_hand():
    # H 4, G 2, D 16, E 32, MLP 64, 2 layers, vocabulary 128, float32
    assert footprint(tiny_model()) == Footprint(
        kv_bytes_per_token=2 * (2 * 16 * 2 * 4),
        kv_dtype="float32",
        attention_parameters=2 * (32 * 64 + 32 * 32 + 32 * 32 + 64 * 32),
        attention_biases=0,
        kv_parameters=2 * (32 * 32 + 32 * 32),
        projection_flops=2 * 2 * (32 * 64 + 32 * 32 + 32 * 32 + 64 * 32),
        kv_projection_flops=2 * 2 * (32 * 32 + 32 * 32),
        mixing_flops=2 * 4 * (2 * 16 + 2 * 16),
        total_parameters=2 * (6144 + 3 * 32 * 64 + 2 * 32) + 2 * 128 * 32 + 32,
    )


@pytest.mark.parametrize("sliding_window", [None, 8])
def test_bytes_are_those_a_generation_leaves_in_the_cache(sliding_window):
    model = tiny_model("mistral", sliding_window=sliding_window)
    with torch.no_grad():
        cache = model(input_ids=random_tokens(3, 7), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 3 * 7 * footprint(model).kv_bytes_per_token


def test_decode_flops_at_a_context_are_projections_plus_mixing():
    found = footprint(tiny_model())
    step = found.attention_flops(100)
    assert step == found.projection_flops + 100 * found.mixing_flops


def test_costs_of_a_model_whose_layers_all_have_a_window_end_there():
    window = footprint(tiny_model("mistral", sliding_window=8))
    full = footprint(tiny_model("mistral", sliding_window=None))
    assert (window.whole_window, full.whole_window) == (8, None)
    assert window.kv_bytes(100) == window.kv_bytes(8) == full.kv_bytes(8)
    assert window.attention_flops(100) == full.attention_flops(8) < full.attention_flops(9)
    mixed = tiny_model("gemma3_text", layer_types=["sliding_attention", "full_attention"])
    assert footprint(mixed).whole_window is None


def test_the_model_is_left_as_it_was():
    model = tiny_model(attn_implementation="sdpa").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    footprint(model)
    assert model.config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == modes
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_gradient_checkpointing_does_not_hide_the_cache():
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    assert footprint(model) == footprint(tiny_model())


def over_dense(dense: Footprint, small: Footprint) -> dict[str, float]:
    """Each figure of the small model over that of the dense one."""
    figures = ((name, getattr(small, name), whole) for name, whole in asdict(dense).items())
    return {name: part / whole for name, part, whole in figures if name != "kv_dtype" and whole}


def test_comparison_and_json():
    dense, small = tiny_model("qwen2"), None
    fields = {k: v for k, v in dense.config.to_dict().items() if k != "model_type"}
    small = prune("qwen2", fields, [(4, 8), (4, 8)], torch.float32)
    ratios = over_dense(footprint(dense), footprint(small))
    assert ratios.pop("total_parameters") > 0.5
    assert set(ratios.values()) == {0.5}
    assert json.loads(json.dumps(asdict(footprint(small)))) == asdict(footprint(small))


def test_an_unknown_family_is_refused():
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        footprint(tiny_model("gpt2"))


@pytest.mark.parametrize("model_type", LARGE)
def test_dense_8b_shapes(model_type):
    dense = large_footprint(model_type)
    assert dense == formula(large_model(model_type, ()).config, torch.float16)
    assert dense.total_parameters == DENSE_TOTAL[model_type]
    assert dense.kv_bytes_per_token == 128 * KIB  # table `serving`
    # Appendix `cost_model`: W_q and W_o 16.78M each, W_k and W_v 4.19M each, a layer.
    assert dense.attention_parameters == 32 * 2 * (4096 * 4096 + 4096 * 1024)


@pytest.mark.parametrize("model_type", LARGE)
@pytest.mark.parametrize("retain", EFFSWEEP)
def test_table_effsweep_column_rap(model_type, retain):
    pairs = (round(retain * 64),) * 32
    small = large_footprint(model_type, pairs)
    assert small == formula(large_model(model_type, pairs).config, torch.float16)
    ratios = over_dense(large_footprint(model_type), small)
    for name in ("attention_parameters", "projection_flops", "mixing_flops", "kv_bytes_per_token"):
        assert ratios[name] == pairs[0] / 64
        assert round(ratios[name], 3) == EFFSWEEP[retain]


@pytest.mark.parametrize("retain", [1.0, *EFFSWEEP])
def test_table_rap_complexity(retain):
    # Per KV head of D = 128 channels and layer, input dimension H D: cache 2 S D elements,
    # parameters 2 H D^2, FLOPs of projecting S tokens 4 S H D^2, each times rho = m / P.
    heads, head_dim, layer_heads, tokens = 32, 128, 32 * 8, 1
    pairs = round(retain * 64)
    kept = large_footprint("llama", (pairs,) * 32 if retain < 1 else ())
    rho = pairs / 64
    assert kept.kv_bytes_per_token / 2 == layer_heads * rho * 2 * tokens * head_dim
    assert kept.kv_parameters == layer_heads * rho * 2 * heads * head_dim**2
    assert kept.kv_projection_flops == layer_heads * rho * 4 * tokens * heads * head_dim**2


@pytest.mark.parametrize(
    ("pairs", "kib"),
    [
        ((45,) * 32, 90.0),  # every layer rounds 44.8 up
        ((45,) * 24 + (44,) * 8, 89.5),  # table `serving`: 1432 of the 1433.6 pairs rho allows
    ],
)
def test_table_serving_bytes_per_token_at_70_percent(pairs, kib):
    assert large_footprint("llama", pairs).kv_bytes_per_token == kib * KIB


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "qwen3_next", "afmoe", "llama4", "gemma3"])
def test_shared_and_gated_projections_are_counted_once(name: str):
    """Two FLOPs a weight and token in every family, and 2 H (W + C) of mixing per position."""
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    for each in (model, apply(model, random_case_plan(model, case))):
        found = footprint(each)
        layers = [layer for layer in attention_layers(each) if layer.shape is not None]
        widths = [
            getattr(layer.module, "key_width", 16) + getattr(layer.module, "value_width", 16)
            for layer in layers
        ]
        linears = [
            module.weight.numel()
            for layer in layers
            for module in layer.module.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        biases = [
            module.bias.numel()
            for layer in layers
            for module in layer.module.modules()
            if isinstance(module, torch.nn.Linear) and module.bias is not None
        ]
        assert found.attention_biases == sum(biases)
        assert found.attention_parameters == sum(linears)
        assert found.projection_flops == 2 * sum(linears)
        mixing = found.mixing_flops + found.windowed_mixing_flops
        assert mixing == sum(2 * 6 * width for width in widths)
