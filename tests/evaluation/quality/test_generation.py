"""Greedy continuations of two models: agreement, common prefix and repetition, by hand."""

import copy
import functools
import json

import pytest
import torch

from cases.command import run
from cases.models import VOCABULARY, random_tokens, tiny_model
from cases.rounded_cache import rounded_kind
from rap.evaluation.cache.quantized_cache import quantized_cache
from rap.evaluation.quality.generation import (
    Continuation,
    compare,
    continue_greedily,
    generation,
    repetition_rate,
)
from rap.evaluation.quality.intervals import Interval
from rap.model.errors import RapError

SMALL = {"num_prompts": 5, "prompt_tokens": 7, "num_tokens": 13, "batch_size": 2}


@pytest.fixture(scope="module")
def ids():
    return random_tokens(1, 200)[0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_continues_like_itself(ids, family):
    model = tiny_model(family)
    found = generation(model, copy.deepcopy(model), ids, **SMALL)
    assert found.agreement == Interval(1.0, 1.0, 1.0)
    assert found.common_prefix == Interval(13.0, 13.0, 13.0)
    assert found.repetition == found.dense_repetition
    assert len(found.continuations) == 5


def test_another_model_continues_otherwise(ids):
    found = generation(tiny_model(seed=1), tiny_model(), ids, **SMALL)
    assert found.agreement.value < 0.5
    assert found.common_prefix.value < 6
    for name in ("agreement", "common_prefix", "repetition", "dense_repetition"):
        mean, each = getattr(found, name), [getattr(one, name) for one in found.continuations]
        assert mean.value == pytest.approx(sum(each) / 5)
        assert mean.low <= mean.value <= mean.high


def test_the_model_alone_reads_with_a_quantized_cache(ids, monkeypatch):
    model = tiny_model()
    new_cache = functools.partial(quantized_cache, kind=rounded_kind(monkeypatch))
    found = generation(model, model, ids, **SMALL, new_cache=new_cache)
    assert found.agreement.value < 1.0
    assert found.dense_repetition == generation(model, model, ids, **SMALL).dense_repetition


def test_the_cache_changes_nothing():
    """Step by step with a cache is the same as the whole text read again for every token."""
    model, prompts = tiny_model(), random_tokens(3, 9)
    ids = prompts
    with torch.no_grad():
        for _ in range(11):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(continue_greedily(model, prompts, 11), ids[:, 9:])


def test_an_end_of_text_ends_nothing():
    prompts = random_tokens(2, 9)
    made = continue_greedily(tiny_model(), prompts, 8)
    ends = tiny_model(eos_token_id=int(made[0, 2]))
    assert torch.equal(continue_greedily(ends, prompts, 8), made)


@pytest.mark.parametrize(
    ("ours", "theirs", "agreement", "prefix"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0, 4),
        ([1, 2, 9, 4], [1, 2, 3, 4], 0.75, 2),
        ([9, 2, 3, 4], [1, 2, 3, 4], 0.75, 0),
        ([2, 3, 4, 1], [1, 2, 3, 4], 0.0, 0),
    ],
)
def test_what_is_alike_is_counted(ours, theirs, agreement, prefix):
    found = compare(torch.tensor(ours), torch.tensor(theirs))
    assert found == Continuation(agreement, prefix, 0.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        (range(20), 0.0),
        ([1, 2, 3], 0.0),
        ([], 0.0),
        # 1234 2341 3412 4123 1234: the fifth is the first again.
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
        ([7] * 10, 6 / 7),
        # Three tokens again are no 4-gram again: seven of seven differ.
        ([1, 2, 3, 9, 1, 2, 3, 8, 4, 5], 0.0),
    ],
)
def test_repetition_by_hand(tokens, rate):
    assert repetition_rate(tokens) == pytest.approx(rate)


def test_repetition_of_each_model_is_its_own():
    found = compare(torch.tensor([7] * 10), torch.arange(10))
    assert (found.repetition, found.dense_repetition) == (pytest.approx(6 / 7), 0.0)


def test_the_seed_draws_the_prompts_and_the_batch_changes_nothing(ids):
    models = tiny_model(seed=1), tiny_model()
    first, again, other = (generation(*models, ids, **SMALL, seed=s) for s in (3, 3, 4))
    assert first == again != other
    assert generation(*models, ids, **SMALL | {"batch_size": 5}, seed=3) == first


def test_a_prompt_begins_with_bos(ids, monkeypatch):
    read = []

    def remember(model, prompts, num_tokens, bar, new_cache):
        read.append(prompts)
        return torch.zeros(len(prompts), num_tokens)

    monkeypatch.setattr("rap.evaluation.quality.generation.continue_greedily", remember)
    model = tiny_model()
    for bos, first in ((1, 1), (None, 0)):
        read.clear()
        # 5 of 5: the text in order, each prompt behind BOS.
        generation(model, model, ids[: 5 * (7 - first)], **SMALL, bos=bos)
        rows = torch.cat(read[: len(read) // 2])
        assert rows.shape == (5, 7)
        assert torch.equal(rows[:, first:].flatten(), ids[: 5 * (7 - first)])
        assert bos is None or (rows[:, 0] == bos).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 29}, "200 tokens, enough for 28 prompts of 7, not 29: give a longer"),
        ({"num_prompts": 0}, "are 1 or more"),
        ({"num_tokens": 0}, "are 1 or more"),
        ({"prompt_tokens": 1, "bos": 3}, "BOS alone"),
    ],
)
def test_wrong_input_is_refused(ids, changes, message):
    model = tiny_model()
    with pytest.raises(RapError, match=message):
        generation(model, model, ids, **SMALL | changes)
    with pytest.raises(RapError, match="vocabularies of 128 and 130"):
        generation(model, tiny_model(vocab_size=VOCABULARY + 2), ids, **SMALL)


def test_the_command_compares_and_writes(tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "generation.json"
    text.write_text("The rain fell on the old house all night, and nobody came to the door. " * 40)
    few = ("--prompts", 3, "--prompt-tokens", 9, "--tokens", 6)
    call = ("evaluate", "generation", "bundled", "--dense", "bundled", "--text", text, *few)
    found = run(*call, "--json", "-o", output)
    assert found.code == 0, found.err
    assert json.loads(output.read_text()) == found.json
    assert found.json["agreement"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found.json["common_prefix"]["value"] == 6
    assert found.json["dense_fingerprint"] == found.json["fingerprint"]
    assert "same token at the same place" in run(*call).out
