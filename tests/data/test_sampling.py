"""Text that a model writes by itself: as it is drawn, kept over a kill, whole or not there."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.models import tiny_model
from rap import RapError
from rap.data import sampling
from rap.data.sampling import Corpus, chat_opening, draw, first_token, nucleus, write_documents
from rap.data.text import load_windows
from rap.evaluation.quality.generation import chat_tokens
from rap.model.errors import CheckpointError

ASKED = Corpus(documents=5, tokens=7, batch_size=2)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_every_token_follows_from_those_before(model: Any) -> None:
    # A nucleus of the likeliest token alone draws what is greedy, computed here without a cache.
    asked = replace(ASKED, top_p=1e-9)
    ids = torch.full((1, 1), 3)
    with torch.no_grad():
        for _ in range(asked.tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(draw(model, [3], 1, asked), ids[:, 1:])


@pytest.mark.parametrize("few", [1024, 2])  # a small vocabulary at once, or first without its tail
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.4, [0.5, 0]), (0.5, [0.5, 0]), (0.6, [0.5, 0.25]), (0.8, [0.5, 0.25, 0.125])],
)
def test_a_nucleus_is_the_fewest_tokens(
    top_p: float, kept: list[float], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "FEW", few)
    tokens, likely = nucleus(torch.tensor([[0.125, 0.5, 0.25, 0.125]]), top_p)
    assert tokens[0, :2].tolist() == [1, 2]
    found = likely[0].tolist()
    assert found == [*kept, *[0.0] * (len(found) - len(kept))]


def test_a_flat_distribution_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FEW", 2)
    flat = torch.full((1, 8), 1 / 8)
    tokens, likely = nucleus(flat, 1.0)
    assert set(tokens[0].tolist()) == set(range(8))
    assert torch.equal(likely, flat)
    assert nucleus(flat, 0.1)[0].shape == (1, 2)


def test_a_tail_that_is_short_is_not_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the first few tokens, four times as many are tried before the whole vocabulary."""
    monkeypatch.setattr(sampling, "FEW", 2)
    assert nucleus(torch.full((1, 64), 1 / 64), 0.1)[0].shape == (1, 8)


