"""Windows of text: which tokens they hold, that they repeat with the seed, and what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from cases.characters import Characters
from rap import assets
from rap.data.held_out import evaluation_tokens
from rap.data.text import (
    check_sources,
    completed_source,
    load_windows,
    named_sources,
    read_text,
    windows_from_text,
)
from rap.model.errors import CalibrationError


def as_text(row):
    return "".join(chr(code) for code in row.tolist())


def test_a_short_text_is_cut_into_windows_without_gap_or_overlap():
    text = "abcdefghijklmnopqrstuvwxyz"
    windows = windows_from_text(text, Characters(), num_windows=6, window=4)
    assert windows.dtype == torch.long
    assert [as_text(row) for row in windows] == ["abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx"]


def test_fewer_windows_than_the_text_holds_are_sampled_in_order():
    text = "abcdefghijklmnopqrstuvwxyz"
    first, again, other = (
        windows_from_text(text, Characters(), num_windows=3, window=2, seed=seed)
        for seed in (0, 0, 5)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first[:, 0].tolist() == sorted(first[:, 0].tolist())
    assert all((int(row[0]) - ord("a")) % 2 == 0 for row in first)


def test_a_long_text_is_sampled_over_its_whole_length_from_whole_words():
    words = [f"w{number:05d}" for number in range(3000)]
    windows = windows_from_text(" ".join(words), Characters(), num_windows=32, window=30)
    starts = [as_text(row)[:6] for row in windows]
    assert set(starts) <= set(words)
    assert starts == sorted(set(starts))
    assert starts[0] < "w00500"
    assert starts[-1] > "w02500"
    for row in windows:
        assert as_text(row) in " ".join(words)


def test_a_text_of_very_long_tokens_still_gives_windows():
    class Words(Characters):
        def __call__(self, text, **kwargs):
            return SimpleNamespace(input_ids=[len(word) for word in text.split()])

    text = " ".join(["a" * 63] * 64)
    windows = windows_from_text(text, Words(), num_windows=8, window=8)
    assert windows.tolist() == [[63] * 8] * 8


def test_the_bundled_text_gives_the_papers_number_of_windows(tokenizer):
    windows = load_windows("bundled", tokenizer)
    assert windows.shape == (32, 1024)
    assert len(torch.unique(windows, dim=0)) == 32
    assert tokenizer.decode(windows[7][:200]) in assets.reference_text("calibration")


@pytest.mark.parametrize(
    ("text", "asked", "message"),
    [
        ("", {}, "text is empty"),
        (" \n\t ", {}, "text is empty"),
        ("abc", {"num_windows": 1, "window": 4}, "has 3 tokens, one window needs 4"),
        ("a" * 10, {"num_windows": 3, "window": 4}, "10 tokens, enough for 2 windows of 4, not 3"),
        ("a" * 10, {"num_windows": 0, "window": 4}, "cannot take 0 windows of 4"),
        ("a" * 10, {"num_windows": 1, "window": 1}, "cannot take 1 windows of 1"),
    ],
)
def test_texts_that_are_too_short_are_refused_with_their_length(text, asked, message):
    with pytest.raises(CalibrationError, match=message) as caught:
        windows_from_text(text, Characters(), **asked)
    assert "\n" not in str(caught.value)


def test_sources_of_a_list_give_equal_shares(tokenizer, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(" ".join(f"number {n} of many." for n in range(400)), encoding="utf-8")
    windows = load_windows(f"bundled,{path}", tokenizer, num_windows=7, window=16)
    assert windows.shape == (7, 16)
    bundled = load_windows("bundled", tokenizer, num_windows=4, window=16)
    # In turns, so that the first windows alone are of both.
    assert torch.equal(windows[::2], bundled)
    assert torch.equal(windows[1::2], load_windows(path, tokenizer, num_windows=3, window=16))
    with pytest.raises(
        CalibrationError, match="1 windows cannot be shared by 2 sources; use --windows 2"
    ):
        load_windows(f"bundled,{path}", tokenizer, num_windows=1, window=16)


def test_a_file_with_a_comma_in_its_name_is_one_source(tmp_path):
    path = tmp_path / "a,b.txt"
    path.write_text("one", encoding="utf-8")
    assert named_sources(path) == [str(path)]
    assert named_sources(f"repeated:{path}") == [f"repeated:{path}"]
    assert named_sources("bundled, paper,") == ["bundled", "paper"]


def test_files_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8")
    entries = [{"id": "x", "text": "one"}, {"n": 1, "body": "two\u2028three"}, {"text": "four"}]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert read_text(tmp_path / "a.txt") == "one\ntwo"
    assert read_text(str(tmp_path / "a.jsonl")) == "one\n\ntwo\u2028three\n\nfour"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "there is no file .*absent.txt"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b"[1, 2]", "line 1 has no text"),
        ("a.jsonl", b'{"n": 1}', "line 1 has no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', "line 2 is no text: .*surrogates"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "line 1 is not JSON: .*digits"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON: .*recursion"),
        ("a.txt", b"\xff\xfe\xfa", "as UTF-8 text"),
        ("a.csv", b"x", "neither .txt nor .jsonl"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read_text(tmp_path / name)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets` that records what was asked for."""
    asked = []

    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split, streaming))
        if path == "absent":
            raise ConnectionError("Couldn't reach the hub\nsecond line")
        return iter([{"text": "first"}, {"text": "second"}, {"other": 3}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.parametrize(
    ("source", "request_made"),
    [
        ("paper", ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", False)),
        ("wikitext-2-raw-v1", ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", False)),
        ("c4", ("allenai/c4", "en", "train", True)),
        ("some/data", ("some/data", None, "train", False)),
        ("some/data:part:test", ("some/data", "part", "test", False)),
        ("some/data::test", ("some/data", None, "test", False)),
    ],
)
def test_datasets_are_asked_for_by_name_config_and_split(hub, source, request_made):
    assert read_text(source) == "first\n\nsecond\n\n"
    assert hub == [request_made]


def test_a_streamed_dataset_is_read_no_further_than_needed(hub):
    assert read_text("c4", max_characters=5) == "first"
    assert read_text("paper", max_characters=5) == "first\n\nsecond\n\n"


def test_a_dataset_out_of_reach_is_one_line_with_a_remedy(hub):
    message = r"cannot load the dataset 'absent' \(Couldn't reach the hub\): .* 'bundled'"
    with pytest.raises(CalibrationError, match=message) as caught:
        read_text("absent")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "unknown data source '': give 'bundled'"),
        (",", "unknown data source ',': give 'bundled'"),
        ("repeated:", "unknown data source 'repeated:': give 'bundled'"),
        ("bundled,repeated:repeated: ", "unknown data source"),
        ("folder", "folder is a directory: give 'bundled', .* or the name of a dataset"),
        ("bundled,repeated:folder", "folder is a directory"),
        ("bundled,repeated:absent.txt", "there is no file absent.txt"),
        (
            "It was a dark evening. " * 20,
            r"^unknown data source 'It was a dark evening\. .{17}'\.\.\.:",
        ),
    ],
)
def test_what_is_no_text_is_no_dataset_either(tmp_path, monkeypatch, source, message):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    for read in (check_sources, lambda source: load_windows(source, Characters())):
        with pytest.raises(CalibrationError, match=message) as caught:
            read(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [",", "repeated:", "."])
def test_a_held_out_text_is_no_dataset_without_a_name(monkeypatch, source):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match=r"unknown data source|\. is a directory"):
        evaluation_tokens(source, Characters())


def test_sources_that_there_are_pass_without_being_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper").mkdir()
    (tmp_path / "own.jsonl").write_text("not read", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "datasets", None)
    check_sources("bundled,repeated:bundled, paper, own.jsonl, some/dataset:config:split,")


def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("words", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "words"}', encoding="utf-8-sig")
    assert [read_text(tmp_path / name) for name in ("a.txt", "b.jsonl")] == ["words", "words"]


def test_a_name_with_a_comma_is_not_completed(tmp_path):
    file = tmp_path / "a,b.txt"
    file.write_text("words")
    with pytest.raises(CalibrationError, match=r"a,b\.txt has a comma, .* or give only:"):
        completed_source(str(file))
    assert completed_source(f"only:{file}") == f"only:{file}"
