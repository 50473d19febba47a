"""Divergence of a pruned model from its dense one."""

import copy
import gc
import weakref

import pytest
import torch

import rap
from cases.command import run
from cases.models import VOCABULARY, tiny_model
from rap import assets
from rap.evaluation.quality.fidelity import DenseStates, divergence, fidelity
from rap.evaluation.quality.perplexity import perplexity
from rap.model.errors import RapError
from rap.runtime import logits


def _ids(count: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(3))


def test_a_model_agrees_with_itself():
    model = tiny_model("llama")
    found = fidelity(model, copy.deepcopy(model), _ids(192), window=48)
    assert (found.kl.value, found.kl_p99, found.top1.value) == (0.0, 0.0, 1.0)
    assert found.num_windows == 4


def test_divergence_is_that_of_the_dense_model_from_the_other():
    generator = torch.Generator().manual_seed(0)
    dense, other = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    p, q = dense.softmax(-1), other.softmax(-1)
    kl, same = divergence(dense, other)
    torch.testing.assert_close(kl.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(same.bool(), p.argmax(-1) == q.argmax(-1))
    # It is not symmetric: the other direction would be another number.
    assert not torch.allclose(kl.double(), (q * (q / p).log()).sum(-1), rtol=1e-2)


def _damaged(share: float = 0.5, family: str = "llama", **changes: object) -> torch.nn.Module:
    """A model whose attention counts for less."""
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name:
                parameter.mul_(share)
    return model


def test_fidelity_is_what_whole_logits_give():
    model, dense = _damaged(), tiny_model("llama")
    ids = _ids(300)
    found = fidelity(model, dense, ids, window=300)
    with torch.no_grad():
        kl, same = divergence(dense(ids[None]).logits[0], model(ids[None]).logits[0])
    assert found.kl.value == pytest.approx(float(kl.double().mean()), rel=1e-4)
    assert found.top1.value == pytest.approx(float(same.double().mean()))
    assert [(part.start, part.stop) for part in found.positions] == [
        (0, 128),
        (128, 256),
        (256, 300),
    ]
    assert found.positions[1].kl == pytest.approx(float(kl[128:256].double().mean()), rel=1e-4)
    assert found.kl_p99 == pytest.approx(float(kl.sort().values[296]), rel=1e-4)


FAMILIES = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexities_are_those_of_perplexity_to_the_last_digit(family, monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_LOGITS", 7 * VOCABULARY)  # 49 tokens are seven chunks
    model, dense = _damaged(0.5, family, **FAMILIES[family]), tiny_model(family, **FAMILIES[family])
    ids, sizes = _ids(5 * 50 + 9), {"window": 50, "max_windows": 4, "bos": 1}
    found = fidelity(model, dense, ids, **sizes)
    assert found.perplexity == perplexity(model, ids, **sizes)
    assert found.dense_perplexity == perplexity(dense, ids, **sizes)
    ratio = found.perplexity_ratio
    assert ratio.value == pytest.approx(float(found.perplexity) / float(found.dense_perplexity))
    assert ratio.low < ratio.value < ratio.high
    # Chunks are for memory alone.
    monkeypatch.undo()
    whole = fidelity(model, dense, ids, **sizes)
    assert found.kl.value == pytest.approx(whole.kl.value, rel=1e-5)
    assert found.top1 == whole.top1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_of_the_dense_model_serves_many_comparisons(dtype):
    dense, ids = tiny_model("llama"), _ids(192)
    sizes = {"window": 48, "dtype": dtype}
    expected = [fidelity(_damaged(share), dense, ids, **sizes) for share in (0.5, 0.9)]
    states, decoder = DenseStates(dense, ids, **sizes), weakref.ref(dense.model.layers[0])
    calls = []
    dense.model.register_forward_hook(lambda *_: calls.append(1))
    found = [states.compare(_damaged(share)) for share in (0.5, 0.9, 0.5)]
    assert found == [*expected, expected[0]]
    assert calls == []
    # The head is all that is held of the model.
    del dense
    gc.collect()
    assert decoder() is None
    assert states.compare(_damaged(0.9)) == expected[1]


def test_low_precision_is_compared_in_float32():
    low = [model.to(torch.bfloat16) for model in (_damaged(), tiny_model("llama"))]
    found = fidelity(*low, _ids(96), window=48)
    assert {model.dtype for model in low} == {torch.bfloat16}
    as_is = fidelity(*low, _ids(96), window=48, dtype=None)
    assert fidelity(*(model.float() for model in low), _ids(96), window=48) == found != as_is


def test_a_model_that_is_not_finite_is_named():
    broken = tiny_model("llama")
    broken.lm_head.weight.data[0] = float("nan")
    for pair, of in (((broken, tiny_model()), "pruned"), ((tiny_model(), broken), "dense")):
        with pytest.raises(RapError, match=f"the loss of the {of} model is nan in windows 0 to 0"):
            fidelity(*pair, _ids(64), window=32)


def test_pruning_more_diverges_more(reference_model, tokenizer, test_tokens):
    windows = rap.load_windows("bundled", tokenizer, num_windows=4, window=256, seed=0)
    method = rap.Rap(retain=0.8)
    statistics = rap.calibrate(reference_model, windows, method.needs_for(reference_model))
    found = []
    for retain in (0.8, 0.4):
        cut = rap.Rap(retain=retain)
        small = cut.apply(reference_model, cut.plan(reference_model, statistics))
        found.append(fidelity(small, reference_model, test_tokens, window=256, max_windows=3))
    mild, hard = found
    assert 0 < mild.kl.value < hard.kl.value
    assert mild.top1.value > hard.top1.value
    assert mild.kl.low < mild.kl.value < mild.kl.high


def test_models_of_two_vocabularies_are_refused():
    other = tiny_model("llama")
    other.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    with pytest.raises(RapError, match="vocabularies"):
        fidelity(tiny_model("llama"), other, _ids(64), window=32)


def test_a_comparison_leaves_nothing_in_what_is_kept():
    """A window's states on the device of the head would stay there with every window read."""
    dense = tiny_model("llama")
    states = DenseStates(dense, _ids(192), window=48)
    states.compare(_damaged())
    for output, kept_TE in states._states:
        assert output.last_hidden_state.shape == (1, 48, dense.config.hidden_size)
        assert output.last_hidden_state.data_ptr() == kept_TE.data_ptr()


def test_windows_of_several_texts_are_whole_parts_of_each(tmp_path):
    """As `rap compress` evaluates them, whatever the length of a window."""
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    texts = assets.reference_text("test")[:30_000], assets.reference_text("validation")[:30_000]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    asked = ("--window", 128, "--max-windows", 2, "--json")
    both = ("--text", ",".join(map(str, files)))
    found = run("evaluate", "perplexity", "bundled", *both, *asked).json
    close = run("evaluate", "fidelity", "bundled", "--dense", "bundled", *both, *asked).json
    alone = [
        run("evaluate", "perplexity", "bundled", "--text", file, *asked[:2], "--max-windows", 1,
            "--json").json["nats_per_token"]
        for file in files
    ]  # fmt: skip
    assert found["nats_per_token"] == pytest.approx(sum(alone) / 2, rel=1e-6)
    assert close["perplexity"]["nats_per_token"] == found["nats_per_token"]
