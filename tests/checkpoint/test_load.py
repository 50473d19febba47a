"""Checkpoints that make no model: refused with the reason, whatever class a library raises."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import rap
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.checkpoint import load as loading
from rap.checkpoint.load import (
    is_offloaded,
    load,
    load_config,
    load_dense,
    load_tokenizer,
    without_tensors,
)
from rap.checkpoint.reading import reading
from rap.checkpoint.stored import StoredModel
from rap.model.errors import CheckpointError, PlanError
from rap.model.fingerprint import fingerprint_model
from rap.surgery.apply import apply


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model of two layers."""
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _set(checkpoint: Path, **fields: Any) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), encoding="utf-8")
    return checkpoint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "cannot read a model config from .*: ZeroDivisionError"),
        ({"hidden_size": "wide"}, "cannot read a model config from .* field 'hidden_size': .*str"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta 0 in the config .* correct it"),
        ({"max_position_embeddings": -1}, "max_position_embeddings -1 in the config"),
    ],
)
def test_a_senseless_config_is_refused(checkpoint, fields, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(_set(checkpoint, **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks 9 of the tensors .* \(model.layers.2"),
        ({"vocab_size": 10}, "their shapes are not those that its config.json describes"),
        ({"head_dim": -2}, "cannot load weights from"),
        ({"hidden_act": "none"}, "cannot load weights from .*: KeyError: 'none'"),
    ],
)
def test_weights_of_another_config_are_refused(checkpoint, fields, message):
    """transformers would fill what is missing with random numbers, and warn."""
    with pytest.raises(CheckpointError, match=message):
        load(_set(checkpoint, **fields))


def test_stored_weights_of_other_shapes_are_refused(checkpoint):
    StoredModel(checkpoint)
    with pytest.raises(CheckpointError, match=r"is stored as \[128, 32\], its config describes"):
        StoredModel(_set(checkpoint, vocab_size=10))


@pytest.mark.parametrize("read", [load, StoredModel])
def test_more_layers_than_tensors_are_refused_before_they_are_built(checkpoint, read):
    with pytest.raises(CheckpointError, match=r"asks for 1,000 layers, but .* has 21 tensors"):
        read(_set(checkpoint, num_hidden_layers=1000))


def test_a_tensor_that_is_gone_is_named(checkpoint):
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*layers.1.mlp.up_proj.weight"):
        load(checkpoint)


@pytest.mark.parametrize("content", ["null", "[]", "{", "[" * 100_000])
def test_a_generation_config_that_nothing_loads_is_refused(checkpoint, content):
    """Streamed surgery carries it along: what it writes has to load."""
    StoredModel(checkpoint)
    (checkpoint / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"cannot read .*generation_config.json.* or remove"):
        StoredModel(checkpoint)


@pytest.mark.parametrize("read", [load_dense, StoredModel])
def test_an_adapter_is_merged_before_anything_is_pruned(checkpoint, read):
    """Streamed, its config went along and its weights did not, so that nothing loaded."""
    read(checkpoint)
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config.json\): merge it into the weights"):
        read(checkpoint)


@pytest.mark.parametrize(
    "content", ["null", "{}", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {"a": 5}}']
)
def test_an_index_of_another_kind_is_refused(checkpoint, content):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index.json is damaged \(.*\): download it again"):
        StoredModel(checkpoint)


@pytest.mark.parametrize("content", ["null", "[]", "{}", "{"])
def test_a_tokenizer_of_another_kind_is_refused(checkpoint, content):
    (checkpoint / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot load a tokenizer from"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_weights_alone_have_no_tokenizer(family, tmp_path):
    """transformers makes one of special tokens for some families, and raises for others."""
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"tokenizer .* copy the tokenizer's files there"
    ) as e:
        load_tokenizer(tmp_path)
    assert "\n" not in str(e.value)


def test_a_config_that_makes_no_model_is_refused(checkpoint):
    config = load_config(checkpoint)
    assert without_tensors(config).device.type == "meta"
    config.num_key_value_heads = 0
    with pytest.raises(CheckpointError, match="cannot build the model that the config describes"):
        without_tensors(config)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("gone\nmore"), "cannot open x: gone: go away"),
        (ValueError("field 'a':\n  wrong\nmore"), "cannot open x: field 'a': wrong: go away"),
        (KeyError("a"), "cannot open x: KeyError: 'a': go away"),
        (TypeError(), "cannot open x: TypeError: go away"),
    ],
)
def test_any_error_of_a_library_becomes_one_line(error, said):
    with pytest.raises(CheckpointError) as caught, reading("open x", "go away"):
        raise error
    assert str(caught.value) == said
    assert caught.value.__cause__ is error


def test_errors_that_say_what_to_do_stay_what_they_are():
    with pytest.raises(PlanError, match=r"^as it is$"), reading("open x"):
        raise PlanError("as it is")
    with pytest.raises(KeyboardInterrupt), reading("open x"):
        raise KeyboardInterrupt


def test_soft_caps_are_obeyed_unless_something_else_is_asked_for(tmp_path):
    """SDPA leaves the cap of Gemma 2's scores out without a word."""
    model = tiny_model("gemma2", attn_logit_softcapping=2.0)
    apply(model, random_plan(model, [(3, 5), (2, 7)])).save_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "dense")
    model.set_attn_implementation("eager")
    ids = random_tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "dense")(ids).logits, model(ids).logits)
    assert load(tmp_path / "small").config._attn_implementation == "eager"
    # By transformers alone, too: "rap" obeys the cap.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert plain.config._attn_implementation == "rap"
    with torch.no_grad():
        expected = load(tmp_path / "small")(ids).logits
        torch.testing.assert_close(plain(ids).logits, expected, rtol=0, atol=1e-5)
    chosen = load(tmp_path / "small", attn_implementation="sdpa")
    assert chosen.config._attn_implementation == "sdpa"
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    assert load(tmp_path / "llama").config._attn_implementation == "sdpa"


def test_offloaded_weights_are_not_hashed(tmp_path):
    model = tiny_model("llama")
    apply(model, random_plan(model, [(3, 5), (2, 7)])).save_pretrained(tmp_path / "small")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    small = load(tmp_path / "small", device_map=places, offload_folder=tmp_path / "offloaded")
    assert is_offloaded(small)
    ids = random_tokens(1, 9)
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, load(tmp_path / "small")(ids).logits)


def test_the_bundled_model_is_loaded_by_its_name(reference_model):
    assert fingerprint_model(rap.load("bundled")) == fingerprint_model(reference_model)
    assert rap.load_tokenizer("bundled")("It was dark").input_ids


def test_what_lies_beside_the_weights_is_not_read(checkpoint):
    """Such as a pointer of git-lfs in the place of another form of the model."""
    (checkpoint / "consolidated.safetensors").write_text("version https://git-lfs")
    assert load(checkpoint).config.num_hidden_layers == 2


def test_quantized_weights_have_no_fingerprint(tmp_path, monkeypatch):
    model = tiny_model()
    apply(model, random_plan(model, ((4, 8), (3, 6)))).save_pretrained(tmp_path)
    whole = loading._load

    def quantized(*args: Any, **kwargs: Any) -> Any:
        found = whole(*args, **kwargs)
        found.is_quantized = True
        found.model.norm.weight.data += 1
        return found

    monkeypatch.setattr(loading, "_load", quantized)
    assert load(tmp_path).is_quantized
