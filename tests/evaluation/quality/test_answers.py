"""Long answers to prompts of a chat: padding, sampling, ends, loops and divergence, by hand."""

import copy
import functools
import json
import math
from unittest import mock

import pytest
import torch

from cases.command import error_violations, run
from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from cases.rounded_cache import rounded_kind
from rap import assets
from rap.cli import generation as generation_cli
from rap.data.sampling import nucleus
from rap.evaluation.cache.quantized_cache import quantized_cache
from rap.evaluation.quality import answers, decoding
from rap.evaluation.quality.answers import (
    alike,
    by_position,
    compare_answers,
    ends_in_loop,
    read,
    summary,
)
from rap.evaluation.quality.decoding import Sampling, Text, end_tokens, padded, write, write_again
from rap.evaluation.quality.generation import chat_tokens, read_prompts
from rap.evaluation.quality.intervals import mean_interval, share_interval
from rap.model.errors import RapError
from rap.surgery.apply import apply

TEMPLATE = "{% for m in messages %}Q: {{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}A:{% endif %}"
NONE = frozenset()


@pytest.fixture(scope="module")
def prompts():
    """Of different lengths, not in their order."""
    return [random_tokens(1, length, seed=length)[0] for length in (9, 3, 14, 5, 1)]


@pytest.mark.parametrize("sampling", [None, Sampling(0.8, 0.9, seed=2)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_a_batch_writes_what_each_prompt_gives_alone(prompts, family, sampling):
    """Left padding changes nothing: neither mask nor positions show it."""
    model = tiny_model(family)
    together = write(model, prompts, 12, sampling=sampling, batch_size=5)
    if sampling is None:
        for prompt, text in zip(prompts, together, strict=True):
            (alone,) = write(model, [prompt], 12)
            assert torch.equal(alone.tokens, text.tokens)
            torch.testing.assert_close(alone.states, text.states, rtol=1e-4, atol=1e-4)
    by_twos = write(model, prompts, 12, sampling=sampling, batch_size=2)
    assert all(
        torch.equal(*pair) for pair in zip(*map(tokens_of, (by_twos, together)), strict=True)
    )


def tokens_of(texts):
    return [text.tokens for text in texts]


def cut(model):
    return apply(model, random_plan(model, [(3, 5), (2, 7)]))


def test_a_cut_model_writes_with_padding_what_it_writes_alone(prompts):
    model = tiny_model()
    small = cut(model)
    for prompt, text in zip(prompts, write(small, prompts, 10), strict=True):
        assert torch.equal(write(small, [prompt], 10)[0].tokens, text.tokens)


def test_the_states_are_those_of_one_pass_over_the_text(prompts):
    model = tiny_model()
    for prompt, text in zip(prompts, write(model, prompts, 12), strict=True):
        torch.testing.assert_close(
            read(model, prompt, text.tokens), text.states, rtol=1e-4, atol=1e-4
        )


def test_a_text_written_again_has_the_states_it_was_written_from(prompts):
    model = tiny_model()
    first = write(model, prompts, 3)[0]
    texts = write(model, prompts, 12, ends=[int(first.tokens[-1])], batch_size=5)
    assert len({len(text.tokens) for text in texts}) > 1
    again = write_again(model, prompts, tokens_of(texts), batch_size=2)
    for one, other in zip(texts, again, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        torch.testing.assert_close(one.states, other.states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [tiny_model, lambda: cut(tiny_model())], ids=["dense", "cut"])
def test_a_quantized_cache_changes_the_states_and_a_batch_does_not(prompts, make, monkeypatch):
    model, kind = make(), rounded_kind(monkeypatch)
    new_cache = functools.partial(quantized_cache, kind=kind)
    texts = tokens_of(write(model, prompts, 8))
    exact = write_again(model, prompts, texts)
    rounded = write_again(model, prompts, texts, new_cache=new_cache, batch_size=5)
    for prompt, text, one, other in zip(prompts, texts, exact, rounded, strict=True):
        (alone,) = write_again(model, [prompt], [text], new_cache=new_cache)
        torch.testing.assert_close(alone.states, other.states, rtol=1e-4, atol=1e-4)
        # The first is chosen from what was read before the cache.
        assert (one.states[0] - other.states[0]).abs().max() < 1e-4
        assert (one.states[1:] - other.states[1:]).abs().max() > 1e-3


def test_rows_that_end_stay_in_a_quantized_cache(prompts, monkeypatch):
    """Its quantized part lets go of no row."""
    model = tiny_model()
    new_cache = functools.partial(quantized_cache, kind=rounded_kind(monkeypatch))
    whole = write(model, prompts, 10, new_cache=new_cache, batch_size=5)
    end = int(whole[2].tokens[4])
    for text, all_ in zip(
        write(model, prompts, 10, ends=[end], new_cache=new_cache, batch_size=5), whole, strict=True
    ):
        expected = all_.tokens.tolist()
        stop = expected.index(end) + 1 if end in expected else 10
        assert text.tokens.tolist() == expected[:stop]


def test_the_greedy_text_is_that_of_the_whole_text_read_again(prompts):
    model = tiny_model()
    for prompt, text in zip(prompts, write(model, prompts, 8), strict=True):
        ids = prompt[None]
        with torch.no_grad():
            for _ in range(8):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(text.tokens, ids[0, len(prompt) :])


def test_padding_is_on_the_left():
    ids, mask = padded([torch.tensor([7]), torch.tensor([8, 9])])
    assert (ids[:, -1].tolist(), mask.tolist()) == ([7, 9], [[0, 1], [1, 1]])


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_text_ends_with_the_first_end_token_and_the_others_go_on(prompts, family, batch_size):
    """Also where a cache holds recurrent states, out of which no row is taken."""
    if family == "falcon_h1":
        model = next(case for case in CASES if case.name == family).model(dtype=torch.float32)
    else:
        model = tiny_model(family)
    whole = tokens_of(write(model, prompts, 12, batch_size=5))
    ends = frozenset([int(whole[0][4]), int(whole[3][2])])
    for text, before in zip(
        write(model, prompts, 12, ends=ends, batch_size=batch_size), whole, strict=True
    ):
        first = next((n for n, token in enumerate(before.tolist()) if token in ends), 11)
        assert torch.equal(text.tokens, before[: first + 1])
        assert len(text.states) == first + 1


def test_rows_stay_in_a_cache_that_does_not_let_go(prompts, monkeypatch):
    model = tiny_model()
    ends = frozenset([int(write(model, prompts, 12)[0].tokens[4])])
    expected = tokens_of(write(model, prompts, 12, ends=ends))
    monkeypatch.setattr("rap.evaluation.quality.decoding._selects", lambda cache: False)
    kept = tokens_of(write(model, prompts, 12, ends=ends))
    assert all(torch.equal(*pair) for pair in zip(expected, kept, strict=True))
    assert len(kept[0]) < 12


def test_the_bar_is_full_at_the_end(prompts):
    class Bar:
        done = 0

        def advance(self, units=1):
            self.done += units

    bar, model = Bar(), tiny_model()
    ends = frozenset([int(write(model, prompts, 12)[0].tokens[4])])
    write(model, prompts, 12, ends=ends, batch_size=2, bar=bar)
    assert bar.done == 5 * 12


def test_attention_and_mode_are_put_back(prompts):
    model = tiny_model(attention_dropout=0.5).train()
    before = model.config._attn_implementation
    expected = write(tiny_model(), prompts, 6)
    # Inside, nothing is dropped.
    assert all(
        torch.equal(*pair)
        for pair in zip(tokens_of(write(model, prompts, 6)), tokens_of(expected), strict=True)
    )
    assert (model.config._attn_implementation, model.training) == (before, True)


def test_the_seed_draws_the_tokens_and_the_same_for_a_copy(prompts):
    model = tiny_model()
    first, again, other = (
        tokens_of(write(one, prompts, 20, sampling=Sampling(1.0, 1.0, seed=seed)))
        for one, seed in ((model, 3), (copy.deepcopy(model), 3), (model, 4))
    )
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(first, other, strict=True))
    assert not torch.equal(first[0], write(model, prompts, 20)[0].tokens)


def test_tokens_are_drawn_with_their_probability():
    """2,000 first tokens after one prompt; within five standard errors of the model's own share."""
    model, prompt = tiny_model(), random_tokens(1, 6)[0]
    with torch.no_grad():
        logits = model(prompt[None]).logits[0, -1]
    tokens, likely = nucleus((logits / 0.7).softmax(-1)[None], 0.8)
    expected = torch.zeros_like(logits).scatter(0, tokens[0], likely[0] / likely.sum())
    texts = write(model, [prompt] * 2000, 1, sampling=Sampling(0.7, 0.8), batch_size=500)
    found = torch.bincount(torch.cat(tokens_of(texts)), minlength=len(logits)) / 2000
    error = (expected * (1 - expected) / 2000).sqrt()
    assert ((found - expected).abs() <= 5 * error).all()
    assert 1 < int((found > 0).sum()) < len(logits)


def test_models_that_are_close_draw_the_same_tokens(prompts):
    """Luck is a token's, not its rank's, which the least change of a flat distribution moves."""
    model, asked = tiny_model(), Sampling(1.0, 1.0, seed=3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight = other.get_output_embeddings().weight
        torch.manual_seed(0)
        weight += 1e-2 * weight.std() * torch.randn_like(weight)
    first, second = (
        [text[0] for text in tokens_of(write(one, prompts, 1, sampling=asked))]
        for one in (model, other)
    )
    assert first == second


@pytest.mark.parametrize(("config", "ends"), [(2, {2}), ([2, 5], {2, 5}), (None, set())])
def test_the_generation_config_says_what_ends(config, ends):
    model = tiny_model()
    model.generation_config.eos_token_id = config
    assert end_tokens(model) == ends


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([7] * 256, True),
        ([7] * 255, False),
        (list(range(100, 500)) + [1, 2, 3] * 86, True),
        (list(range(64)) * 4, True),
        (list(range(65)) * 4, False),
        ([7] * 255 + [8], False),
        ([8] + [7] * 256, True),
        ([8] + [7] * 255, False),
        # A list whose numbers go on is no loop.
        ([token for n in range(60) for token in (1, 2, 100 + n, 4, 5)], False),
        ([], False),
    ],
)
def test_loops_by_hand(tokens, loops):
    assert ends_in_loop(tokens) is loops


@pytest.mark.parametrize(
    ("ours", "theirs", "share", "prefix"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0, 3),
        ([1, 2], [1, 2, 3, 4], 0.5, 2),
        ([1, 2, 3, 4], [1, 9], 0.25, 1),
        ([1, 9, 3], [1, 2, 3, 4], 0.5, 1),
    ],
)
def test_what_is_alike_is_of_the_longer_text(ours, theirs, share, prefix):
    assert alike(torch.tensor(ours), torch.tensor(theirs)) == (share, prefix)


