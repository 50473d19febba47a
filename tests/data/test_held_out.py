"""The default evaluation dataset: a split of the calibration data that nothing else reads."""

import json

import pytest

from cases.command import run
from cases.fits import SHORT, ShortFit
from cases.models import tiny_model
from rap import RapError, assets
from rap.checkpoint.load import load
from rap.data import held_out, splits, text
from rap.data.held_out import (
    HELD_OUT,
    check_enough,
    dataset_name,
    evaluation_tokens,
    split,
)
from rap.data.splits import held_out_part, training_part
from rap.data.text import read_text
from rap.model.errors import CalibrationError
from rap.pipeline import compress

VOCABULARY = 4096
# So many that windows of all of the data would be in its tail.
SIZES = {"num_windows": 40, "window": 64}


@pytest.fixture
def mine(tmp_path):
    """A file whose first three quarters and last quarter tell themselves apart."""
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"Line {n} of the data, number {n}.\n" for n in range(800)))
    return path


@pytest.mark.parametrize("size", [40, 9_000, 600_000, 1_500_000, 50_000_000])
def test_the_tail_and_the_rest_are_the_text(size):
    text = ("x" * 39 + "\n") * (size // 40)
    head, tail = training_part(text), held_out_part(text)
    assert head + tail == text
    assert (head == "") or head.endswith("\n") or len(text) < 80
    least = min(splits.LEAST, len(text) // splits.SHORT_SHARE)
    assert least - 80 <= len(tail) <= max(least, min(len(text) // splits.SHARE, splits.MOST)) + 1
    one_line = "y" * size
    assert training_part(one_line) + held_out_part(one_line) == one_line


def test_a_split_is_by_the_source(mine):
    tail, rest = f"held-out:{mine}", f"train:{mine}"
    expected = {
        ("bundled", HELD_OUT): ("bundled", "bundled"),
        ("paper", HELD_OUT): ("paper", "wikitext2"),
        ("Salesforce/wikitext:wikitext-2-raw-v1:train", HELD_OUT): (None, "wikitext2"),
        ("c4", HELD_OUT): ("c4", "c4"),
        (str(mine), HELD_OUT): (rest, tail),
        (str(mine), None): (rest, None),
        (str(mine), tail): (rest, tail),
        (str(mine), "bundled"): (str(mine), "bundled"),
        (rest, HELD_OUT): (rest, tail),
        (f"repeated:{mine}", HELD_OUT): (f"repeated:{rest}", tail),
        (f"bundled,{mine},repeated:{mine}", HELD_OUT): (
            f"bundled,{rest},repeated:{rest}",
            f"bundled,{tail}",
        ),
        (f"{mine},bundled", f"repeated:{tail}"): (f"{rest},bundled", f"repeated:{tail}"),
        # By another spelling of its path too.
        (str(mine), f"held-out:{mine.parent}/../{mine.parent.name}/mine.txt"): (
            rest,
            f"held-out:{mine.parent}/../{mine.parent.name}/mine.txt",
        ),
        # What completes it is not evaluated, and keeps its tail, whether it is evaluated or not.
        ("encyclopedia,own,repeated:encyclopedia,python", HELD_OUT): (
            "train:encyclopedia,own,repeated:train:encyclopedia,python",
            "held-out:encyclopedia",
        ),
        ("bundled,own,repeated:encyclopedia,python", HELD_OUT): (None, "bundled"),
        ("bundled,own,repeated:encyclopedia,python", None): (None, None),
        ("encyclopedia,python", HELD_OUT): (
            "train:encyclopedia,python",
            "held-out:encyclopedia,python-test",
        ),
    }
    for (data, asked), (calibration, evaluate) in expected.items():
        assert split(data, asked) == (calibration or data, evaluate), (data, asked)
        assert split(*split(data, asked)) == split(data, asked), "known again"
    assert split("allenai/c4:de:train", None) == ("allenai/c4:de:train", None)
    general = f"{rest},repeated:{rest},own,python"
    assert split(f"general:{mine}", HELD_OUT) == (general, tail)
    for none in ("allenai/c4:de:train", tail, "own", "wikitext2-test"):
        with pytest.raises(CalibrationError, match="has no held-out split; name another dataset"):
            split(none, HELD_OUT)


def test_datasets_are_named_without_folders(mine):
    assert dataset_name("bundled") == "bundled novels (test split)"
    assert dataset_name("paper") == dataset_name("wikitext2") == "WikiText-2 test"
    assert dataset_name(f"bundled,held-out:{mine}") == (
        "bundled novels (test split) and held-out tail of mine.txt"
    )
    assert dataset_name(str(mine)) == "mine.txt"


def test_parts_are_read_and_shared(mine, tokenizer, monkeypatch):
    assert read_text(f"train:{mine}") + read_text(f"held-out:{mine}") == mine.read_text()
    alone = [evaluation_tokens(name, tokenizer) for name in (f"held-out:{mine}", "bundled")]
    both = evaluation_tokens(f"held-out:{mine},bundled", tokenizer)
    assert len(both) == sum(map(len, alone))
    assert both[: 2 * 2048].tolist() == [*alone[0][:2048].tolist(), *alone[1][:2048].tolist()]


def test_a_tail_that_is_too_short_ends_in_one_line(mine):
    check_enough(f"held-out:{mine}", 128, 2048)
    with pytest.raises(RapError, match=r"held-out tail of mine.txt has 127 tokens, .* needs 128"):
        check_enough(f"held-out:{mine}", 127, 2048)
    with pytest.raises(RapError, match="one window needs 2048"):
        check_enough(str(mine), 2047, 2048)


@pytest.fixture
def read(monkeypatch):
    """All windows of data that anything is calibrated or trained on, as text."""
    texts: list[str] = []
    tokenizer = assets.reference_tokenizer()

    def noted(original):
        def reading(*given, **asked):
            found = original(*given, **asked)
            rows = found if isinstance(found, tuple) else (found,)
            texts.extend(tokenizer.decode(row) for one in rows for row in one)
            return found

        return reading

    for place in (
        "rap.calibration.dense_context.load_windows",
        "rap.recovery.stages.recovery_windows",
    ):
        module, _, name = place.rpartition(".")
        original = getattr(__import__(module, fromlist=[name]), name)
        monkeypatch.setattr(place, noted(original))
    return texts


def _apart(texts, mine):
    """Whether no window that was read has a line of the tail."""
    lines = [line for line in held_out_part(mine.read_text()).splitlines() if line]
    assert len(lines) > 100
    assert texts
    return not any(line in text for text in texts for line in lines)


def _named(report, mine):
    evaluation = report["pruned"]["evaluation"]
    return (evaluation["text"], evaluation["dataset"]) == (
        f"held-out:{mine}",
        "held-out tail of mine.txt",
    )


def test_compress_keeps_it_out_of_calibration_and_recovery(mine, tokenizer, tmp_path, read):
    model = tiny_model(vocab_size=VOCABULARY)
    asked = {"calibration": mine, "tokenizer": tokenizer, **SIZES}
    found = compress(model, 0.5, tmp_path / "out", recover="closed-form", **asked)
    assert _named(found.report, mine)
    assert _apart(read, mine)
    card = (tmp_path / "out" / "README.md").read_text()
    scored = found.report["pruned"]["evaluation"]
    windows = f"{scored['num_windows']} x {scored['window']:,} tokens"
    assert f"perplexity on held-out tail of mine.txt, {windows}" in card
    assert "mine.txt without its held-out tail" in card
    other = compress(model, 0.5, **asked, evaluate="bundled")
    assert not _apart(read, mine), "windows are drawn from all of it, where it is not evaluated on"
    assert other.report["pruned"]["evaluation"]["dataset"] == "bundled novels (test split)"


def test_streamed_too(mine, tokenizer, tmp_path, read, monkeypatch):
    dense = tmp_path / "dense"
    tiny_model(vocab_size=VOCABULARY).save_pretrained(dense)
    tokenizer.save_pretrained(dense)
    asked = {"calibration": mine, "recover": "fit", "fit": ShortFit(), **SIZES}
    report = compress(dense, 0.5, tmp_path / "out", stream=True, **asked).report
    assert _named(report, mine)
    assert _apart(read, mine)


def test_recover_too(mine, tokenizer, tmp_path, read):
    dense, out = tmp_path / "dense", tmp_path / "out"
    model = tiny_model(vocab_size=VOCABULARY)
    model.save_pretrained(dense)
    tokenizer.save_pretrained(dense)
    compress(model, 0.5, out, calibration="bundled", evaluate=None, tokenizer=tokenizer, **SIZES)
    read.clear()
    short = [word for name, x in SHORT.items() for word in ("--set", f"{name}={x}")]
    words = ("recover", out, "--teacher", dense, "--text", mine, *short)
    done = run(*words, "-o", tmp_path / "better")
    assert done.code == 0, done.err
    assert "Compared with the dense model on held-out tail of mine.txt" in done.out
    report = json.loads((tmp_path / "better" / "rap_report.json").read_text())
    assert _named(report, mine)
    assert _apart(read, mine)
    assert load(tmp_path / "better").config.rap


def test_plan_decides_as_compress_does(mine, tmp_path, read):
    small = ("--calibration", mine, "--windows", 40, "--window", 64)
    assert run("plan", "bundled", "-o", tmp_path / "p.rap", *small).code == 0
    assert _apart(read, mine)


def test_data_that_only_the_tail_would_complete_says_so(mine, tmp_path):
    words = ("compress", "bundled", "--calibration", mine, "-o", tmp_path / "out")
    refused = run(*words, "--windows", 12, "--window", 1024)
    assert refused.code == 2
    assert "mine.txt without its held-out tail, which is for evaluation" in refused.err


WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1"


@pytest.mark.parametrize(
    ("name", "judged", "calibrated"),
    [
        ("c4", "allenai/c4:en:validation", "allenai/c4:en:train"),
        ("paper", "Salesforce/wikitext:wikitext-2-raw-v1:test", None),
        ("wikitext-2-raw-v1", "Salesforce/wikitext:wikitext-2-raw-v1:test", None),
        ("wikitext2", f"{WIKITEXT}:test", f"{WIKITEXT}:validation"),
        ("wikitext2-test", f"{WIKITEXT}:test", f"{WIKITEXT}:test"),
        ("wikitext2-validation", f"{WIKITEXT}:validation", f"{WIKITEXT}:validation"),
        ("some/data:a:b", "some/data:a:b", "some/data:a:b"),
    ],
)
def test_a_text_to_judge_on_is_another_split(monkeypatch, tokenizer, name, judged, calibrated):
    read = []

    def dataset(source, most):
        read.append(source)
        return "some words"

    monkeypatch.setattr(text, "read_dataset", dataset)
    assert len(held_out.evaluation_tokens(name, tokenizer)) > 0
    text.read_text(name)
    assert read == [judged, calibrated or "Salesforce/wikitext:wikitext-2-raw-v1:train"]


def test_a_repeated_text_to_judge_on_is_of_the_same_split(monkeypatch, tokenizer):
    found = held_out.evaluation_tokens("repeated:bundled", tokenizer)
    plain = held_out.evaluation_tokens("bundled", tokenizer)
    assert len(found) > 1.9 * len(plain)
    assert found[:100].tolist() == plain[:100].tolist()
    read = []
    monkeypatch.setattr(text, "read_dataset", lambda source, most: read.append(source) or "words")
    held_out.evaluation_tokens("repeated:c4", tokenizer)
    assert read == ["allenai/c4:en:validation"]


@pytest.mark.parametrize(
    ("calibration", "evaluate", "instead"),
    [
        ("{mine}", "{mine}", "held-out:{mine} or on another dataset"),
        ("train:{mine}", "{folder}/../{name}/mine.txt", "held-out:{mine} or on another dataset"),
        ("bundled,repeated:encyclopedia", "encyclopedia", "held-out:encyclopedia or"),
        ("bundled,python", "bundled,python", "python-test or"),
        ("wikitext2", "wikitext2-validation", "wikitext2 or"),
        ("held-out:{mine}", "{mine}", "evaluate on another dataset"),
        ("held-out:{mine}", "held-out:{mine}", "evaluate on another dataset"),
        ("bundled,python", "held-out:python", "python-test or"),
        ("bundled", "held-out:bundled", "bundled or"),
        ("bundled", "train:bundled", "bundled or"),
    ],
)
def test_nothing_is_evaluated_that_is_calibrated_on(mine, calibration, evaluate, instead):
    named = {"mine": mine, "folder": mine.parent, "name": mine.parent.name}
    asked, evaluated, advice = (x.format(**named) for x in (calibration, evaluate, instead))
    with pytest.raises(CalibrationError, match="is calibrated on as well; evaluate on") as caught:
        split(asked, evaluated)
    assert advice in str(caught.value)


@pytest.mark.parametrize("name", ["bundled", "wikitext2", "paper", "c4"])
def test_a_source_with_a_split_of_its_own_is_evaluated_by_its_name(name):
    assert split(f"{name},repeated:{name}", name) == (f"{name},repeated:{name}", name)


def test_the_first_windows_of_a_short_context_see_every_part(tmp_path, tokenizer):
    files = []
    for word in ("one", "two", "three"):
        files.append(tmp_path / f"{word}.txt")
        files[-1].write_text(f"{word} " * 4000)
    alone = [evaluation_tokens(str(file), tokenizer) for file in files]
    mixed = evaluation_tokens(",".join(map(str, files)), tokenizer, 512)
    for place, part in enumerate(alone):
        assert mixed[place * 512 : (place + 1) * 512].equal(part[:512])
