"""`rap export gguf` as far as it goes without the engine: tensors, keys, tokenizers, refusals."""

import copy
import json
from hashlib import sha256

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cases.command import error_violations, run
from cases.family_cases import CASES
from cases.models import tiny_model
from cases.plans import random_plan
from rap import assets
from rap.checkpoint.load import load
from rap.checkpoint.source import resolve_source
from rap.model.errors import CheckpointError, RapError, UnsupportedModelError
from rap.serving.gguf.export import export_gguf, hadamard, interleaved, key_mix, rotate_heads
from rap.serving.gguf.plain import frequency_factors, plain_model, width_warnings
from rap.serving.gguf.tokenizer import _TABLE, add_tokenizer, known_pre
from rap.serving.llamacpp.verify import _check_same_shape, file_type
from rap.serving.stock import longrope_factors, stock_model
from rap.surgery.apply import apply

from .test_stock import stock_profile

VOCABULARY = 4096
# Every second pair of 32 would have the very frequencies of a dense head of 32 channels.
PAIRS = [0, 1, 2, 3, 4, 6, 7, 9, 12, 13, 17, 20, 22, 25, 30, 31]
PRE = "smollm"  # splits digits and text as the bundled tokenizer does


def bundled_vocabulary(family="llama", **fields):
    """A tiny model that the bundled tokenizer belongs to; heads of 64 channels."""
    sizes = {"head_dim": 64, "hidden": 64, "vocab_size": VOCABULARY}
    return tiny_model(family, **(sizes | fields))


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A folder of a model's checkpoint, with the bundled tokenizer."""

    def save(model, name="checkpoint"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))


