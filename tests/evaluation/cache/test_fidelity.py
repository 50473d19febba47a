"""KL through a compressed cache: nothing for the dense model, and that of whole windows else."""

import pytest
import torch
from transformers.cache_utils import QuantizedLayer

import rap
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from cases.scripts import load_script
from rap.evaluation.cache import quantized_cache as quantized
from rap.evaluation.cache.compressed import CacheCompression, compressed_perplexity
from rap.evaluation.cost.footprint import footprint
from rap.model.errors import RapError

CONTINUATIONS = load_script("experiments/smollm2-pareto/continuations.py")
DenseContinuations, spread = (CONTINUATIONS.DenseContinuations, CONTINUATIONS.spread)

WINDOW, PREFIX, PIECE = 40, 23, 7
SIZES = {"window": WINDOW, "prefix": PREFIX, "piece": PIECE}


def pruned():
    """A cut tiny model: keys and values of every layer have widths of their own."""
    model = tiny_model()
    return rap.apply(model, random_plan(model, [(5, 9), (3, 12)]))


@pytest.fixture
def ids():
    return random_tokens(3, WINDOW)


@pytest.fixture
def judge(ids):
    return DenseContinuations(tiny_model(), ids.flatten(), **SIZES, num_windows=3)


@pytest.fixture
def rounding(monkeypatch):
    """A cache kind that needs no package: 15 levels, one scale a group."""

    class Backend(QuantizedLayer):
        def _quantize(self, tensor, axis):
            scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
            return (tensor / scale).round().to(torch.int8), scale

        def _dequantize(self, held):
            return held[0] * held[1]

    class Layer(quantized._WholeGroups, Backend):
        pass

    backend = quantized._Backend("round", Layer, "torch", (4,), 0)
    monkeypatch.setitem(quantized.CACHE_KINDS, "round4", (backend, 4))
    return "round4"


def test_the_dense_model_is_nowhere_far_from_itself(judge):
    found = judge.compare(dense := tiny_model(), judge.read(dense))
    # The reference was read through a cache of the same prefix: the same numbers.
    assert (found.kl, found.top1) == (0, 1)
    assert found.bytes_per_token == footprint(dense.bfloat16()).kv_bytes_per_token


@torch.no_grad()
def test_a_cut_model_is_as_far_as_its_whole_windows_are(judge, ids):
    cut, dense = pruned(), tiny_model()
    found = judge.compare(cut, judge.read(cut))
    theirs, ours = (model(ids).logits[:, PREFIX:-1].log_softmax(-1) for model in (dense, cut))
    kl_WN = (theirs.exp() * (theirs - ours)).sum(-1)
    assert found.kl == pytest.approx(float(kl_WN.mean()), rel=1e-4)
    assert found.window_kl == pytest.approx(kl_WN.mean(1).tolist(), rel=1e-4)
    same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
    assert found.top1 == pytest.approx(float(same))
    assert 0 < found.top1 < 1
    # Logits of another length: float32 rounding apart.
    plain = compressed_perplexity(cut, ids.flatten(), CacheCompression(), **SIZES)
    assert found.perplexity == pytest.approx(plain.perplexity, rel=1e-5)
    assert found.bytes_per_token == footprint(cut.bfloat16()).kv_bytes_per_token


def test_bits_are_those_of_a_cache_that_was_quantized_while_it_read(judge, ids, rounding):
    cut = pruned()
    states = judge.read(cut)
    found = judge.compare(cut, states, rounding)
    read = compressed_perplexity(cut, ids.flatten(), CacheCompression(rounding), **SIZES)
    assert found.perplexity == pytest.approx(read.perplexity, rel=1e-5)
    assert found.kl != judge.compare(cut, states).kl
    # A byte a number and a scale of two a row: 46 rows, which 2 more would fill up to 4 or 8.
    widths = [
        width
        for one in cut.config.rap["layers"]
        for width in (2 * one["pairs"] + one["free"], one["values"])
    ]
    assert found.bytes_per_token == sum(46 * (width + 2) for width in widths) / PREFIX


def test_states_can_be_continued_from_again(judge, rounding):
    cut = pruned()
    states = judge.read(cut)
    first = judge.compare(cut, states)
    judge.compare(cut, states, rounding)
    assert judge.compare(cut, states) == first


def test_windows_are_spread_over_the_text():
    windows = torch.arange(10)[:, None]
    assert spread(windows, 3).flatten().tolist() == [0, 3, 6]
    assert spread(windows, 10).flatten().tolist() == list(range(10))
    for count in (0, 11):
        with pytest.raises(RapError, match=f"{count} windows were asked for, and the text has 10"):
            spread(windows, count)


@pytest.mark.parametrize("sizes", [(40, 39, 1), (40, 0, 1), (40, 20, 0)])
def test_sizes_that_judge_nothing_are_refused(sizes, ids):
    named = dict(zip(("window", "prefix", "piece"), sizes, strict=True))
    with pytest.raises(RapError, match="cannot score windows of 40"):
        DenseContinuations(tiny_model(), ids.flatten(), **named, num_windows=1)


def test_another_vocabulary_is_refused(judge):
    with pytest.raises(RapError, match="vocabularies of"):
        judge.read(tiny_model(vocab_size=77))
