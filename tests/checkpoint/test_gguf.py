"""GGUF files as sources: dequantized once, then a checkpoint like any other."""

import json

import pytest
import torch

from cases.command import run
from cases.gguf_file import tiny_llama, write_gguf
from rap.checkpoint.gguf import SOURCE_FILE, checkpoint_of
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.source import resolve_source
from rap.model.errors import CheckpointError


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))


def _same_logits(path, model, tolerance):
    ids = torch.arange(40)[None] * 7
    with torch.no_grad():
        found, expected = load(path, dtype=torch.float32)(ids).logits, model(ids).logits
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_float_file_gives_the_same_model(tmp_path):
    model = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", model)
    path = resolve_source(tmp_path / "tiny.gguf")
    assert _same_logits(path, model, 1e-5)  # float32 both; only the order of sums differs
    assert json.loads((tmp_path / path / SOURCE_FILE).read_text())["types"] == "21 F32"
    assert load_tokenizer(path)("It was dark").input_ids
    assert _same_logits(tmp_path / "tiny.gguf", model, 1e-5)  # what commands take, the API takes
    assert load_tokenizer(tmp_path / "tiny.gguf")("It was dark").input_ids


def test_quantized_file_is_dequantized_and_says_from_what(tmp_path):
    model, lines = tiny_llama(), []
    write_gguf(tmp_path / "tiny.gguf", model, "Q8_0")
    path = checkpoint_of(tmp_path / "tiny.gguf", lines.append)
    assert load(path).dtype == torch.bfloat16
    assert _same_logits(path, model, 0.05)  # 8-bit blocks, then bfloat16
    assert not _same_logits(path, model, 1e-5)
    assert "dequantized from 16 Q8_0, 5 F32 to bfloat16" in lines[0]


def test_second_use_converts_nothing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    first = checkpoint_of(tmp_path / "tiny.gguf")
    monkeypatch.setattr("rap.checkpoint.gguf.convert", None)
    assert checkpoint_of(tmp_path / "tiny.gguf") == first


def test_a_command_takes_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    result = run("inspect", tmp_path / "tiny.gguf", "--json")
    assert result.code == 0
    assert json.loads(result.out)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no file"), (b"not a model", "cannot read")]
)
def test_bad_files_end_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_source(tmp_path / "bad.gguf")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "home").rglob("config.json"))


def test_a_file_that_is_no_model_says_what_one_is(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"weights.bin is a file: a model is the directory"):
        resolve_source(tmp_path / "weights.bin")


def test_a_header_of_another_model_is_refused(tmp_path):
    """Without the width of its MLP transformers takes its own default, and another shape."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_llama())
    file.write_bytes(file.read_bytes().replace(b"feed_forward_length", b"feed_forward_lengti"))
    with pytest.raises(CheckpointError, match=r"read .*tiny.gguf: .*: its header and") as caught:
        resolve_source(file)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "home").rglob("config.json"))


def test_a_part_of_a_model_is_refused(tmp_path, monkeypatch):
    """transformers would fill in random numbers, and they would be kept."""
    model = tiny_llama()
    whole = model.state_dict()
    part = {name: x for name, x in whole.items() if ".layers.1." not in name}
    monkeypatch.setattr(model, "state_dict", lambda: part)
    write_gguf(tmp_path / "part.gguf", model)
    with pytest.raises(CheckpointError, match=r"lacks 9 of the tensors of its model .*join"):
        checkpoint_of(tmp_path / "part.gguf")
    assert not list((tmp_path / "home").glob("gguf/*"))


def test_a_linear_scaling_in_the_header_is_read(tmp_path):
    """transformers reads past it, and turns every pair four times too far."""
    model = tiny_llama()
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    scaled = type(model)(model.config).eval()
    scaled.load_state_dict(model.state_dict())
    write_gguf(tmp_path / "linear.gguf", model, scaling=("linear", 4.0))
    _same_logits(tmp_path / "linear.gguf", scaled, 1e-5)
    # With factors as well, llama.cpp divides by both.
    write_gguf(
        tmp_path / "both.gguf",
        model,
        scaling=("linear", 2.0),
        factors={"rope_freqs.weight": [2.0] * 8},
    )
    _same_logits(tmp_path / "both.gguf", scaled, 1e-5)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"scaling": ("yarn", 4.0)}, "yarn"),
        ({"factors": {"rope_factors_long.weight": [2.0] * 8}}, "rope_factors_long.weight"),
    ],
)
def test_a_scaling_that_is_not_read_is_refused(tmp_path, more, named):
    write_gguf(tmp_path / "scaled.gguf", tiny_llama(), **more)
    with pytest.raises(CheckpointError, match=f"scales its frequencies by {named}.* start from"):
        checkpoint_of(tmp_path / "scaled.gguf")
    assert not list((tmp_path / "home").glob("gguf/*"))
