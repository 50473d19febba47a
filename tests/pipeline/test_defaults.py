"""What is read and recovered with by default: more for a model that people use, as given else."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import rap
from cases.command import run
from cases.family_cases import CASES
from cases.fits import ShortFit
from cases.models import tiny_model
from rap.checkpoint.files import read_json
from rap.cli.groups import CompletedOptions, ReadingOptions
from rap.data import own
from rap.data.sampling import Corpus
from rap.data.text import named_sources
from rap.methods import Rap
from rap.model.errors import RapError
from rap.pipeline import defaults
from rap.pipeline.defaults import DEFAULT, Defaults
from rap.pipeline.run import chosen
from rap.planning.plan import Plan
from rap.recovery import stages

WRITES, SILENT, TEST_MODEL = Defaults(True, True), Defaults(True, False), Defaults(False, False)


@pytest.fixture
def people_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every model counts as pretrained; it writes few samples and is fitted for a moment."""
    monkeypatch.setattr(defaults, "PRETRAINED", 1)
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(own, "SAMPLES", Corpus(documents=6, tokens=256, batch_size=6))
    monkeypatch.setattr(stages, "FitConfig", ShortFit)


@pytest.mark.parametrize(
    ("asked", "sources"),
    [
        (DEFAULT, ["bundled", "own", "repeated:encyclopedia", "python"]),
        ("bundled", ["bundled", "repeated:bundled", "own", "python"]),
        ("mine.txt", ["mine.txt", "repeated:mine.txt", "own", "python"]),
        ("wikitext2", ["wikitext2", "repeated:wikitext2", "own", "python"]),
        ("only:mine.txt", ["mine.txt"]),
        ("mine.txt,other.txt", ["mine.txt", "other.txt"]),
        ("repeated:mine.txt", ["repeated:mine.txt"]),
        ("general:mine.txt", ["mine.txt", "repeated:mine.txt", "own", "python"]),
        ("own", ["own"]),
        ("python", ["python", "repeated:python", "own"]),
        ("paper", ["paper"]),
    ],
)
def test_one_source_is_completed_and_what_is_said_exactly_is_not(
    asked: str, sources: list[str]
) -> None:
    assert named_sources(WRITES.calibration(asked)) == sources


def test_a_model_that_cannot_write_is_given_no_samples() -> None:
    found = named_sources(SILENT.calibration("mine.txt"))
    assert found == ["mine.txt", "repeated:mine.txt", "python"]
    found = named_sources(SILENT.calibration(DEFAULT))
    assert found == ["bundled", "repeated:bundled", "python"]


def test_fewer_windows_than_sources_are_of_the_given_one() -> None:
    assert WRITES.calibration("mine.txt", 3) == "mine.txt"
    assert WRITES.calibration(DEFAULT, 3) == "bundled"
    assert len(named_sources(WRITES.calibration(DEFAULT, 4))) == 4
    assert len(named_sources(WRITES.calibration("mine.txt", 4))) == 4


@pytest.mark.parametrize("asked", [DEFAULT, "bundled"])
def test_a_test_model_reads_what_it_is_given_and_is_left_as_pruned(asked: str) -> None:
    assert TEST_MODEL.calibration(asked) == "bundled"
    assert (TEST_MODEL.recovery(DEFAULT), TEST_MODEL.recovery("fit")) == ("none", "fit")
    assert (WRITES.recovery(DEFAULT), WRITES.recovery("none")) == ("fit", "none")


def test_pretrained_is_by_parameters_and_reads_no_weights(tmp_path: Path) -> None:
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    LlamaConfig(num_hidden_layers=4, vocab_size=32_000, **size).save_pretrained(tmp_path)
    assert Defaults.of(tmp_path) == SILENT  # no tokenizer, so nothing to begin a document with
    AutoTokenizer.from_pretrained(rap.assets.reference_path()).save_pretrained(tmp_path)
    assert Defaults.of(tmp_path) == WRITES
    assert Defaults.of(tmp_path, in_memory=False) == SILENT  # --stream
    assert Defaults.of("bundled") == Defaults.of(tiny_model()) == TEST_MODEL


def test_what_is_no_model_is_left_to_who_opens_it(tmp_path: Path) -> None:
    with pytest.raises(RapError, match=r"config\.json is missing"):
        rap.compress(tmp_path, output=tmp_path / "out")


