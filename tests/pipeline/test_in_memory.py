"""`rap.compress` of a model in memory, called as programs call it."""

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model

import rap
from cases.models import tiny_model
from cases.plans import random_plan
from rap import assets
from rap.calibration import dense_context
from rap.pipeline import run
from rap.pipeline.report import save


def test_paths_and_numbers_of_numpy_are_taken(tokenizer, tmp_path: Path) -> None:
    """They end in JSON, which is written last."""
    text = tmp_path / "mine.txt"
    text.write_text(assets.reference_text("calibration")[:6_000], encoding="utf-8")
    other = tmp_path / "other.txt"
    other.write_text(assets.reference_text("validation")[:6_000], encoding="utf-8")
    model = tiny_model(vocab_size=len(tokenizer))
    rap.compress(
        model,
        np.float32(0.5),
        tmp_path / "out",
        tokenizer=tokenizer,
        calibration=text,
        evaluate=other,
        num_windows=np.int64(2),
        window=np.int64(32),
    )
    report = json.loads((tmp_path / "out" / "rap_report.json").read_text(encoding="utf-8"))
    assert report["calibration"].startswith("2 windows of 32 tokens from mine.txt")
    assert rap.load(tmp_path / "out").config.rap["retain"] == 0.5
    seconds = report["provenance"]["seconds"]
    assert set(seconds) == {"read", "calibrate", "prune", "recover", "evaluate"}
    assert sum(seconds.values()) > 0


def test_a_recovery_that_was_stopped_goes_on_from_the_same_statistics(
    tokenizer, tmp_path: Path, monkeypatch
) -> None:
    """Sums on a GPU differ each time: a second calibration could cut another model."""
    text = tmp_path / "mine.txt"
    text.write_text(assets.reference_text("calibration")[:9_000], encoding="utf-8")
    model = tiny_model(vocab_size=len(tokenizer))
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "calibration": text,
        "evaluate": None,
        "num_windows": 2,
        "window": 32,
        "recover": "fit",
    }
    out = tmp_path / "out"
    monkeypatch.setattr(run, "recover_stage", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        rap.compress(model, 0.5, out, **given)
    assert not out.exists()

    monkeypatch.setattr(dense_context, "calibrate", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(run, "recover_stage", lambda small, *_, **__: (small, {}))
    rap.compress(model, 0.5, out, **given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "out"]


def test_a_plan_that_cannot_be_leaves_no_statistics(tokenizer, tmp_path: Path, monkeypatch) -> None:
    def refused(context: Any, method: Any) -> None:
        context.statistics_for([method])
        assert list(tmp_path.iterdir()), "the statistics of the run"
        raise rap.RapError("no such cut")

    monkeypatch.setattr(dense_context.DenseContext, "plan", refused)
    model = tiny_model(vocab_size=len(tokenizer))
    given: dict[str, Any] = {"tokenizer": tokenizer, "num_windows": 2, "window": 32}
    with pytest.raises(rap.RapError, match="no such cut"):
        rap.compress(model, 0.5, tmp_path / "out", **given, evaluate=None, recover="fit")
    assert list(tmp_path.iterdir()) == []


def test_adapters_of_a_cut_model_are_not_recorded_as_of_the_dense_one(tmp_path: Path) -> None:
    tiny_model(layers=2).save_pretrained(tmp_path / "dense")
    dense = rap.load(tmp_path / "dense")
    plan = random_plan(dense, [(3, 5), (3, 5)])

    def base(model: Any) -> str | None:
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["v_proj"]))
        return adapted.peft_config["default"].base_model_name_or_path

    small = rap.apply(dense, plan)
    assert base(dense) == str(tmp_path / "dense")
    assert not base(small)
    save(small, plan, tmp_path / "small")
    assert base(small) == base(rap.load(tmp_path / "small")) == str(tmp_path / "small")
