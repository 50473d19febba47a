"""The context of a dense model: what it refuses, and what it reads only once."""

from types import SimpleNamespace

import pytest
import torch

import rap
from cases.models import random_tokens, tiny_model
from rap.calibration import dense_context
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.model.errors import CheckpointError, RapError, UnsupportedModelError

READING = CalibrationText(num_windows=2, window=64)


@pytest.fixture
def calls(monkeypatch):
    """The needs of every calibration that was really run."""
    asked = []
    real = dense_context.calibrate

    def counted(model, windows, needs, **options):
        asked.append(set(needs))
        return real(model, windows, needs, **options)

    monkeypatch.setattr(dense_context, "calibrate", counted)
    return asked


def _cut(model):
    method = rap.Rap.paper(retain=0.5, score="magnitude", align=2)
    statistics = rap.calibrate(model, random_tokens(1, 16), method.needs_for(model))
    return method.apply(model, method.plan(model, statistics))


def test_a_pruned_model_is_refused_before_anything_is_read(tokenizer, tmp_path):
    small = _cut(tiny_model())
    with pytest.raises(RapError, match="already pruned"):
        DenseContext.open(small, tokenizer)
    # A comparison used to go on with it, and fail cell by cell.
    with pytest.raises(RapError, match="already pruned"):
        rap.compare(small, tokenizer=tokenizer, output=tmp_path / "grid", methods=["rap"])
    assert not (tmp_path / "grid").exists()


def test_other_wrong_sources_are_refused(tokenizer):
    with pytest.raises(RapError, match="a live model has no tokenizer"):
        DenseContext.open(tiny_model())
    with pytest.raises(CheckpointError, match="there is no directory"):
        DenseContext.open("/nowhere/at/all")
    with pytest.raises(UnsupportedModelError):
        DenseContext.open(tiny_model("gpt2"), tokenizer)
    with pytest.raises(RapError, match="unknown bos"):
        DenseContext.open(tiny_model(), tokenizer, reading=CalibrationText(bos="perhaps"))


def test_statistics_are_collected_once_and_grow(calls):
    context = DenseContext.open("bundled", reading=READING)
    first = context.statistics({"energy"})
    assert context.statistics(set()) is first
    grown = context.statistics({"values"})
    assert grown.needs == {"energy", "values"}
    assert context.statistics({"energy"}) is grown
    assert calls == [{"energy"}, {"energy", "values"}]


def test_kept_statistics_serve_the_same_weights_and_text_alone(calls, tmp_path):
    def needs(**changes):
        reading = CalibrationText(**{"num_windows": 2, "window": 64, **changes})
        context = DenseContext.open("bundled", reading=reading, kept_in=tmp_path)
        return context.statistics({"energy"}).needs

    assert needs() == needs() == {"energy"}
    assert len(calls) == 1
    needs(seed=1)
    needs(window=32)
    assert len(calls) == 3


def test_kept_statistics_of_a_text_that_changed_are_not_taken(calls, tmp_path):
    path = tmp_path / "mine.txt"
    for words in ("some words of mine ", "quite other words "):
        path.write_text(200 * words, encoding="utf-8")
        reading = CalibrationText(str(path), num_windows=2, window=64)
        DenseContext.open("bundled", reading=reading, kept_in=tmp_path).statistics({"energy"})
    assert len(calls) == 2


def test_another_model_reads_the_same_windows(calls):
    context = DenseContext.open("bundled", reading=READING)
    collected = context.statistics({"energy"})
    other = context.on(rap.assets.reference_model(torch.float32))
    assert other.windows is context.windows
    assert other.statistics({"energy"}) is not collected
    assert len(calls) == 2


def test_a_report_names_a_file_without_its_folder(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("words")
    described = CalibrationText(str(path), 3, 128).describe(None)
    assert described == "3 windows of 128 tokens from mine.txt, without BOS"
    mixed = CalibrationText(f"bundled,{path}", 3, 128).describe(None)
    assert mixed == "3 windows of 128 tokens from bundled and mine.txt, without BOS"


def test_statistics_of_another_precision_are_not_taken(tmp_path):
    """On a CPU all is read in float32; elsewhere in the dtype of the weights."""

    def stored(device, dtype):
        context = DenseContext(SimpleNamespace(device=torch.device(device), dtype=dtype), None, "m")
        context.fingerprint, context.windows = "same", torch.zeros(1, 2, dtype=torch.long)
        return context._file(tmp_path).name

    assert stored("cpu", torch.bfloat16) == stored("cpu", torch.float32)
    assert stored("cuda", torch.float32) == stored("cpu", torch.float32)
    assert stored("cuda", torch.bfloat16) != stored("cuda", torch.float32)
