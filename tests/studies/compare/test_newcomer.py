"""A method of one file and a statistic of one class are everywhere once they are registered."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rap
from cases.command import error_violations, run
from cases.models import random_tokens, tiny_model
from cases.toys import Loudest, Peaks, registered
from rap import assets
from rap.calibration.memory import estimate_memory
from rap.model.errors import CalibrationError
from rap.model.layers import attention_layers, attention_spec, projections
from rap.studies.compare.variants import all_variants

TEXT = ("--calibration", "text.txt", "--windows", 2, "--window", 128)
QUICK = (
    "text=held-out:text.txt",
    "window=128",
    "num_windows=2",
    "recall_documents=0",
    "decode_steps=0",
)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a short text: all of the bundled one takes seconds to tokenize."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(assets.reference_text("test")[:12_000], encoding="utf-8")
    return tmp_path


def test_a_new_method_is_compared_and_reported(place: Path) -> None:
    assert "loudest" in all_variants()
    measured = [part for setting in QUICK for part in ("--measure", setting)]
    methods = "heads,loudest,loudest:square,rap:score=energy:budget=uniform:metric=output"
    result = run("compare", "--methods", methods, "--retain", 0.5, *TEXT, *measured, "-o", "out")
    assert result.code == 0, result.err
    assert "failed" not in result.err
    tables = json.loads((place / "out" / "compare.json").read_text(encoding="utf-8"))["tables"]
    (saves,) = [table for table in tables if table["title"].startswith("What each method saves")]
    families = {row[0]: row[1] for row in saves["rows"]}
    assert families["loudest"] == families["loudest:square"] == "peak pruning"
    # A family that the paper does not know follows those it knows.
    assert list(families)[-2:] == ["loudest", "loudest:square"]
    page = (place / "out" / "report.html").read_text(encoding="utf-8")
    assert "loudest:square" in page
    assert "peak pruning" in page


def test_a_new_method_makes_a_checkpoint_with_a_card(place: Path) -> None:
    made = ("--method", "loudest:square:align=4", "--retain", 0.5, "--evaluate", "none")
    result = run("compress", "bundled", "-o", "out", *TEXT, *made, "--json")
    assert result.code == 0, result.err
    assert result.json["method"] == Loudest.square(retain=0.5, align=4).describe()
    card = " ".join((place / "out" / "README.md").read_text(encoding="utf-8").split())
    assert f"method `loudest` of the rap package. It keeps {Loudest.summary}." in card
    assert rap.load(place / "out").config.model_type == "rap_llama"


def test_a_new_method_is_refused_as_clearly_as_the_others(place: Path) -> None:
    for text, reason in (
        ("loudest:loud", "method 'loudest' has no recipe 'loud'; it has: square"),
        ("loudest:power=much", "power cannot be 'much': it should be a valid number"),
    ):
        result = run("compress", "bundled", "-o", "out", *TEXT, "--method", text)
        assert error_violations(result) == []
        assert reason in result.err


def test_a_new_statistic_is_collected_counted_and_saved(tmp_path: Path) -> None:
    model, windows = tiny_model("qwen2"), random_tokens(3, 17)
    found = rap.calibrate(model, windows, {"peaks", "energy"})
    keys = projections(attention_layers(model)[0], attention_spec(model.config))["k"]
    seen: list[torch.Tensor] = []
    handle = keys.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(input_ids=windows)
    handle.remove()
    shape = attention_layers(model)[0].shape
    largest = seen[0].abs().amax((0, 1)).view(shape.num_kv_heads, -1)
    order = shape.geometry.canonical_order()
    torch.testing.assert_close(found.layers[0]["peak_k"], largest[:, order])
    found.save(tmp_path / "statistics")
    again = rap.Statistics.load(tmp_path / "statistics")
    assert again.needs == {"peaks", "energy"}
    assert torch.equal(again.layers[1]["peak_v"], found.layers[1]["peak_v"])
    # Two layers, keys and values, [2, 16] each, float32.
    assert estimate_memory(model, windows, {"peaks"})["accumulators"] == 2 * 2 * 2 * 16 * 4
    with pytest.raises(CalibrationError, match=r"use any of .*peaks"):
        rap.calibrate(model, windows, {"troughs"})
    assert Peaks.need == "peaks"
