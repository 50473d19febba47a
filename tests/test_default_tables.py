"""README.md and docs/measurements/defaults.md: their tables are what the result files say."""

import json

import pytest

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/default_tables.py")


@pytest.mark.parametrize("page", [SCRIPT.README, SCRIPT.PAGE])
def test_the_committed_tables_are_built_from_the_committed_results(page):
    """If they are not: python docs/default_tables.py."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for name, table in SCRIPT.made()[page].items():
        begun = text.split(SCRIPT.BEGIN.format(name))[1].split(SCRIPT.END)[0]
        assert begun.strip() == table.strip()


def test_what_the_page_says_of_every_model_is_half_of_its_cache():
    """The last that is kept of each; others keep no more than they were asked to."""
    for model in SCRIPT.MODELS:
        *others, half = model.kept
        dense, pruned = half.cache()
        assert pruned == dense / 2, model.name
        for kept in others:
            dense, pruned = kept.cache()
            assert dense / 2 < pruned <= kept.compressed()["retain"] * dense, model.name


def test_a_column_without_a_result_is_left_out():
    table = {"header": ["model", "a", "b"], "rows": [["x", "", "1"], ["y", "", ""]]}
    lines = SCRIPT.filled(table).splitlines()
    assert lines[0] == "| model | b |"
    assert len(lines) == 4


def test_a_row_of_retrieval_has_what_its_model_retrieves(monkeypatch, tmp_path):
    """That of the dense model is in files of its own; no row is all empty."""
    entry = {"task": "single-needle", "length": 4096}
    of = {"own/retrieval-4096.json": 0.25, "one/dense.json": 0.5, "other/dense.json": 0.75}
    for name, value in of.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        accuracy = {"value": value, "low": 0.0, "high": 1.0}
        task = "multi-key" if name.startswith("other") else entry["task"]
        path.write_text(json.dumps({"ruler": [entry | {"task": task, "accuracy": accuracy}]}))
    sizes = {"dense": {"kv_bytes_per_token": 10}, "pruned": {"kv_bytes_per_token": 5}}
    (tmp_path / "report.json").write_text(json.dumps(sizes))
    models = (
        SCRIPT.Model(
            "a", (SCRIPT.Kept("report.json", "own"),), "", ("one/dense.json", "other/dense.json")
        ),
        SCRIPT.Model("b", (SCRIPT.Kept("report.json", "nothing"),)),
    )
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(SCRIPT, "MODELS", models)
    header, *rows = SCRIPT.filled(SCRIPT.retrieval()).splitlines()
    assert header == "| model | KV cache | single-needle, 4,096 | multi-key, 4,096 |"
    assert rows[1:] == [
        "| a | 100% | 50% (0% to 100%) | 75% (0% to 100%) |",
        "| **`rap`** | 50% | 25% (0% to 100%) |  |",
    ]