def test_positions_are_of_the_texts_that_reach_them():
    texts = [torch.full((300,), 2.0), torch.full((64,), 1.0), torch.full((65,), 5.0)]
    found = by_position(texts, 1000)
    assert [(part.start, part.stop, part.num_texts) for part in found] == [
        (0, 64, 3),
        (64, 256, 2),
        (256, 1000, 1),
    ]
    assert [part.kl.value for part in found] == [pytest.approx(8 / 3), 3.5, 2.0]
    assert len(by_position(texts[1:2], 1000)) == 1
    assert [part.stop for part in by_position(texts, 300)] == [64, 256, 300]


def test_an_end_token_is_counted_but_is_no_word():
    loop = torch.tensor([7] * 256 + [0])
    found = summary([loop, torch.arange(1, 11)], [torch.ones(257), torch.zeros(10)], 300, {0})
    assert found.length.value == (257 + 10) / 2
    assert found.ended == found.looping == share_interval(0.5, 2)
    assert found.repetition == mean_interval([1 - 1 / 253, 0.0])
    assert found.kl.value == 0.5


def test_the_divergence_is_the_one_computed_directly(prompts):
    model, dense = tiny_model(seed=1), tiny_model()
    texts, dense_texts = write(model, prompts, 12), write(dense, prompts, 12)
    found = compare_answers(model, dense, prompts, texts, dense_texts, num_tokens=12, ends=NONE)
    for one_side, written in ((found.pruned, texts), (found.dense, dense_texts)):
        expected = []
        for prompt, text in zip(prompts, written, strict=True):
            ids = torch.cat([prompt, text.tokens])[None]
            with torch.no_grad():
                ours, theirs = (
                    one(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
                    for one in (model, dense)
                )
            expected.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
        assert one_side.kl.value == pytest.approx(math.fsum(expected) / 5, rel=1e-4)
        assert one_side.positions[0].kl.value == pytest.approx(one_side.kl.value)
    assert found.pruned.kl.value != pytest.approx(found.dense.kl.value, rel=1e-2)
    assert found.agreement.value < 0.5


def test_a_model_answers_like_itself(prompts):
    model = tiny_model()
    texts = write(model, prompts, 12, sampling=Sampling())
    found = compare_answers(
        model, copy.deepcopy(model), prompts, texts, texts, num_tokens=12, ends=NONE
    )
    assert (found.agreement.value, found.common_prefix.value) == (1.0, 12.0)
    assert found.pruned.length == found.dense.length
    assert found.pruned.repetition == found.dense.repetition
    # States of decoding and of one pass differ by rounding alone.
    assert found.pruned.kl.value < 1e-6


def test_a_divergence_that_is_not_finite_is_refused(prompts):
    model = tiny_model()
    texts = write(model, prompts[:1], 3)
    broken = [Text(texts[0].tokens, texts[0].states * math.nan)]
    with pytest.raises(RapError, match="not finite; check the checkpoint"):
        compare_answers(model, model, prompts[:1], broken, texts, num_tokens=3, ends=NONE)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_senseless_sampling_is_refused(changes):
    with pytest.raises(RapError, match=next(iter(changes))):
        Sampling(**changes)


def test_the_bundled_prompts_are_fifty_of_many_kinds():
    lines = [json.loads(line) for line in assets.prompts_path().read_text().splitlines()]
    assert [line["text"] for line in lines] == read_prompts("bundled")
    assert (len(lines), len({line["text"] for line in lines})) == (50, 50)
    assert len({line["kind"] for line in lines}) == 14


def test_prompts_are_read_from_lines(tmp_path):
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("Say hello.\n\n  Count to ten. \n")
    lines.write_text('{"text": "Say hello.\\nTwice."}\n\n{"kind": "x", "text": "Count."}\n')
    assert read_prompts(str(plain)) == ["Say hello.", "Count to ten."]
    assert read_prompts(str(lines)) == ["Say hello.\nTwice.", "Count."]
    plain.write_text("\n")
    with pytest.raises(RapError, match="has no prompt: write one a line"):
        read_prompts(str(plain))
    with pytest.raises(RapError, match="no file"):
        read_prompts(str(tmp_path / "q.txt"))


def test_a_prompt_is_what_the_template_makes_of_it(tokenizer):
    own = copy.deepcopy(tokenizer)
    with pytest.raises(RapError, match="no chat template"):
        chat_tokens(["Hello."], own)
    own.chat_template = TEMPLATE
    (found,) = chat_tokens(["Hello."], own)
    assert own.decode(found) == "Q: Hello.\nA:"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory, tokenizer):
    """The bundled model with a template of a chat, as a checkpoint."""
    folder = tmp_path_factory.mktemp("chatty")
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    own.save_pretrained(folder)
    assets.reference_model().save_pretrained(folder)
    return folder


