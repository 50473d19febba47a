"""Tables whose rows are of many results: every figure on their pages is read from one."""

import json

import pytest

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/collected.py")
FACTS = "experiments/smollm2-facts/facts.json"


@pytest.mark.parametrize("page", SCRIPT.made())
def test_the_committed_tables_are_built_from_the_committed_results(page):
    """If they are not: python docs/collected.py."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for name, shown in SCRIPT.made()[page].items():
        assert f"{SCRIPT.BEGIN.format(name)}\n{shown}\n{SCRIPT.END}" in text, name


def test_a_figure_is_that_of_the_cell_that_the_row_names():
    """Of several methods at several ratios, after recovery and not before."""
    compared = REPOSITORY / "experiments/smollm2-texts/compare.json"
    [asked] = [
        cell
        for cell in json.loads(compared.read_text(encoding="utf-8"))["cells"]
        if (cell["method"], cell["retain"], cell["recover"]) == ("rap:paper", 0.5, "fit")
    ]
    found = SCRIPT.Source("smollm2-texts", "rap:paper", 0.5).perplexities()
    assert found["WikiText-2"][0] == asked["perplexity"]
    assert found["Python code"][0] == asked["other_texts"]["code.txt"]["perplexity"]
    assert found["WikiText-2"][1] == pytest.approx(19.13, abs=0.01)


def test_a_result_that_changes_changes_its_table(monkeypatch, tmp_path):
    changed = json.loads((REPOSITORY / FACTS).read_text(encoding="utf-8"))
    changed["table"]["rows"][0][1] = 41
    (tmp_path / FACTS).parent.mkdir(parents=True)
    (tmp_path / FACTS).write_text(json.dumps(changed), encoding="utf-8")
    monkeypatch.setattr(SCRIPT, "REPOSITORY", tmp_path)
    SCRIPT._read.cache_clear()
    [first, *_] = SCRIPT.facts({"rows": [{"labels": ["1", "dense model"], "model": "dense"}]})
    SCRIPT._read.cache_clear()
    assert first == ["1", "dense model", "41"]


def test_what_was_not_measured_is_empty():
    [row] = SCRIPT.needles({"rows": [{"labels": ["`palu`"], "file": "palu-0.7-fit"}]})
    assert row == ["`palu`", "69%", ""]