def read(file):
    """Settings and tensors of a file."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize("cut", [False, True], ids=["dense", "stock"])
def test_read_back_by_transformers_it_is_the_same_model(saved, home, tmp_path, rope, cut):
    """An independent reader of the format undoes permutation, factors and names."""
    model = bundled_vocabulary(rope=rope)
    small = stock_profile(model, PAIRS) if cut else model
    export_gguf(saved(small), tmp_path / "a.gguf", kind="f32", pre=PRE)
    back = load(resolve_source(tmp_path / "a.gguf"))
    ids = torch.arange(90)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_pruned_phi3_is_written_as_the_llama_it_equals(saved, home, tmp_path):
    small = stock_profile(bundled_vocabulary("phi3", sliding_window=None), PAIRS)
    export_gguf(saved(small), tmp_path / "a.gguf", kind="f32", pre=PRE)
    back = load(resolve_source(tmp_path / "a.gguf"))
    ids = torch.arange(90)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_plain_form_of_another_family_is_refused(saved, tmp_path):
    small = stock_profile(bundled_vocabulary("arcee"), PAIRS)
    with pytest.raises(UnsupportedModelError, match="llama and mistral alone, not of arcee"):
        export_gguf(saved(small), tmp_path / "a.gguf", pre=PRE)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen2", {}), ("llama", {"attention_bias": True}), ("llama", {"mlp_bias": True})],
)
def test_biases_are_read_back(saved, home, tmp_path, family, fields):
    model = bundled_vocabulary(family, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1, 1)
    export_gguf(saved(model), tmp_path / "a.gguf", kind="f32", pre=PRE)
    back = load(resolve_source(tmp_path / "a.gguf"))
    ids = torch.arange(90)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)


def test_a_head_of_its_own_is_kept_whatever_the_config_says(saved, home, tmp_path):
    folder = saved(bundled_vocabulary(tie_word_embeddings=False))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load(folder)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    export_gguf(folder, tmp_path / "a.gguf", kind="f32", pre=PRE)
    assert "output.weight" in read(tmp_path / "a.gguf")[1]


def test_a_multimodal_checkpoint_is_refused_in_a_sentence(saved, tmp_path):
    (case,) = [case for case in CASES if case.name == "gemma3"]
    with pytest.raises(UnsupportedModelError, match="gemma3 has no GGUF form"):
        export_gguf(saved(case.model()), tmp_path / "a.gguf", pre=PRE)


def test_the_reader_sees_a_file_without_factors(saved, home, tmp_path, monkeypatch):
    small = stock_profile(bundled_vocabulary(), PAIRS)
    monkeypatch.setattr("rap.serving.gguf.export.frequency_factors", lambda model: None)
    export_gguf(saved(small), tmp_path / "a.gguf", kind="f32", pre=PRE)
    back = load(resolve_source(tmp_path / "a.gguf"))
    ids = torch.arange(90)[None] * 7
    with torch.no_grad():
        assert (back(ids).logits - small(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rotated_heads_are_the_same_model_with_other_channels(family):
    """Keys mix where a frequency repeats, values everywhere, biases with them."""
    model = bundled_vocabulary(family, use_sliding_window=False)
    plain = stock_model(stock_profile(model, PAIRS))
    theta = plain.model.rotary_emb.inv_freq.clone()
    theta[9:12] = theta[9]  # as folded slots repeat theirs
    factors = longrope_factors(theta, 1e4)
    plain.config.rope_parameters |= {"short_factor": factors, "long_factor": factors}
    plain.model.rotary_emb = type(plain.model.rotary_emb)(config=plain.config)
    before = copy.deepcopy(plain)
    rotate_heads(plain)
    ids = torch.arange(90)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, before(ids).logits, rtol=1e-4, atol=1e-4)
    for name in ("k_proj", "v_proj"):
        linears = [getattr(each.model.layers[0].self_attn, name) for each in (plain, before)]
        assert not torch.allclose(linears[0].weight, linears[1].weight)


@pytest.mark.parametrize("width", [10, 32, 48, 96])
def test_rotations_are_orthogonal_and_spread_a_channel(width):
    turn = hadamard(width)
    identity = torch.eye(width, dtype=torch.float64)
    torch.testing.assert_close(turn @ turn.T, identity)
    assert turn.abs().max() <= (2 / width) ** 0.5 + 1e-9


def test_keys_of_other_frequencies_are_never_mixed():
    mix = key_mix(torch.tensor([1.0, 0.5, 0.5, 0.1], dtype=torch.float64))
    torch.testing.assert_close(mix @ mix.mH, torch.eye(4, dtype=torch.complex128))
    apart = [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert (mix != 0).int().tolist() == apart


def test_settings_of_a_stock_checkpoint(saved, tmp_path):
    small = stock_profile(bundled_vocabulary(), PAIRS)
    written = export_gguf(saved(small), tmp_path / "a.gguf", kind="f32", pre=PRE)
    fields, tensors = read(tmp_path / "a.gguf")
    lengths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    assert [fields[f"llama.{name}"] for name in lengths] == [32, 32, 32]
    assert not [name for name in fields if "rope.scaling" in name]
    assert fields["tokenizer.ggml.pre"] == PRE
    assert fields["general.name"] == "checkpoint"
    assert str(tmp_path) not in json.dumps(fields, default=str)
    dense = bundled_vocabulary().model.rotary_emb.inv_freq
    factors = tensors["rope_freqs.weight"].data
    found = 1 / (factors * 1e4 ** (np.arange(16) / 16))
    np.testing.assert_allclose(found, dense[PAIRS], rtol=1e-6)
    assert (written.head_dim, written.frequency_factors) == (32, True)
    assert written.num_bytes == (tmp_path / "a.gguf").stat().st_size
    assert "no multiple of 64" in written.warnings[0]
    modelfile = (tmp_path / "a.Modelfile").read_text("utf-8")
    assert modelfile == "FROM ./a.gguf\nPARAMETER num_ctx 512\n"


def test_rows_of_a_head_become_pairs_side_by_side():
    rows = torch.tensor([0, 1, 2, 10, 11, 12, 100, 101, 102, 110, 111, 112])
    expected = [0, 10, 1, 11, 2, 12, 100, 110, 101, 111, 102, 112]
    assert interleaved(rows, 2).tolist() == expected
    assert interleaved(rows[:, None].expand(12, 3), 2)[:, 1].tolist() == expected


def test_queries_keys_and_their_biases_are_interleaved(saved, tmp_path):
    model = bundled_vocabulary("qwen2", use_sliding_window=False)
    export_gguf(saved(model), tmp_path / "a.gguf", kind="f32", pre=PRE)
    _, tensors = read(tmp_path / "a.gguf")
    attention = model.model.layers[1].self_attn
    for name, linear, heads in (("q", attention.q_proj, 4), ("k", attention.k_proj, 2)):
        for part in ("weight", "bias"):
            found = torch.tensor(np.array(tensors[f"blk.1.attn_{name}.{part}"].data))
            assert torch.equal(found, interleaved(getattr(linear, part).detach(), heads))
    found = torch.tensor(np.array(tensors["blk.1.attn_v.weight"].data))
    assert torch.equal(found, attention.v_proj.weight.detach())


@pytest.mark.parametrize(
    ("kind", "stored"), [("f32", "F32"), ("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")]
)
def test_matrices_are_stored_as_asked_and_the_rest_as_float32(saved, tmp_path, kind, stored):
    model = bundled_vocabulary(tie_word_embeddings=True)
    export_gguf(saved(model), tmp_path / "a.gguf", kind=kind, pre=PRE)
    _, tensors = read(tmp_path / "a.gguf")
    assert "output.weight" not in tensors
    for tensor in tensors.values():
        expected = "F32" if len(tensor.shape) == 1 else stored
        assert tensor.tensor_type.name == expected


def test_rows_that_are_no_whole_blocks_stay_in_half_precision(saved, tmp_path):
    small = stock_profile(tiny_model("llama", vocab_size=VOCABULARY), [0, 2, 3, 5, 7])
    export_gguf(saved(small), tmp_path / "a.gguf", kind="q8_0", pre=PRE)
    _, tensors = read(tmp_path / "a.gguf")
    assert tensors["blk.0.attn_output.weight"].tensor_type.name == "F16"  # 4 heads of 10
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"


def test_tokens_types_merges_and_template(saved, tmp_path, tokenizer):
    folder = saved(bundled_vocabulary(vocab_size=VOCABULARY + 2))
    tokenizer = type(tokenizer).from_pretrained(folder)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    fields, _ = read(tmp_path / "a.gguf")
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[:VOCABULARY] == tokenizer.convert_ids_to_tokens(range(VOCABULARY))
    assert tokens[VOCABULARY:] == ["[PAD4096]", "[PAD4097]"]
    types = fields["tokenizer.ggml.token_type"]
    assert (types[0], set(types[1:VOCABULARY]), set(types[VOCABULARY:])) == (3, {1}, {5})
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert fields["tokenizer.ggml.bos_token_id"] == 0
    assert fields["tokenizer.ggml.add_bos_token"] is False


def test_a_tokenizer_is_copied_from_another_file(saved, tmp_path):
    folder = saved(bundled_vocabulary())
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="--tokenizer-from"):
        export_gguf(folder, tmp_path / "b.gguf")
    export_gguf(folder, tmp_path / "b.gguf", tokenizer_from=tmp_path / "a.gguf")
    copied, whole = read(tmp_path / "b.gguf")[0], read(tmp_path / "a.gguf")[0]
    assert {k: v for k, v in copied.items() if k.startswith("tokenizer.")} == {
        k: v for k, v in whole.items() if k.startswith("tokenizer.")
    }
    other = saved(bundled_vocabulary(vocab_size=5000), "other")
    with pytest.raises(CheckpointError, match="4096 tokens, the model one of 5000"):
        export_gguf(other, tmp_path / "c.gguf", tokenizer_from=tmp_path / "a.gguf")


def test_copied_arrays_keep_the_type_they_are_stored_in(saved, tmp_path):
    """Bytes of a normalizer that were written as whole numbers are not taken back."""
    folder = saved(bundled_vocabulary())
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    for name, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items():
        if name.startswith("tokenizer."):
            kind = {"sub_type": field.types[-1]} if len(field.types) > 1 else {}
            writer.add_key_value(name, field.contents(), field.types[0], **kind)
    charsmap = "tokenizer.ggml.precompiled_charsmap"
    array, byte = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8
    writer.add_key_value(charsmap, [1, 2, 255], array, sub_type=byte)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    export_gguf(folder, tmp_path / "c.gguf", tokenizer_from=tmp_path / "b.gguf")
    fields = gguf.GGUFReader(tmp_path / "c.gguf").fields
    assert fields[charsmap].types == [array, byte]
    assert fields[charsmap].contents() == [1, 2, 255]
    assert fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32


def test_an_unknown_way_to_split_text_is_refused_and_can_be_named(saved, tmp_path, tokenizer):
    with pytest.raises(CheckpointError, match=r"hash d1c8c1aa52c2.*--pre"):
        export_gguf(saved(bundled_vocabulary()), tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize(
    ("pre", "said"),
    [
        ("nonsense", "such as llama-bpe or qwen2"),
        ("smolm", "near it: smollm"),
        ("LLAMA-BPE", "near it: llama-bpe"),
        ("bert-bge-large", "has no pre-tokenizer"),  # in the table of hashes, of no BPE tokenizer
        ("", "has no pre-tokenizer ''"),
    ],
)
def test_a_name_that_llama_cpp_does_not_know_is_refused(saved, tmp_path, pre, said):
    folder = saved(bundled_vocabulary())
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    for given in ({}, {"tokenizer_from": tmp_path / "a.gguf"}):
        with pytest.raises(RapError, match=rf"{said}.*--tokenizer-from") as caught:
            export_gguf(folder, tmp_path / "b.gguf", pre=pre, **given)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "b.gguf").exists()


def test_names_that_hashes_stand_for_are_known():
    """But for two, whose tokenizers are no byte-level BPE and so are refused before."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    unknown = set(table["sha256"].values()) - set(table["names"])
    assert unknown == {"bert-bge-large", "jina-v2-en"}