@pytest.mark.usefixtures("people_use")
def test_a_compression_does_by_default_what_the_defaults_say(tmp_path: Path) -> None:
    done = run("compress", "bundled", "--windows", 4, "--window", 64, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    report = read_json(tmp_path / "out/rap_report.json", "")
    assert report["recovery"]["name"] == "fit"
    assert report["recovery"]["texts"] == ["bundled,own,repeated:encyclopedia,python"]
    assert report["own_samples"]["documents"] == 6
    assert report["method"]["reach"] == "far"
    assert "recovered" in done.out + done.err
    assert "--preset full" in done.err  # the fit is done


@pytest.mark.usefixtures("people_use")
def test_a_quick_look_and_one_text_alone_can_be_asked_for(tmp_path: Path) -> None:
    words = ("--calibration", "only:bundled", "--recover", "none", "-o", tmp_path / "out")
    done = run("compress", "bundled", "--windows", 4, "--window", 64, *words)
    assert done.code == 0, done.err
    report = read_json(tmp_path / "out/rap_report.json", "")
    assert (report["recovery"], "own_samples" in report) == ({}, False)
    assert "--text only:bundled" in done.err


@pytest.mark.usefixtures("people_use")
def test_layers_that_hand_values_on_are_not_recovered_by_default(tmp_path: Path) -> None:
    """A fit of them, one by one, is refused before anything is read."""
    tokenizer = AutoTokenizer.from_pretrained(rap.assets.reference_path())
    case = next(case for case in CASES if case.name == "gemma4_text")
    sizes = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    case.model(dtype=torch.float32, **sizes).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    words = ("compress", tmp_path / "dense", "--windows", 4, "--window", 64)
    words += ("--calibration", "only:bundled", "-o", tmp_path / "out")
    refused = run(*words, "--recover", "fit")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1), refused.err
    assert "recover end to end, by full, or by none" in refused.err
    done = run(*words)
    assert done.code == 0, done.err
    assert "--recover full distills end to end, on a GPU" in done.err
    assert "--preset full" in done.err
    assert read_json(tmp_path / "out/rap_report.json", "")["recovery"] == {}


@pytest.mark.usefixtures("people_use")
def test_how_far_foldings_are_compared_can_be_said(tmp_path: Path) -> None:
    read = ("--windows", 4, "--window", 64)
    plan = tmp_path / "half.rap"
    for more, reach in (((), "far"), (("--method", "rap:reach=90"), 90)):
        assert run("plan", "bundled", *read, *more, "-o", plan, "--force").code == 0
        assert Plan.load(plan).method["reach"] == reach
    published = ("--method", "rap:paper")  # which folds nothing
    assert run("plan", "bundled", *read, *published, "-o", plan, "--force").code == 0
    assert "reach" not in Plan.load(plan).method


def test_a_method_that_is_named_by_its_text_has_the_same_defaults() -> None:
    named, instead = chosen("rap", None, 0.5, 0, WRITES.settings)
    assert (named.reach, instead.reach) == ("far", "far")
    given = Rap(retain=0.5)
    assert chosen(given, None, 0.5, 0, WRITES.settings) == (given, None)
    assert (given.reach, TEST_MODEL.settings) == (None, {})


def test_a_comparison_reads_what_it_is_told_and_nothing_else() -> None:
    assert named_sources("only:mine.txt") == ["mine.txt"]
    assert (ReadingOptions().calibration, CompletedOptions().calibration) == ("bundled", DEFAULT)


@pytest.mark.usefixtures("people_use")
def test_a_dry_run_counts_the_samples_and_the_recovery(tmp_path: Path) -> None:
    said = run("compress", "bundled", "-o", tmp_path / "out", "--dry-run", "--json").json
    assert [step["step"] for step in said["steps"]] == ["sample", "calibrate", "fit", "evaluate"]
    alone = ("--calibration", "only:bundled", "--recover", "none")
    less = run("compress", "bundled", *alone, "-o", tmp_path / "out", "--dry-run", "--json").json
    assert [step["step"] for step in less["steps"]] == ["calibrate", "evaluate"]


def test_settings_of_the_distillation_are_changed_by_name(tmp_path: Path) -> None:
    short = ("num_windows=4", "validation_windows=2", "steps=2", "window=64", "held_out=0.25")
    words = [word for setting in short for word in ("--set", f"fit.{setting}")]
    read = ("--windows", 2, "--window", 64, "--evaluate", "none", "--recover", "fit")
    made = ("compress", "bundled", *read, *words, "--seed", 3, "-o", tmp_path / "out")
    counted = run(*made, "--dry-run", "--json").json
    assert [step["tokens"] for step in counted["steps"] if step["step"] == "fit"] == [4 * 64]
    done = run(*made)
    assert done.code == 0, done.err
    used = read_json(tmp_path / "out/rap_report.json", "")["recovery"]["fit"]["config"]
    assert (used["steps"], used["window"], used["seed"]) == (2, 64, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--recover", "none", "--set", "fit.steps=2"), "--set changes --recover fit, not none"),
        (("--recover", "fit", "--set", "steps=2"), "cannot set steps; write fit.NAME=VALUE"),
        (("--recover", "fit", "--set", "fit.stops=2"), "fit has no setting stops"),
    ],
)
def test_settings_that_would_not_be_read_are_refused(words, said, tmp_path: Path) -> None:
    refused = run("compress", "bundled", *words, "-o", tmp_path / "out")
    assert (refused.code, list(tmp_path.iterdir())) == (2, [])
    assert said in refused.err


def test_a_live_model_without_its_tokenizer_is_told_so(people_use: None) -> None:
    with pytest.raises(RapError, match="a live model has no tokenizer; pass tokenizer="):
        rap.compress(tiny_model(), 0.5)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"statistics": "absent"}, "--statistics requires --stream"),
        ({"stream": True, "dtype": "float16"}, "remove --dtype"),
        ({"stream": True, "device_map": "auto"}, "remove --dtype and --device-map"),
        ({"stream": True, "tokenizer": object()}, "remove tokenizer"),
    ],
)
def test_what_the_other_way_of_working_reads_is_refused(asked: dict, said: str, tmp_path) -> None:
    with pytest.raises(RapError, match=said):
        rap.compress("bundled", 0.5, tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()
