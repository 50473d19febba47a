"""GGUF files as sources: dequantized once, then a checkpoint like any other."""

import dataclasses
import json

import pytest
import torch
from tokenizers import Tokenizer

from cases.command import run
from cases.gguf_file import STORED, stored_model, tiny_llama, write_gguf, write_header
from rap.checkpoint.gguf import SOURCE_FILE, checkpoint_of
from rap.checkpoint.gguf_header import ARCHITECTURES
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.source import resolve_source
from rap.model.errors import CheckpointError

# Their linear layers sum in another order; 1 + a log and an exponential are rounded once more.
_ROUNDING = {"qwen35": 1e-4, "qwen35moe": 1e-4}


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))


def _same_logits(path, model, tolerance):
    ids = torch.arange(40)[None] * 7
    written = load(path, dtype=torch.float32)
    for one in (written, model):
        one.set_attn_implementation("eager")  # the only one that caps scores
    with torch.no_grad():
        found, expected = written(ids).logits, model(ids).logits
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


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    path = tmp_path / "tiny.gguf"
    for seed in (0, 1):
        model = tiny_llama(seed=seed)
        write_gguf(path, model)
        assert _same_logits(path, model, 1e-5)


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
    with pytest.raises(CheckpointError, match=r"weights.bin is a file; give its directory"):
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
    plain = stored_model(STORED["llama"])
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    scaled = stored_model(STORED["llama"], rope_parameters=rope)
    linear = {"rope.scaling.type": "linear"}
    write_gguf(tmp_path / "linear.gguf", plain, header=linear | {"rope.scaling.factor": 4.0})
    assert _same_logits(tmp_path / "linear.gguf", scaled, 1e-5)
    # With factors as well, llama.cpp divides by both.
    write_gguf(
        tmp_path / "both.gguf",
        plain,
        header=linear | {"rope.scaling.factor": 2.0},
        tensors={"rope_freqs.weight": [2.0] * 8},
    )
    assert _same_logits(tmp_path / "both.gguf", scaled, 1e-5)
    assert not _same_logits(tmp_path / "both.gguf", plain, 1e-2)


@pytest.mark.parametrize("name", STORED)
def test_every_architecture_gives_the_model_it_was_written_from(tmp_path, name):
    """Its config reaches what transformers takes from defaults; norms and biases are no ones."""
    stored = STORED[name]
    model = stored_model(stored)
    write_gguf(tmp_path / "tiny.gguf", model, stored=stored)
    assert _same_logits(tmp_path / "tiny.gguf", model, _ROUNDING.get(name, 1e-6))


def test_experts_whose_gate_is_one_row_or_none(tmp_path):
    """Files straight from the converter have one row for the shared expert's gate, others none."""

    def flat(name, data, config):
        for changed, array in STORED["qwen2moe"].change(name, data, config):
            yield changed, array[0] if changed.endswith("shared_expert_gate.weight") else array

    stored = dataclasses.replace(STORED["qwen2moe"], change=flat)
    model = stored_model(stored)
    write_gguf(tmp_path / "tiny.gguf", model, stored=stored)
    assert _same_logits(tmp_path / "tiny.gguf", model, 1e-6)


def _gemma(**fields):
    """Gemma 3 with seven layers, the sixth of full attention unless stated."""
    return stored_model(STORED["gemma3"], **fields)


def _bases(local=1e4, scaling=None):
    whole = {"rope_type": "default", "rope_theta": 1e6} | (scaling or {})
    window = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": window}}