def test_a_known_way_to_split_text_is_found_by_its_hash(monkeypatch, tmp_path):
    class Known:
        def encode(self, text):
            return [len(text), 2]

    table = {"check_text": "3333333", "sha256": {sha256(b"[7, 2]").hexdigest(): "gpt-2"}}
    (tmp_path / "table.json").write_text(json.dumps(table))
    monkeypatch.setattr("rap.serving.gguf.tokenizer._TABLE", tmp_path / "table.json")
    assert known_pre(Known()) == "gpt-2"


def test_other_kinds_of_tokenizers_are_refused():
    writer = gguf.GGUFWriter(None, "llama")
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)], 0)))
    with pytest.raises(CheckpointError, match=r"a Unigram tokenizer .*--tokenizer-from"):
        add_tokenizer(writer, unigram, 1, None)
    byte_pieces = models.BPE({"a": 0}, [], byte_fallback=True)
    sentences = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(byte_pieces))
    with pytest.raises(CheckpointError, match=r"a SentencePiece tokenizer .*--tokenizer-from"):
        add_tokenizer(writer, sentences, 1, None)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
UNEQUAL = {**LONG, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "attention_factor": 1.0}
LOUD = {**LONG, "short_factor": [1.0] * 32, "long_factor": [1.0] * 32, "attention_factor": 1.2}
REFUSED = {
    "family": (("gemma",), {}, "gemma has no GGUF form"),
    "window": (("mistral",), {"sliding_window": 24}, "sliding window of 24 tokens"),
    "gelu": (("llama",), {"hidden_act": "gelu"}, "silu"),
    "dynamic": (
        ("llama",),
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "'dynamic' has frequencies that depend",
    ),
    "unequal": (("llama",), {"rope_parameters": UNEQUAL}, "'longrope' has frequencies that"),
    "attention factor": (("llama",), {"rope_parameters": LOUD}, "scales attention by 1.2"),
    "yarn": (("llama",), {"rope": "yarn"}, "scales attention by"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_express_is_refused(saved, tmp_path, case):
    family, fields, message = REFUSED[case]
    folder = saved(bundled_vocabulary(*family, **fields))
    with pytest.raises(UnsupportedModelError, match=message):
        export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    assert not (tmp_path / "a.gguf").exists()


def test_a_family_is_refused_before_its_tokenizer_is_asked_for(tmp_path):
    """Whoever brought one would be refused all the same."""
    bundled_vocabulary("gemma3_text").save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="gemma3_text has no GGUF form"):
        export_gguf(tmp_path / "checkpoint", tmp_path / "a.gguf", pre=PRE)


def test_what_a_file_cannot_be_compared_with_is_said_in_a_sentence(saved, tmp_path):
    export_gguf(saved(bundled_vocabulary()), tmp_path / "a.gguf", pre=PRE)
    other = bundled_vocabulary(hidden=128)
    with pytest.raises(CheckpointError, match=r"of \[64, 4096\], small of \[128, 4096\]"):
        _check_same_shape(tmp_path / "a.gguf", "small", other)
    _check_same_shape(tmp_path / "a.gguf", "dense", bundled_vocabulary())
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and nothing")
    with pytest.raises(CheckpointError, match=r"cannot read .*bad.gguf: .*: download it again"):
        file_type(tmp_path / "bad.gguf")


def test_a_window_as_long_as_the_model_is_none(saved):
    plain_model(saved(bundled_vocabulary("mistral", sliding_window=512)))


def test_checkpoints_of_another_profile_are_refused_in_a_sentence(saved, tmp_path):
    model = bundled_vocabulary()
    folder = saved(apply(model, random_plan(model, [(16, 32), (8, 16)])))
    result = run("export", "gguf", folder, "-o", tmp_path / "a.gguf", "--pre", PRE)
    assert error_violations(result) == []
    assert "--profile stock" in result.err


def test_scaled_frequencies_are_in_the_factors():
    model = bundled_vocabulary(rope="llama3")
    factors = frequency_factors(model)
    assert factors == longrope_factors(model.model.rotary_emb.inv_freq, 1e4)
    assert max(factors) == pytest.approx(8.0)
    assert frequency_factors(bundled_vocabulary()) is None


@pytest.mark.parametrize(
    ("width", "said"), [(48, "no quantized cache"), (32, "at 4 bits"), (96, "at 4 bits"), (64, "")]
)
def test_warnings_by_width(width, said):
    found = width_warnings(width)
    assert (said in found[0]) if said else found == []


def test_the_command_writes_a_file_and_says_how_to_check_it(saved, tmp_path):
    small = stock_profile(tiny_model("llama", vocab_size=VOCABULARY), [0, 2, 3, 5, 7])
    folder, file = saved(small), tmp_path / "a.gguf"
    result = run("export", "gguf", folder, "-o", file, "--pre", PRE)
    assert result.code == 0
    assert "warning: heads of 10 channels are no multiple of 32" in result.err
    assert f"rap verify {file} --engine llamacpp" in result.err
    again = run("export", "gguf", folder, "-o", file, "--pre", PRE)
    assert error_violations(again) == []
    assert "--force" in again.err
    found = run("export", "gguf", folder, "-o", file, "--pre", PRE, "--force", "--json").json
    assert (found["type"], found["head_dim"]) == ("f16", 10)


def test_the_modelfile_of_another_file_is_not_replaced(saved, tmp_path):
    folder, other = saved(bundled_vocabulary()), tmp_path / "a.Modelfile"
    other.write_text("mine")
    with pytest.raises(CheckpointError, match=r"a\.Modelfile exists: pass --force"):
        export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    assert other.read_text() == "mine"
    assert not (tmp_path / "a.gguf").exists()
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE, force=True)
    assert other.read_text().startswith("FROM ./a.gguf")