def test_the_command_answers_and_writes(chatty, tmp_path):
    output = tmp_path / "answers.json"
    call = ("evaluate", "generation", chatty, "--dense", chatty, "--chat", "bundled")
    few = ("--prompts", 3, "--tokens", 6)
    found = run(*call, *few, "--json", "-o", output)
    assert found.code == 0, found.err
    assert json.loads(output.read_text()) == found.json
    assert found.json["agreement"]["value"] == 1.0
    assert found.json["num_prompts"] == 3
    assert found.json["pruned"]["kl"]["value"] < 1e-5
    assert "KL along it, 0 to 5" in run(*call, *few).out
    assert found.json["bits"] is None
    drawn = [run(*call, *few, "--temperature", 0.9, "--top-p", 0.8, "--json") for _ in range(2)]
    assert drawn[0].json["pruned"] == drawn[1].json["pruned"] != found.json["pruned"]


def test_the_command_reads_with_a_quantized_cache(chatty, tmp_path, monkeypatch):
    """The KL along both answers is that of the cache; the dense model keeps its own."""
    kind = rounded_kind(monkeypatch)
    call = ("evaluate", "generation", chatty, "--dense", chatty, "--tokens", 40, "--prompts", 2)
    plain, found = (
        run(*call, "--chat", "bundled", *bits, "--json") for bits in ((), ("--bits", kind))
    )
    assert found.code == 0, found.err
    assert found.json["bits"] == kind
    assert found.json["dense"]["length"] == plain.json["dense"]["length"]
    for who in ("pruned", "dense"):
        assert plain.json[who]["kl"]["value"] < 1e-5 < 1e-4 < found.json[who]["kl"]["value"]
    monkeypatch.setattr(generation_cli, "quantized_cache", mock.Mock(wraps=quantized_cache))
    assert run(*call, "--bits", kind, "--json").code == 0
    generation_cli.quantized_cache.assert_called_once()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bits", "hqq5"), "unknown cache 'hqq5'"),
        (("--chat", "bundled", "--text", "bundled"), "remove --text"),
        (("--chat", "bundled", "--prompt-tokens", 9), "remove --prompt-tokens"),
        (("--chat", "bundled", "--bos", "never"), "remove --bos"),
        (("--temperature", 0.5), "--temperature needs --chat"),
        (("--chat", "bundled", "--top-p", 0.5), "give a --temperature too"),
        (("--chat", "bundled", "--temperature", -1), "cannot be -1.0: it should be greater than 0"),
        (("--chat", "bundled", "--tokens", 0), "at least 1"),
        (("--chat", "bundled", "--prompts", 51), "50 prompts, not 51: use fewer"),
    ],
)
def test_options_that_do_not_go_together_are_refused(chatty, options, message):
    found = run("evaluate", "generation", chatty, "--dense", chatty, *options)
    assert found.code == 2
    assert message in found.err


