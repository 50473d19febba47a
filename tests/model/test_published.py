"""`rap inspect` of published models, on the meta device: the paper's table `hybrid_rope`."""

import pytest
from transformers import AutoConfig

from cases.command import run
from cases.published import PUBLISHED
from rap.cli.inspect import describe_config

# Attention layers with RoPE of all layers with attention; rotated channels of a head; KV bytes per
# token in bfloat16: layers x KV heads x (K + V channels) x 2 bytes, dense, of all layers as the
# paper counts.
EXPECTED = {
    "Llama-3-8B": ((32, 32), "128/128", 131072),
    "Llama-3.2-3B": ((28, 28), "128/128", 114688),
    "Llama-2-7B": ((32, 32), "128/128", 524288),
    "Mistral-7B-v0.3": ((32, 32), "128/128", 131072),
    "Qwen2.5-14B": ((48, 48), "128/128", 196608),
    "GLM-4.7": ((92, 92), "64/128", 376832),
    "Qwen3-Next": ((12, 12), "64/256", 24576),
    "GPT-OSS": ((24, 24), "64/64", 49152),
    "Mistral-Small-3.2": ((40, 40), "128/128", 163840),
    "Llama-4-Scout": ((36, 48), "128/128", 196608),
    "Gemma-3": ((62, 62), "128/128", 507904),
}
# What is left of them beyond the window, or chunk, of most layers.
GROWING = {"GPT-OSS": 24576, "Llama-4-Scout": 49152, "Gemma-3": 81920}


@pytest.mark.parametrize("name", PUBLISHED)
def test_inspect_reproduces_the_table(name):
    model_type, fields = PUBLISHED[name]
    report = describe_config(AutoConfig.for_model(model_type, **fields), name, retain=0.7)
    layers, rotated, dense_bytes = EXPECTED[name]
    assert (report["rope_layers"], report["attention_layers"]) == layers
    assert report["rotated_dims_per_head"] == rotated
    assert sum(layer["kv_bytes_per_token"] for layer in report["layers"]) == dense_bytes
    growing = GROWING.get(name, dense_bytes)
    assert report["kv_bytes_per_token"] == growing
    assert bool(report["windowed_layers"]) is (name in GROWING)
    # The multiple of eight channels nearest to 0.7: 88 of 128, 176 of 256, or of two heads of 64.
    assert report["kv_bytes_per_token_at_retain"] == 88 / 128 * growing


def test_the_command_prints_it_from_a_config_alone(tmp_path):
    model_type, fields = PUBLISHED["Llama-4-Scout"]
    AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    result = run("inspect", tmp_path, "--retain", "0.7", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert report["rope_layers"] == 36
    assert report["kv_bytes_per_token_at_retain"] == 33792
    assert [layer["rotates"] for layer in report["layers"][:4]] == [
        *["128 (interleaved)"] * 3,
        "0 (interleaved)",
    ]
    assert {layer["qk_norm"] for layer in report["layers"]} == {"over head", "-"}


def test_what_cannot_be_mixed_is_said_with_the_reason(tmp_path):
    model_type, fields = PUBLISHED["Qwen3-Next"]
    AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    result = run("inspect", tmp_path)
    where = "layers 3 7 11 15 19 23 27 31 35 39 43 47: "
    assert where + "keys keep plain pairs and channels: QK-norm weighs single" in result.out
    assert where + "values keep plain channels: a gate multiplies single channels" in result.out
    model_type, fields = PUBLISHED["Llama-4-Scout"]
    layers = describe_config(AutoConfig.for_model(model_type, **fields), "scout")["layers"]
    # Layers without positions have no norm, and nothing of this model is gated.
    assert [bool(layer["key_limit"]) for layer in layers[:4]] == [True, True, True, False]
    assert not any(layer["value_limit"] for layer in layers)


@pytest.mark.parametrize(
    ("name", "merging"),
    [
        ("Llama-3-8B", "8 KV heads become 4 at retain 0.7"),
        ("GLM-4.7", "8 KV heads become 4 at retain 0.7"),
        ("Llama-2-7B", "32 KV heads become 16 at retain 0.7"),
    ],
)
def test_how_many_heads_the_default_merges_is_said(name, merging):
    """GLM-4.7 normalises queries and keys: merged behind the norm, its keys are no plain pairs."""
    model_type, fields = PUBLISHED[name]
    layers = describe_config(AutoConfig.for_model(model_type, **fields), name)["layers"]
    assert {layer["merging"] for layer in layers} == {merging}
    assert not any(layer["key_limit"] for layer in layers)


def test_what_forbids_merging_is_said():
    clipped = AutoConfig.for_model("olmo", num_key_value_heads=8, clip_qkv=8.0)
    layers = describe_config(clipped, "olmo")["layers"]
    said = "heads are not merged: clip_qkv clamps single channels"
    assert {layer["merging"] for layer in layers} == {said}


def test_a_single_head_is_said_to_leave_nothing_to_merge(tmp_path):
    model_type, fields = PUBLISHED["Llama-3-8B"]
    config = AutoConfig.for_model(model_type, **fields | {"num_key_value_heads": 1})
    config.save_pretrained(tmp_path)
    said = "layers 0-31: heads are not merged: one KV head leaves nothing to merge"
    assert said in run("inspect", tmp_path).out
