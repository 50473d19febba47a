"""A text that comes again, passage by passage: what is repeated, how far back, who reads it."""

from itertools import pairwise

import pytest
import torch

from rap.calibration.dense_context import CalibrationText
from rap.data import splits
from rap.data.splits import GROUP, PASSAGE, repeat_passages
from rap.data.text import load_windows, read_text, shown_name
from rap.model.errors import CalibrationError
from rap.recovery.config import RecoveryConfig
from rap.recovery.data import recovery_windows, validation_text

WORDS = [f"w{number}" for number in range(5000)]


def passages(text):
    return text.split("\n\n")


def test_every_word_comes_twice_and_passages_are_whole():
    found = passages(repeat_passages(" ".join(WORDS)))
    places = {}
    for place, passage in enumerate(found):
        places.setdefault(passage, []).append(place)
    assert all(len(both) == 2 for both in places.values())
    assert [word for passage in places for word in passage.split()] == WORDS
    lengths = [len(passage.split()) for passage in list(places)[:-1]]
    assert PASSAGE[0] <= min(lengths) < max(lengths) <= PASSAGE[1]
    # The last of a group may come again at once, the first after all others twice.
    away = [second - first for first, second in places.values()]
    assert 1 <= min(away) < max(away) <= 2 * GROUP[1] - 1


def test_the_order_is_another_one_and_the_seed_decides(monkeypatch):
    text = " ".join(WORDS)
    repeated = repeat_passages(text)
    assert repeat_passages(text) == repeated
    found = passages(repeated)
    assert len(found) == 2 * len(set(found))
    starts = [int(passage.split()[0][1:]) for passage in found]
    backwards = sum(second < first for first, second in pairwise(starts))
    assert backwards > len(found) / 5  # read again in order, it would be one a group, a seventh
    monkeypatch.setattr(splits, "SEED", 1)
    assert repeat_passages(text) != repeated


def test_a_text_without_blanks_comes_again_too():
    text = "".join(chr(0x4E00 + number) for number in range(20000))
    found = passages(repeat_passages(text))
    once = list(dict.fromkeys(found))
    assert "".join(once) == text
    assert sorted(found) == sorted(2 * once)
    assert max(map(len, found)) <= 2 * PASSAGE[1]


@pytest.mark.parametrize("text", ["", "  \n ", "one"])
def test_short_texts(text):
    assert passages(repeat_passages(text)) == ([text, text] if text.strip() else [""])


def test_lines_inside_a_passage_stay():
    assert repeat_passages("a\nb\n\nc d") == "a\nb\n\nc d\n\na\nb\n\nc d"


def test_a_source_is_repeated_by_its_name(tmp_path, tokenizer):
    file = tmp_path / "mine.txt"
    file.write_text(" ".join(WORDS))
    assert read_text(f"repeated:{file}") == repeat_passages(read_text(file))
    assert shown_name(f"repeated:{file}") == "repeated:mine.txt"
    reading = CalibrationText(f"{file},repeated:{file}", num_windows=4, window=64)
    assert "from mine.txt and repeated:mine.txt" in reading.describe(None)
    windows = load_windows(reading.text, tokenizer, num_windows=4, window=64)
    assert windows.shape == (4, 64)
    with pytest.raises(CalibrationError, match=r"there is no file .*gone\.txt"):
        read_text("repeated:gone.txt")


def test_the_validation_split_of_a_repeated_source_is_repeated_too():
    assert validation_text("repeated:bundled") == repeat_passages(validation_text("bundled"))
    assert validation_text("repeated:mine.txt") is None


def test_nothing_that_judges_is_trained_on_beside_itself_repeated(tmp_path, tokenizer):
    file = tmp_path / "mine.txt"
    file.write_text(" ".join(WORDS))
    asked = RecoveryConfig(num_windows=200, window=64, validation_windows=6)
    train, held = recovery_windows([f"{file},repeated:{file}"], tokenizer, asked)
    runs = {tuple(row[i : i + 16].tolist()) for row in held for i in range(49)}
    assert len(held) >= 6
    assert len(train) > 20
    for row in train:
        assert runs.isdisjoint(tuple(row[i : i + 16].tolist()) for i in range(49))
    # Control: the two sources on their own do share some.
    alone = [
        recovery_windows([name], tokenizer, asked)[0] for name in (str(file), f"repeated:{file}")
    ]
    shared = {tuple(row[i : i + 16].tolist()) for row in torch.cat(alone) for i in range(49)}
    assert runs & shared
