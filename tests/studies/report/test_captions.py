"""The caption of a table: by which protocol it was measured, and where its times were taken."""

import copy
import inspect
import json
from pathlib import Path

import pytest

from rap.calibration.dense_context import CalibrationText
from rap.cli.compare import DEMO_MEASURES, GRID_READING
from rap.cli.groups import ReadingOptions, WindowOptions
from rap.data import protocol
from rap.data.text import load_windows
from rap.pipeline import compress
from rap.recovery.stages import REFIT_TOKENS
from rap.studies.analyses.study import Study
from rap.studies.compare.grid import Grid
from rap.studies.compare.measurement import Measures
from rap.studies.report.report import caption, tables_of

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
DEFAULT = "The default protocol has"
BY_DEFAULT = ("merged-bundled",)  # comparisons that read what commands read by default


def _defaults(function):
    given = inspect.signature(function).parameters
    return given["num_windows"].default, given["window"].default


def test_one_protocol_is_the_default_everywhere():
    calibration = protocol.CALIBRATION_WINDOWS, protocol.CALIBRATION_WINDOW
    assert calibration == (32, 1024)
    assert (protocol.EVALUATION_WINDOWS, protocol.EVALUATION_WINDOW) == (8, 2048)
    for made in (compress, load_windows, CalibrationText, Grid):
        assert _defaults(made) == calibration, made
    for options in (WindowOptions(), ReadingOptions(), GRID_READING):
        assert (options.windows, options.window) == calibration
    assert calibration[0] * calibration[1] == REFIT_TOKENS
    for made in (Measures, Study):  # None: 2,048 tokens, or the context length if less
        assert _defaults(made) == (protocol.EVALUATION_WINDOWS, None), made
    assert (DEMO_MEASURES.num_windows, DEMO_MEASURES.window) == (12, 512), "a demo is quick"


@pytest.fixture
def comparison():
    """What a result file of a comparison holds that a caption reads."""
    cell = {
        "retain": 1.0,
        "evaluation": {"num_windows": 8, "window": 2048, "bos": None},
        "provenance": {"device": "one thread"},
        "decode_seconds": 1.0,
    }
    cells = [cell, cell | {"retain": 0.7}, cell | {"retain": 0.5}]
    cells[2] = cells[2] | {"provenance": {"device": "two threads"}}
    settings = {
        "calibration": "mine.txt",
        "num_windows": 32,
        "window": 1024,
        "measures": {"text": "held-out:mine.txt"},
    }
    return {"cells": cells, "provenance": {"settings": settings}}


def _table(title, *header):
    return {"title": title, "header": ["method", *header], "rows": []}


def test_a_table_names_data_samples_and_bos(comparison):
    plain = _table("KL to the dense model", "PPL")
    said = (
        "Calibrated on 32 samples of 1,024 tokens of mine.txt; evaluated on 8 windows of 2,048 "
        "tokens of held-out:mine.txt, without BOS."
    )
    assert caption(comparison, plain) == said
    comparison["cells"][0]["evaluation"].pop("bos")
    assert "BOS not recorded" in caption(comparison, plain)
    comparison["cells"][0]["evaluation"]["bos"] = 1
    assert "each beginning with BOS (token 1)" in caption(comparison, plain)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("num_windows",), 64, "32 x 1,024 tokens to calibrate"),
        (("window",), 512, "32 x 1,024 tokens to calibrate"),
        (("n",), 48, "8 x 2,048 tokens to evaluate"),
        (("w",), 512, "8 x 2,048 tokens to evaluate"),
    ],
)
def test_another_protocol_is_said(comparison, place, value, said):
    changed = copy.deepcopy(comparison)
    settings, scored = changed["provenance"]["settings"], changed["cells"][0]["evaluation"]
    names = {"n": "num_windows", "w": "window"}
    where = scored if place[0] in names else settings
    where[names.get(place[0], place[0])] = value
    assert DEFAULT not in caption(comparison, _table("T", "PPL"))
    assert caption(changed, _table("T", "PPL")).endswith(f". {DEFAULT} {said}.")


def test_times_are_those_of_the_table(comparison):
    def timed(title, *header):
        return caption(comparison, _table(title, *header)).partition("Timed on ")[2]

    assert timed("At retain 0.7, m", "KV", "decode") == "one thread."
    assert timed("At retain 0.5, m", "prefill") == "two threads."
    assert timed("Over all ratios", "decode, fit") == "one thread and on two threads."
    assert timed("At retain 0.5, m", "PPL") == ""
    for cell in comparison["cells"]:
        cell["prefill_seconds"] = cell.pop("decode_seconds")
    assert timed("At retain 0.5, m", "prefill") == "two threads."


def test_a_table_of_other_texts_names_no_first_one(comparison):
    found = caption(comparison, _table("Other datasets at retain 0.7, m", "PPL"))
    assert found == "Calibrated on 32 samples of 1,024 tokens of mine.txt."


def test_analyses_and_single_evaluations(comparison):
    settings = {"calibration": "c", "windows": 16, "window": 512}
    settings |= {"evaluate": "e", "max_windows": 12}
    result = {"analysis": "loss", "provenance": {"settings": settings}}
    said = caption(result, _table("Perplexity by budget"))
    assert said == (
        "Calibrated on 16 samples of 512 tokens of c; evaluated on at most 12 windows of 512 "
        f"tokens of e. {DEFAULT} 32 x 1,024 tokens to calibrate and 8 x 2,048 tokens to evaluate."
    )
    settings["evaluate_window"] = 2048
    assert "12 windows of 2,048" in caption(result, _table("Perplexity by budget"))
    assert "evaluated on" not in caption(result, _table("Kept pairs"))
    single = {"text": "t", "num_windows": 148, "window": 2048, "bos": None, "value": 21.6}
    assert caption(single, _table("P")) == (
        "Evaluated on 148 windows of 2,048 tokens of t, without BOS."
    )
    assert caption({"rows": []}, _table("P")) == ""


def test_every_committed_comparison_says_how_it_was_measured():
    files = sorted(EXPERIMENTS.glob("**/compare.json"))
    assert len(files) > 20
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        for table in tables_of(result):
            assert "Calibrated on" in table["note"], (file, table["title"])
            # Only the newest were measured since there is a default protocol.
            by_default = file.parent.name in BY_DEFAULT
            assert (DEFAULT in table["note"]) != by_default, (file, table["title"])