def test_options_that_do_not_go_together_are_refused_before_a_model_is_read():
    found = run("evaluate", "generation", "nowhere", "--dense", "nowhere", "--bits", "hqq5")
    assert found.code == 2
    assert "unknown cache 'hqq5'" in found.err


def test_a_dense_model_of_another_vocabulary_is_refused_first(chatty, tmp_path, monkeypatch):
    tiny_model(vocab_size=96).save_pretrained(tmp_path / "other")
    monkeypatch.setattr(generation_cli, "write", mock.Mock(side_effect=AssertionError("wrote")))
    result = run(
        "evaluate", "generation", chatty, "--dense", tmp_path / "other", "--chat", "bundled"
    )
    assert error_violations(result) == []
    assert "vocabular" in result.err


def test_a_model_without_a_template_is_refused():
    found = run("evaluate", "generation", "bundled", "--dense", "bundled", "--chat", "bundled")
    assert found.code == 2
    assert "no chat template" in found.err


def test_positions_count_the_tokens_of_the_prompt_alone():
    """Pairs do not feel where a text begins, but scalings of positions do."""
    model, seen = tiny_model(), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
    )
    write(model, [torch.tensor([3, 4, 5]), torch.tensor([6])], 2)
    assert [one.tolist() for one in seen] == [[[0, 0, 0], [0, 1, 2]], [[1], [3]]]
    seen.clear()
    write(model, [torch.tensor([3, 4]), torch.tensor([6, 7])], 2)
    assert seen == [None, None]


def test_states_go_to_the_head_that_reads_them(prompts, monkeypatch):
    """On another device than the CPU, where texts keep their own; `meta` stands for it."""
    model, read_on = tiny_model(), []
    texts = write(model, prompts[:1], 3)

    def on_meta(one, prompt_P, tokens_T):
        return torch.empty(len(tokens_T), 8, device="meta")

    def chunks(head, output, states_TE, step):
        read_on.append(states_TE.device.type)
        yield torch.zeros(len(states_TE), 4)

    monkeypatch.setattr(answers, "read", on_meta)
    monkeypatch.setattr(answers.Head, "chunks", chunks)
    answers.divergences(model, copy.deepcopy(model), prompts[:1], texts, texts)
    assert read_on == ["meta"] * 4


def test_chosen_tokens_go_where_the_mask_is(prompts):
    """A model spread over devices ends on another than it began on; `meta` stands for it."""
    batch = decoding._Batch(tiny_model(), prompts[:2], [0, 1], decoding._Chosen(NONE, None), None)
    batch.mask_BS = batch.mask_BS.to("meta")
    batch._next(torch.tensor([1, 2]), set())
    assert (batch.ids.device.type, batch.mask_BS.shape) == ("meta", (2, 10))
