"""A model's own samples as a source: drawn once for its weights, kept, read by every command."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rap
from cases.command import run
from cases.models import tiny_model
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.data import own, sampling
from rap.data.own import own_samples
from rap.data.sampling import Corpus, write_documents
from rap.data.text import check_sources, load_windows, named_sources, read_text
from rap.model.errors import CalibrationError, CheckpointError

GENERAL_A = ["a.txt", "repeated:a.txt", "own", "python"]
FEW = Corpus(documents=6, tokens=256, batch_size=6)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The models that were asked to write, with few documents each, and an empty cache."""
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(own, "SAMPLES", FEW)
    asked: list[Any] = []

    def write(model: Any, *rest: Any, **more: Any) -> None:
        asked.append(model)
        write_documents(model, *rest, **more)

    monkeypatch.setattr(own, "write_documents", write)
    return asked


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.txt"
    file.write_text(rap.assets.reference_text("validation")[:60_000], encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("general:a.txt", GENERAL_A),
        ("general:bundled", ["bundled", "repeated:bundled", "own", "python"]),
        ("general:a.txt, general:b", [*GENERAL_A, "b", "repeated:b"]),
        ("own,own", ["own"]),
        ("general:", ["general:"]),
    ],
)  # fmt: skip
def test_general_is_four_sources_and_own_is_there_once(text: str, sources: list[str]) -> None:
    assert named_sources(text) == sources


def test_a_file_with_a_comma_is_one_source_of_three(tmp_path: Path) -> None:
    file = tmp_path / "a,b.txt"
    file.write_text("words", encoding="utf-8")
    assert named_sources(f"general:{file}") == [str(file), f"repeated:{file}", "own", "python"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("general:", "unknown data source 'general:': give 'bundled'"),
        ("general:absent.txt", "there is no file absent.txt"),
        ("repeated:general:bundled", "has 'general:' inside: write it once, and first"),
        ("general:general:bundled", "has 'general:' inside: write it once, and first"),
    ],
)
def test_what_general_cannot_be_of_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        check_sources(text)