def test_the_attention_of_the_model_is_its_own_again(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    draw(model, [3], 1, ASKED)
    assert model.config._attn_implementation == "sdpa"


def test_temperature_spreads_what_is_drawn(model: Any) -> None:
    def kinds(temperature: float) -> int:
        asked = Corpus(tokens=64, temperature=temperature, top_p=1.0)
        return len(draw(model, [3], 4, asked).unique())

    assert kinds(0.05) < kinds(1.0)


def test_a_killed_run_goes_on_and_writes_the_same_bytes(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(model, tokenizer, tmp_path / "whole.jsonl", ASKED)
    drawn: list[int] = []

    def counted(*arguments: Any, start: int, **settings: Any) -> Any:
        if len(drawn) == 2:
            drawn.append(start)
            raise KeyboardInterrupt
        drawn.append(start)
        return draw(*arguments, start=start, **settings)

    monkeypatch.setattr(sampling, "draw", counted)
    output = tmp_path / "own.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write_documents(model, tokenizer, output, ASKED)
    assert not output.exists()
    write_documents(model, tokenizer, output, ASKED)
    assert drawn == [0, 2, 4, 4]
    written = output.read_bytes()
    assert written == (tmp_path / "whole.jsonl").read_bytes()
    assert len(set(written.splitlines())) == ASKED.documents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.jsonl", "whole.jsonl"]


def test_other_settings_do_not_go_on(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, starts = tmp_path / "own.jsonl", []

    def stopped(*arguments: Any, start: int, **settings: Any) -> Any:
        starts.append(start)
        if len(starts) == 2:
            raise KeyboardInterrupt
        return draw(*arguments, start=start, **settings)

    monkeypatch.setattr(sampling, "draw", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_documents(model, tokenizer, output, ASKED)
    write_documents(model, tokenizer, output, replace(ASKED, seed=1))
    assert starts == [0, 2, 0, 2, 4]


def test_what_it_writes_is_a_text_to_calibrate_on(
    reference_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    output = tmp_path / "own.jsonl"
    write_documents(reference_model, tokenizer, output, Corpus(documents=4, tokens=32))
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 4
    assert all(set(line) == {"text"} and line["text"].strip() for line in lines)
    assert load_windows(output, tokenizer, num_windows=2, window=16).shape == (2, 16)


def test_a_cpu_draws_in_the_precision_it_multiplies_fast(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def record(model: Any, *given: Any, **more: Any) -> torch.Tensor:
        drawn.append(model.dtype)
        return draw(model, *given, **more)

    monkeypatch.setattr(sampling, "draw", record)
    low = copy.deepcopy(model).to(torch.bfloat16)
    write_documents(low, tokenizer, tmp_path / "own.jsonl", replace(ASKED, documents=2))
    assert drawn == [torch.float32]
    assert low.dtype == torch.bfloat16


def test_a_file_is_not_replaced_unasked(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    output = tmp_path / "own.jsonl"
    output.write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="--force"):
        write_documents(model, tokenizer, output, ASKED)
    assert output.read_text(encoding="utf-8") == "mine"
    write_documents(model, tokenizer, output, ASKED, force=True)
    assert len(output.read_text(encoding="utf-8").splitlines()) == ASKED.documents


def test_documents_longer_than_the_model_was_made_for_are_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    short, output = tiny_model("llama", max_position_embeddings=7), tmp_path / "own.jsonl"
    with pytest.raises(RapError, match=r"of 8 tokens are longer than the 7 .* at most 7 tokens"):
        write_documents(short, tokenizer, output, replace(ASKED, tokens=8))
    assert list(tmp_path.iterdir()) == []
    write_documents(short, tokenizer, output, ASKED)  # as long as it can


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
START, END = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "bos", "end_of_text", "first"),
    [
        (None, START, True, START),  # as of most models
        (None, None, False, END),
        (None, None, True, "<|endoftext|>"),  # as of Qwen, whose chats end with another token
        (TURNS, START, True, "<|endoftext|>"),  # as of SmolLM2
        (TURNS, START, False, START),
        (START + TURNS.replace(START, ""), START, True, START),  # once a chat, as of Llama 3
    ],
)
def test_a_document_begins_behind_what_stands_before_one_in_pretraining(
    template: str | None, bos: str | None, end_of_text: bool, first: str, tokenizer: Any
) -> None:
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"bos_token": START, "eos_token": END})
    own.bos_token, own.chat_template = bos, template
    added = dict(own.get_added_vocab())
    if not end_of_text:
        added.pop("<|endoftext|>")
    own.get_added_vocab = lambda: added
    assert first_token(own) == own.convert_tokens_to_ids(first)


def test_a_chat_template_that_raises_an_error_opens_no_chat(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ raise_exception('a system message comes first') }}"
    assert chat_opening(own) is None
    assert first_token(own) == first_token(tokenizer)
    with pytest.raises(RapError, match=r"raises an error .* \(a system message comes first\)"):
        chat_tokens(["Name three fruits."], own)


def test_a_tokenizer_without_a_beginning_is_refused() -> None:
    bare = SimpleNamespace(bos_token_id=None, eos_token_id=None, get_added_vocab=dict)
    with pytest.raises(RapError, match="neither BOS nor EOS"):
        first_token(bare)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("documents", 0),
        ("tokens", 0),
        ("batch_size", 0),
        ("temperature", 0.0),
        ("top_p", 1.5),
        ("chats", 1.1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(RapError, match=f"sampling {name}"):
        Corpus(**{name: value})


def with_template(tokenizer: Any, template: str) -> Any:
    """The tokenizer with a chat template."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return own


TEMPLATE = "{% for m in messages %}Q: {{ m['content'] | trim }}\n{% endfor %}A:"


def test_the_opening_of_a_chat_is_what_stands_before_the_first_message(tokenizer: Any) -> None:
    found = chat_opening(with_template(tokenizer, TEMPLATE))
    assert found is not None
    assert tokenizer.decode(found) == "Q: "
    assert chat_opening(tokenizer) is None
    assert chat_opening(with_template(tokenizer, "A template without messages.")) is None


def test_a_share_of_chats_is_spread_among_the_documents(
    reference_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    own = with_template(tokenizer, TEMPLATE)
    asked = Corpus(documents=8, tokens=16, batch_size=3, chats=0.25)
    write_documents(reference_model, own, tmp_path / "mixed.jsonl", asked)
    write_documents(reference_model, own, tmp_path / "plain.jsonl", replace(asked, chats=0.0))
    mixed, plain = (
        [json.loads(line)["text"] for line in (tmp_path / name).read_text("utf-8").splitlines()]
        for name in ("mixed.jsonl", "plain.jsonl")
    )
    chats = [number for number, text in enumerate(mixed) if text.startswith("Q: ")]
    assert chats == [2, 6]
    assert [text for text in mixed if not text.startswith("Q: ")] == plain[:6]


@pytest.mark.parametrize(("adds", "text"), [(True, "Q: "), (False, "<bos>Q: ")])
def test_a_chat_keeps_no_bos_that_the_tokenizer_adds(
    adds: bool, text: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    own = with_template(tokenizer, "<bos>" + TEMPLATE)
    own.add_special_tokens({"bos_token": "<bos>"})
    bos = own.bos_token_id if adds else None
    monkeypatch.setattr(sampling, "bos_token", lambda *_: bos)
    prompt, kept = sampling._chat_prompt(own, Corpus(documents=1, tokens=16, chats=1.0))
    assert prompt[0] == own.bos_token_id
    assert kept == text


def test_chats_without_a_template_or_room_are_refused(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    output = tmp_path / "own.jsonl"
    with pytest.raises(RapError, match="no chat template"):
        write_documents(model, tokenizer, output, replace(ASKED, chats=0.5))
    wordy = with_template(tokenizer, "A system prompt of many words. " + TEMPLATE)
    with pytest.raises(RapError, match=r"draw documents of more than \d+ tokens"):
        write_documents(model, wordy, output, replace(ASKED, chats=0.5))
    assert list(tmp_path.iterdir()) == []