@pytest.mark.parametrize("name", ["a.txt", "a", "a.GGUF", ".gguf"])
def test_an_output_of_another_name_is_refused(tmp_path, name):
    with pytest.raises(RapError, match=r"must end in \.gguf"):
        export_gguf(assets.reference_path(), tmp_path / name, pre=PRE)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_type_is_refused(tmp_path):
    with pytest.raises(RapError, match="use one of f32, f16, bf16, q8_0"):
        export_gguf(assets.reference_path(), tmp_path / "a.gguf", kind="q2_k", pre=PRE)


def test_the_file_that_it_is_made_from_is_not_replaced(tmp_path, saved):
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF and what follows")
    for words in ([str(file)], ["bundled", "--tokenizer-from", str(file)]):
        result = run("export", "gguf", *words, "-o", file, "--force")
        assert result.code == 2
        assert "mine.gguf would replace what it is made from" in result.err
    assert file.read_bytes() == b"GGUF and what follows"


def test_the_command_takes_a_tokenizer_or_a_model_of_a_file_for_a_new_one(tmp_path, home):
    first = run("export", "gguf", "bundled", "--pre", PRE, "-o", tmp_path / "a.gguf")
    assert first.code == 0, first.err
    words = ("export", "gguf", "bundled", "--tokenizer-from", tmp_path / "a.gguf")
    assert run(*words, "-o", tmp_path / "b.gguf").code == 0
    assert read(tmp_path / "b.gguf")[0] == read(tmp_path / "a.gguf")[0]