_SLIDING, _FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("fields", "header"),
    [
        (_bases(local=500.0), {"rope.freq_base_swa": 500.0}),
        (
            _bases(scaling={"rope_type": "linear", "factor": 8.0}),
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        ),
        (
            {"layer_types": [_SLIDING, _FULL] * 3 + [_SLIDING]},
            {"attention.sliding_window_pattern": 2},
        ),
        (
            {"layer_types": [_FULL, *[_SLIDING] * 6]},
            {"attention.sliding_window_pattern": [False, *[True] * 6]},
        ),
        ({"layer_types": [_FULL] * 7}, {"attention.sliding_window": None}),
        ({"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    ],
    ids=["local base", "linear scaling", "period", "listed layers", "no window", "soft cap"],
)
def test_what_gemma_3_states_of_layers_that_differ(tmp_path, fields, header):
    model = _gemma(**fields)
    write_gguf(tmp_path / "tiny.gguf", model, stored=STORED["gemma3"], header=header)
    assert _same_logits(tmp_path / "tiny.gguf", model, 1e-6)
    assert not _same_logits(tmp_path / "tiny.gguf", _gemma(), 1e-3)


@pytest.mark.parametrize(("name", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_queries_by_its_hidden_size(tmp_path, monkeypatch, name, largest):
    """The scale is in no file; llama.cpp knows the 27B models by their number of layers."""
    row = ARCHITECTURES[name]
    assert row.largest == largest
    model = stored_model(STORED[name], query_pre_attn_scalar=8)
    layers = model.config.num_hidden_layers
    monkeypatch.setitem(ARCHITECTURES, name, dataclasses.replace(row, largest=layers))
    write_gguf(tmp_path / "tiny.gguf", model, stored=STORED[name])
    assert _same_logits(tmp_path / "tiny.gguf", model, 1e-6)


def test_a_tokenizer_begins_as_its_header_states(tmp_path):
    """transformers' own never adds BOS, and a Gemma without it is lost."""
    for adds, expected in ((True, [0]), (False, []), (None, [])):
        header = {} if adds is None else {"tokenizer.ggml.add_bos_token": adds}
        write_gguf(tmp_path / f"{adds}.gguf", tiny_llama(), header=header)
        tokenizer = load_tokenizer(resolve_source(tmp_path / f"{adds}.gguf"))
        plain = tokenizer("dark", add_special_tokens=False).input_ids
        assert tokenizer("dark").input_ids == expected + plain


def test_a_tokenizer_that_splits_the_words_of_its_vocabulary_is_refused(tmp_path, monkeypatch):
    def without_merges(tokenizer, header):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["model"]["merges"] = []
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
        return tokenizer

    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    with monkeypatch.context() as patched:
        patched.setattr("rap.checkpoint.gguf.begun", without_merges)
        with pytest.raises(CheckpointError, match=r"splits 187 of 187 words.*transformers>=5\.18"):
            checkpoint_of(tmp_path / "tiny.gguf")
    assert not list((tmp_path / "home" / "gguf").glob("*"))  # nothing is left that would be reused
    checkpoint_of(tmp_path / "tiny.gguf")


def test_a_checkpoint_of_an_earlier_reading_is_made_again(tmp_path):
    """Models that were read wrongly were kept, by a digest that has not changed."""
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    folder = checkpoint_of(tmp_path / "tiny.gguf")
    record = json.loads((folder / SOURCE_FILE).read_text())
    del record["reading"]
    (folder / SOURCE_FILE).write_text(json.dumps(record))
    (folder / "model.safetensors").unlink()
    lines = []
    assert checkpoint_of(tmp_path / "tiny.gguf", lines.append) == folder
    assert _same_logits(folder, tiny_llama(), 1e-5)
    assert "dequantized from" in lines[0]


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("llama", {"header": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}}, "yarn"),
        ("llama", {"tensors": {"rope_factors_long.weight": [2.0] * 8}}, "rope_factors_long.weight"),
        ("llama", {"header": {"rope.dimension_count": 8}}, "rotates 8 of 16 channels"),
        ("llama", {"header": {"expert_count": 4}}, "Mixtral's experts"),
        (
            "llama",
            {"header": {"attention.head_count_kv": None}},
            "lacks llama.attention.head_count",
        ),
        ("llama", {"tensors": {"cls.weight": [1.0] * 8}}, "does not read cls.weight"),
        (
            "qwen2",
            {"tensors": {"blk.0.attn_q_norm.weight": [1.0] * 16}},
            "blk.0.attn_q_norm.weight",
        ),
        ("gemma3", {"tensors": {"rope_freqs.weight": [2.0] * 8}}, "layers that differ"),
    ],
)
def test_what_is_not_read_is_rejected_with_the_reason(tmp_path, name, more, reason):
    stored = STORED[name]
    write_gguf(tmp_path / "tiny.gguf", stored_model(stored), stored=stored, **more)
    _rejected(tmp_path / "tiny.gguf", reason)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gpt-oss", "experts and attention sinks"),
        ("gemma4", "layer scales"),
        ("gemma", "gemma, is not read from GGUF"),  # its table has no row
        ("falcon", "falcon, is not read from GGUF"),  # transformers reads it, no family is for it
        ("gpt2", "gpt2, is not read from GGUF"),
    ],
)
def test_an_architecture_that_is_not_read_is_rejected(tmp_path, architecture, reason):
    write_header(tmp_path / "tiny.gguf", architecture)
    _rejected(tmp_path / "tiny.gguf", reason)


def test_a_file_without_an_architecture_is_rejected(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content.replace(b"general.archi", b"general.arkhi"))
    _rejected(tmp_path / "tiny.gguf", "its architecture, none, is not read")


def _rejected(file, reason):
    """Nothing is kept, and the one line states the reason and what to do."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint_of(file)
    line = str(caught.value)
    assert line.startswith(f"cannot read {file}: ")
    assert reason in line
    assert line.endswith("; use the original checkpoint")
    assert "\n" not in line
    assert not list((file.parent / "home").glob("gguf/*"))


@pytest.mark.parametrize("damage", [SOURCE_FILE, "config.json"])
def test_what_a_crash_left_is_made_again(tmp_path, damage):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    folder = checkpoint_of(tmp_path / "tiny.gguf")
    if damage == SOURCE_FILE:
        (folder / damage).write_text("")
    else:
        (folder / damage).unlink()
    assert _same_logits(checkpoint_of(tmp_path / "tiny.gguf"), tiny_llama(), 1e-5)