def test_samples_are_drawn_once_for_the_weights(
    drawn: list[Any], tokenizer: Any, reference_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = own_samples(reference_model, tokenizer, progress=True)
    said = capsys.readouterr().err
    assert "the model writes 6 documents of 256 tokens, once for its weights" in said
    assert "own samples: written in" in said
    again = own_samples(reference_model, tokenizer, progress=True)
    assert f"own samples: reading {again}, which the model wrote before" in capsys.readouterr().err
    assert (first, len(drawn)) == (again, 1)
    assert len(first.read_text(encoding="utf-8").splitlines()) == 6
    record = json.loads(first.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["samples"]["model"] == rap.fingerprint_model(reference_model)
    other = rap.assets.reference_model(torch.float32)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    assert own_samples(other, tokenizer) != first
    assert len(drawn) == 2


def test_other_settings_of_the_sampling_are_other_samples(
    drawn: list[Any], tokenizer: Any, reference_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own_samples(reference_model, tokenizer)
    monkeypatch.setattr(own, "SAMPLES", replace(FEW, temperature=0.5))
    assert own_samples(reference_model, tokenizer) != first


def test_documents_are_no_longer_than_the_model_was_made_for(
    drawn: list[Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "SAMPLES", replace(FEW, tokens=10_000, documents=1))
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=48)
    path = own_samples(model, tokenizer)
    assert json.loads(path.with_suffix(".json").read_text())["samples"]["tokens"] == 48


def test_general_windows_are_those_of_the_sources_written_out(
    drawn: list[Any], tokenizer: Any, reference_model: Any, mine: Path
) -> None:
    sizes = {"num_windows": 8, "window": 64}
    found = load_windows(f"general:{mine}", tokenizer, **sizes, model=reference_model)
    file = own_samples(reference_model, tokenizer)
    written = f"{mine},repeated:{mine},{file},python"
    assert torch.equal(found, load_windows(written, tokenizer, **sizes))


def test_without_a_model_the_source_says_what_to_give(tokenizer: Any, mine: Path) -> None:
    message = (
        f"run `rap sample MODEL -o own.jsonl` .* give {mine},repeated:{mine},own.jsonl,python "
        "instead"
    )
    with pytest.raises(CalibrationError, match=message):
        load_windows(f"general:{mine}", tokenizer)
    with pytest.raises(CalibrationError, match=r"repeated:own\.jsonl instead"):
        read_text("repeated:own")
    with pytest.raises(
        CalibrationError, match="has 4 sources, but only one is supported; give one of"
    ):
        read_text(f"general:{mine}")


def test_compress_and_recover_share_samples_and_report_them(
    drawn: list[Any], tmp_path: Path, mine: Path
) -> None:
    out = tmp_path / "out"
    asked = ["--method", "rap:general", "--calibration", f"general:{mine}"]
    asked += ["--windows", "8", "--window", "64", "--evaluate", "none", "--json"]
    report = json.loads(run("compress", "bundled", "-o", out, *asked).out)
    rest = "without its held-out tail"
    shown = f"mine.txt {rest} and repeated:mine.txt {rest} and own (written by the dense model)"
    shown += " and Python's standard library (modules e to z)"
    assert shown in report["calibration"]
    assert shown in (out / "README.md").read_text(encoding="utf-8")
    sources = f"train:{mine},repeated:train:{mine},own,python"
    assert report["provenance"]["settings"]["calibration"] == sources
    assert report["own_samples"]["documents"] == 6
    # A teacher whose weights are rounded would write other samples.
    for dtype in ("auto", "rtn4-tensor", "bfloat16"):
        recovered = run(
            *("recover", out, "-o", tmp_path / dtype, "--teacher", "bundled", "--preset", "fit"),
            *("--text", f"general:{mine}", "--set", "steps=1", "--set", "num_windows=8"),
            *("--set", "window=32", "--set", "validation_windows=3", "--evaluate", "none"),
            *("--teacher-dtype", dtype, "--json"),
        )
        recovery = json.loads(recovered.out)["recovery"]
        assert recovery["texts"] == [sources]
        assert recovery["own_samples"] == report["own_samples"]
        assert len(drawn) == 1


def test_plan_and_compare_take_the_name_too(drawn: list[Any], tmp_path: Path) -> None:
    sizes = ["--windows", "4", "--window", "64", "--calibration", "general:bundled"]
    plan = tmp_path / "half.rap"
    assert run("plan", "bundled", "-o", plan, "--method", "rap:general", *sizes).code == 0
    grid = ["--methods", "rap:general", "--retain", "0.5", "-o", tmp_path / "grid"]
    less = ["num_windows=1", "window=64", "recall_documents=0", "decode_steps=0"]
    measured = [part for one in less for part in ("--measure", one)]
    result = run("compare", "bundled", *grid, *sizes, *measured, "--json")
    cells = json.loads(result.out)["cells"]
    assert [cell["method"] for cell in cells] == ["dense", "rap:general"]
    assert (
        json.loads(result.out)["provenance"]["settings"]["calibration"]
        == "bundled,repeated:bundled,own,python"
    )
    assert len(drawn) == 1


def test_a_model_that_is_not_in_memory_says_what_to_do_first(tmp_path: Path, mine: Path) -> None:
    asked = ["--stream", "--calibration", f"general:{mine}", "-o", tmp_path / "out"]
    result = run("compress", "bundled", *asked)
    assert result.code == 2
    assert result.err == (
        "error: source 'own' is text by the model itself, which --stream does not hold: run `rap "
        f"sample MODEL -o own.jsonl` where it fits, and give train:{mine},repeated:train:{mine},"
        "own.jsonl,python instead\n"
    )


def test_samples_that_a_killed_process_left_unfinished_are_drawn_to_the_end(
    drawn: list[Any], tokenizer: Any, reference_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "SAMPLES", replace(FEW, batch_size=2))
    whole = own_samples(reference_model, tokenizer)
    bytes_before = whole.read_bytes()
    whole.unlink()
    taken = sampling.draw

    def stopped(*arguments: Any, start: int = 0, **more: Any) -> Any:
        if start:
            raise KeyboardInterrupt
        return taken(*arguments, start=start, **more)

    monkeypatch.setattr(sampling, "draw", stopped)
    with pytest.raises(KeyboardInterrupt):
        own_samples(reference_model, tokenizer)
    assert not whole.exists()
    monkeypatch.setattr(sampling, "draw", taken)
    assert own_samples(reference_model, tokenizer).read_bytes() == bytes_before


@pytest.mark.parametrize(
    ("opening", "chats"), [((5, 6), 0.5), (tuple(range(200)), 0.0), (None, 0.0)]
)
def test_a_chat_model_writes_chats_too_where_its_template_leaves_room(
    drawn: list[Any],
    tokenizer: Any,
    reference_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    opening: tuple[int, ...] | None,
    chats: float,
) -> None:
    monkeypatch.setattr(own, "SAMPLES", replace(FEW, chats=0.5))
    for module in (own, sampling):
        monkeypatch.setattr(module, "chat_opening", lambda _: opening)
    path = own_samples(reference_model, tokenizer)
    assert json.loads(path.with_suffix(".json").read_text())["samples"]["chats"] == chats


def test_what_cannot_be_read_is_refused_before_the_model_writes(
    drawn: list[Any], tokenizer: Any, reference_model: Any, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("few words", encoding="utf-8")
    sizes = {"num_windows": 8, "window": 64}
    with pytest.raises(CalibrationError, match="short"):
        load_windows(f"own,{short}", tokenizer, **sizes, model=reference_model)
    reading = CalibrationText("own", num_windows=8, window=100_000)
    with pytest.raises(CalibrationError, match="windows have 100000 tokens"):
        _ = DenseContext.open(reference_model, tokenizer, reading=reading).windows
    assert drawn == []


def test_a_cache_that_may_not_be_written_to_names_what_to_set(
    drawn: list[Any], tokenizer: Any, reference_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rap.checkpoint.files.os.access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=r"may not be written to.*set RAP_HOME"):
        own_samples(reference_model, tokenizer)
    assert drawn == []


def test_another_chat_template_is_of_other_samples(
    drawn: list[Any], tokenizer: Any, reference_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "SAMPLES", replace(FEW, chats=0.5))
    chatting, paths = copy.deepcopy(tokenizer), []
    for name in ("User", "Human", "Human"):
        chatting.chat_template = name + ": {{ messages[0].content }}"
        paths.append(own_samples(reference_model, chatting))
    assert paths[0] != paths[1] == paths[2]
    assert len(drawn) == 2
