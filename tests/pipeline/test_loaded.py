"""`rap.compress` of a model in memory, called as programs call it."""

import json
from pathlib import Path

import numpy as np

import rap
from cases.models import tiny_model
from rap import assets


def test_paths_and_numbers_of_numpy_are_taken(tokenizer, tmp_path: Path) -> None:
    """They end in JSON, which is written last."""
    text = tmp_path / "mine.txt"
    text.write_text(assets.reference_text("calibration")[:6_000], encoding="utf-8")
    model = tiny_model(vocab_size=len(tokenizer))
    rap.compress(
        model,
        np.float32(0.5),
        tmp_path / "out",
        tokenizer=tokenizer,
        calibration=text,
        evaluate=text,
        num_windows=np.int64(2),
        window=np.int64(32),
    )
    report = json.loads((tmp_path / "out" / "rap_report.json").read_text(encoding="utf-8"))
    assert report["calibration"].startswith("2 windows of 32 tokens from mine.txt")
    assert rap.load(tmp_path / "out").config.rap["retain"] == 0.5
