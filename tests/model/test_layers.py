"""Which models are taken, and that every other is refused with the reason before any work."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cases.models import tiny_model
from cases.plans import random_plan
from rap.checkpoint.load import load_dense
from rap.methods.dense import dense_layers, key_mixing_limit, value_mixing_limit
from rap.model.errors import CheckpointError, UnsupportedModelError
from rap.model.layers import (
    attention_layers,
    attention_spec,
    base_model_type,
    projection_tensors,
    rotary_module,
    sliding_window,
)
from rap.model.rope import AttentionShape, HeadGeometry
from rap.surgery.apply import apply

REFUSED = {
    "gpt2": "learned absolute positions",
    "opt": "learned absolute positions",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "deepseek_v3": "one latent for all heads",
    "paligemma": "multimodal model around gemma",
    "t5": "encoder-decoder",
    "rwkv": "its config has no rope_parameters",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_unsupported_model_is_refused_with_the_reason(model_type):
    with pytest.raises(UnsupportedModelError) as caught:
        attention_spec(AutoConfig.for_model(model_type))
    message = str(caught.value)
    assert REFUSED[model_type] in message
    assert repr(model_type) in message
    assert "\n" not in message


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "deepseek_v3", "paligemma", "t5"])
def test_refusal_comes_before_any_weight_is_read(tmp_path, model_type):
    """The directory has no weights: reading them would be another error."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=REFUSED[model_type]):
        load_dense(tmp_path)


def test_quantized_checkpoint_is_refused_before_any_weight_is_read(tmp_path):
    config = AutoConfig.for_model("llama").to_dict()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is quantized: compress the unquantized weights"):
        load_dense(tmp_path)


def test_a_pruned_checkpoint_may_be_quantized(tmp_path):
    """Its classes are built from a config that says so: a loader quantizes what it reads then."""
    model = tiny_model()
    small = apply(model, random_plan(model, [(3, 5), (2, 7)]))
    config = copy.deepcopy(small.config)
    config.quantization_config = {"quant_method": "torchao", "quant_type": "int8_weight_only"}
    again = type(small)(config)
    assert again.state_dict().keys() == small.state_dict().keys()
    assert attention_spec(config) is attention_spec(model.config)


def test_pruned_model_is_refused_in_memory_and_on_disk(tmp_path):
    model = tiny_model()
    plan = random_plan(model, [(3, 5), (2, 7)])
    small = apply(model, plan)
    with pytest.raises(CheckpointError, match="already pruned"):
        apply(small, plan)
    small.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="already pruned"):
        load_dense(tmp_path)


def test_decoder_without_rotary_embedding_is_refused():
    model = tiny_model()
    del model.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match="no rotary_emb"):
        rotary_module(model)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_described_from_the_live_model(model_type, device):
    config = tiny_model(model_type, heads=6, kv_heads=2, hidden=36, layers=3).config
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    layers = attention_layers(model)
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert all(layer.shape == AttentionShape(6, 2, 36, HeadGeometry(16, 16)) for layer in layers)
    assert all(model.get_submodule(layer.path) is layer.module for layer in layers)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_projection_tensors_are_names_of_the_checkpoint(model_type):
    model = tiny_model(model_type)
    names = projection_tensors(attention_layers(model), attention_spec(model.config))
    assert set(names) == {name for name in model.state_dict() if "_proj" in name and "attn" in name}
    for name, (layer, projection) in names.items():
        assert f"layers.{layer.index}.self_attn.{projection}_proj" in name


def test_pruned_layers_keep_the_dense_description():
    model = tiny_model(layers=3)
    small = apply(model, random_plan(model, [(3, 5), None, (2, 7)]))
    described = [layer.shape for layer in attention_layers(small)]
    assert described == [layer.shape for layer in attention_layers(model)]
    assert base_model_type(small.config) == "llama"


def test_sliding_window_is_the_one_the_dense_module_uses():
    mistral = tiny_model("mistral", sliding_window=7)
    qwen2 = tiny_model("qwen2", sliding_window=5, use_sliding_window=True, max_window_layers=1)
    windows = [
        [
            sliding_window(attention_spec(model.config), layer.module)
            for layer in attention_layers(model)
        ]
        for model in (mistral, qwen2, tiny_model())
    ]
    assert windows == [[7, 7], [None, 5], [None, None]]


def test_what_is_clamped_channel_by_channel_is_not_mixed():
    clipped, free = (tiny_model("olmo", clip_qkv=bound) for bound in (1.0, None))
    for model, expected in ((clipped, "clip_qkv clamps single channels"), (free, "")):
        assert key_mixing_limit(attention_layers(model)[0], model.config) == expected
        assert value_mixing_limit(model.config) == expected
        for layer in dense_layers(model).layers:
            assert layer.mixes_keys == layer.mixes_values == (not expected)
