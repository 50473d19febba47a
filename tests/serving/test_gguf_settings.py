"""What `rap export gguf` writes for other settings than the default ones."""

import gguf
import numpy as np
import pytest

from cases.command import run
from rap.model.errors import CheckpointError, RapError
from rap.serving.gguf.export import export_gguf
from rap.serving.gguf.tokenizer import add_tokenizer

from .test_gguf import PRE, VOCABULARY, bundled_vocabulary, read


def saved(model, tokenizer, folder):
    """The folder, with a model's checkpoint and a tokenizer in it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def own_tokenizer(tokenizer, tmp_path):
    """A copy of the bundled tokenizer, which a test may change."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return type(tokenizer).from_pretrained(tmp_path / "tokenizer")


def test_the_command_stores_as_asked_and_rotates_values(tmp_path, monkeypatch):
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    words = ("export", "gguf", "bundled", "--pre", PRE, "--type", "f32")
    assert run(*words, "-o", tmp_path / "a.gguf").code == 0
    assert run(*words, "--rotate", "-o", tmp_path / "b.gguf").code == 0
    plain, turned = (read(tmp_path / name)[1] for name in ("a.gguf", "b.gguf"))
    assert {tensor.tensor_type.name for tensor in plain.values()} == {"F32"}
    changed = {n for n, x in plain.items() if not np.allclose(x.data, turned[n].data, atol=1e-5)}
    assert {name.split(".", 2)[-1] for name in changed} == {"attn_v.weight", "attn_output.weight"}


def test_context_base_and_quantization_are_the_models_own(tmp_path, tokenizer):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = bundled_vocabulary(max_position_embeddings=9000, rope_parameters=rope)
    folder = saved(model, tokenizer, tmp_path / "checkpoint")
    export_gguf(folder, tmp_path / "a.gguf", kind="q8_0", pre=PRE)
    fields, tensors = read(tmp_path / "a.gguf")
    assert fields["llama.context_length"] == 9000
    assert fields["llama.rope.freq_base"] == 5e5
    assert fields["general.file_type"] == 7
    assert fields["general.quantization_version"] == 2
    assert "rope_freqs.weight" not in tensors
    modelfile = (tmp_path / "a.Modelfile").read_text("utf-8")
    assert modelfile.endswith("PARAMETER num_ctx 8192\n")  # a longer one takes much memory


@pytest.mark.parametrize(("kind", "number"), [("f32", 0), ("f16", 1), ("bf16", 32)])
def test_types_without_blocks_name_no_version_of_quantization(tmp_path, tokenizer, kind, number):
    folder = saved(bundled_vocabulary(), tokenizer, tmp_path / "checkpoint")
    export_gguf(folder, tmp_path / "a.gguf", kind=kind, pre=PRE)
    fields, _ = read(tmp_path / "a.gguf")
    assert fields["general.file_type"] == number
    assert "general.quantization_version" not in fields


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path, tokenizer):
    folder = saved(bundled_vocabulary(vocab_size=50), tokenizer, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="has a token 4095, the model only 50"):
        export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    assert not (tmp_path / "a.gguf").exists()


def test_added_tokens_are_control_tokens_if_they_look_like_it(tmp_path, own_tokenizer):
    """Both are added as plain words: models chat with such tokens, and do not mark them."""
    assert own_tokenizer.add_tokens(["<|turn|>", "wordlike"]) == 2
    model = bundled_vocabulary(vocab_size=VOCABULARY + 2)
    folder = saved(model, own_tokenizer, tmp_path / "checkpoint")
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    fields, _ = read(tmp_path / "a.gguf")
    assert fields["tokenizer.ggml.tokens"][VOCABULARY:] == ["<|turn|>", "wordlike"]
    types = [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    assert fields["tokenizer.ggml.token_type"][VOCABULARY:] == types == [3, 4]


def test_of_several_chat_templates_the_default_one_is_written(own_tokenizer):
    class Writer(gguf.GGUFWriter):
        def add_chat_template(self, value):
            written.append(value)

    written = []
    own_tokenizer.chat_template = {"tools": "{{ tools }}", "default": "{{ messages }}"}
    add_tokenizer(Writer(None, "llama"), own_tokenizer, VOCABULARY, PRE)
    assert written == ["{{ messages }}"]
    own_tokenizer.chat_template = {"chat": "{{ messages }}", "tools": "{{ tools }}"}
    with pytest.raises(RapError, match="none named default"):
        add_tokenizer(Writer(None, "llama"), own_tokenizer, VOCABULARY, PRE)
