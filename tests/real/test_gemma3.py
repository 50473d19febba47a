"""Gemma 3 270M cut to 0.7: one KV head of 256, QK-norm, windows and two rope bases, 262,144 tokens.

What SmolLM2 has none of. `make test-real` fetches both models, once a machine.
"""

import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import rap
from cases.greedy import greedy
from rap.checkpoint.fetch import fetched_path
from rap.checkpoint.load import load_dense, load_tokenizer
from rap.checkpoint.source import resolve_source
from rap.data.held_out import evaluation_tokens
from rap.evaluation.quality.choices import choice_scorer, packable_tokens
from rap.evaluation.quality.fidelity import fidelity
from rap.model.modeling import register

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

RETAIN = 0.7
LONG = 640  # tokens of context, of which layers with a window see 512
# Of the dense model on novels, over dense, and the share of likeliest tokens that agree. Measured:
# 40.7, 1.45 and 65.3 %.
WORST_DENSE, WORST_RATIO, WORST_TOP1 = 45, 1.65, 0.6


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_source("gemma3"))


@pytest.fixture(scope="module")
def dense():
    return load_dense(resolve_source("gemma3"), dtype="float32")


@pytest.fixture(scope="module")
def tokens(tokenizer):
    """The test novels as this model reads them, [N]."""
    return evaluation_tokens("bundled", tokenizer)


@pytest.fixture(scope="module")
def pruned(dense, tokenizer, tmp_path_factory):
    """Cut by the default method on a little text, in memory and on disk."""
    folder = tmp_path_factory.mktemp("real") / "gemma3-70"
    made = rap.compress(
        dense,
        RETAIN,
        folder,
        tokenizer=tokenizer,
        num_windows=2,
        window=256,
        evaluate=None,
        recover="none",
    )
    return made, folder


def test_its_terms_lie_beside_it():
    folder = fetched_path("gemma3")
    assert "Gemma Terms of Use" in (folder / "GEMMA_TERMS.html").read_text(encoding="utf-8")
    assert (folder / "NOTICE.md").is_file()


def test_it_reads_as_its_file_states(dense, tokenizer):
    """What transformers does not read of the file: the bases of both kinds of layers, and BOS."""
    rope = dense.config.rope_parameters
    assert rope["full_attention"]["rope_theta"] == 1e6
    assert rope["sliding_attention"]["rope_theta"] == 1e4
    assert dense.config.layer_types.count("full_attention") == 3
    assert tokenizer("a").input_ids[:1] == [dense.config.bos_token_id]


def test_the_cache_is_what_was_asked_for(dense, pruned):
    whole, cut = rap.footprint(dense), rap.footprint(pruned[0].model)
    assert cut.kv_bytes_per_token / whole.kv_bytes_per_token == pytest.approx(RETAIN, abs=0.01)
    assert cut.windowed_kv_bytes_per_token == whole.windowed_kv_bytes_per_token
    # Three of eighteen layers have full attention, and are pruned.
    saved = whole.attention_parameters - cut.attention_parameters
    assert saved > (1 - 0.72) * whole.attention_parameters * 3 / 18


def test_any_program_loads_what_was_saved(pruned, tokens):
    made, folder = pruned
    register()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokens[None, :64]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, made.model(ids).logits)


@pytest.mark.parametrize("which", ["dense", "pruned"])
def test_cached_steps_are_the_whole_pass_beyond_the_window(dense, pruned, tokens, which):
    model = dense if which == "dense" else pruned[0].model
    ids, count = tokens[None, 5000 : 5000 + LONG - 8], 8
    chosen, logits = greedy(model, ids, count)
    whole = torch.cat([ids, chosen[None, :-1]], dim=1)
    with torch.no_grad():
        expected = model(input_ids=whole, use_cache=False, logits_to_keep=count).logits[0]
    assert torch.equal(expected.argmax(-1), chosen)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3)


def test_quality_stays_near_the_dense_model(dense, pruned, tokens):
    """On a window of novels that is longer than those of its layers."""
    found = fidelity(pruned[0].model, dense, tokens, window=LONG, max_windows=1)
    print(f"dense {found.dense_perplexity.value:.2f}, {found.perplexity_ratio}, {found.top1}")
    assert found.dense_perplexity.value < WORST_DENSE
    assert found.perplexity_ratio.value < WORST_RATIO
    assert found.top1.value > WORST_TOP1


def test_it_still_continues(dense, pruned, tokenizer):
    """As a base model: neither form answers, and only the dense one counts on."""
    days = tokenizer("Monday, Tuesday, Wednesday,", return_tensors="pt").input_ids
    assert "Thursday, Friday, Saturday" in tokenizer.decode(greedy(dense, days, 6)[0])
    opposite = tokenizer("The opposite of hot is", return_tensors="pt").input_ids
    assert tokenizer.decode(greedy(pruned[0].model, opposite, 1)[0]) == " cold"


def test_choices_are_scored_as_lm_eval_scores_them(pruned, tokenizer):
    """In rows, but requests that are longer than the window of 512 tokens by lm-eval itself."""
    plain = pytest.importorskip("lm_eval.models.huggingface").HFLM
    model = pruned[0].model
    assert packable_tokens(model) == model.config.sliding_window == 512
    context = "The capital of France, seen from the river, is" + " very" * 200
    texts = [(context, " old."), (context, " so" * 150), (context + " very" * 400, " small.")]
    instance = importlib.import_module("lm_eval.api.instance").Instance
    asked = [instance("loglikelihood", {}, text, n) for n, text in enumerate(texts)]
    found, expected = (
        scorer(pretrained=model, tokenizer=tokenizer, device="cpu").loglikelihood(asked, True)
        for scorer in (choice_scorer(), plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5)
        assert one[1] == other[1]
