"""The pages of all methods on SmolLM2: they show what was measured, and nothing is open."""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from cases.scripts import load_script

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """docs/real_model.py, which is no package."""
    return load_script("docs/real_model.py")


def test_the_committed_pages_are_built_from_the_committed_results(script):
    evidence = script.Evidence()
    methods = (REPOSITORY / script.METHODS).read_text(encoding="utf-8")
    assert script.methods_page(evidence) == methods
    assert f"({Path(script.FIGURE).name})" in methods
    beyond = (REPOSITORY / script.BEYOND).read_text(encoding="utf-8")
    assert script.beyond_page(evidence) == beyond


def test_the_figure_can_be_drawn_again(script, tmp_path):
    script.draw(script.Evidence(), tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    committed = (REPOSITORY / script.FIGURE).read_text(encoding="utf-8")
    for text in (drawn, committed):
        for name in (*script.COLORS, "no recovery", "layer-wise", "all other methods"):
            assert text.count(f">{name}<") == 1, name
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px", text))) >= 11


def _lines(text: str) -> list[list[str]]:
    """The cells of every line of the tables of a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def _rows(table: str, name: str) -> list[list[str]]:
    return [row for row in _lines(table) if row[0].strip("*") == name]


def test_no_entry_is_open(script):
    """The dense model reconstructs nothing and is not recovered, so that it says nothing there."""
    for page in (script.METHODS, script.BEYOND):
        rows = _lines((REPOSITORY / page).read_text(encoding="utf-8"))
        assert len(rows) > 50
        assert [row for row in rows if not all(row) and row[0] != "dense"] == []


def test_methods_that_reconstruct_nothing_come_first_and_by_their_best(script):
    evidence = script.Evidence()
    name = "rap:merge=all"
    plain = f"{name}:profile=stock"
    keys = evidence.at(0.7, "none")
    reconstructing = [evidence.cells[key]["reconstructs"] for key in keys]
    assert reconstructing == sorted(reconstructing)
    assert len(set(reconstructing)) == 2
    assert [key.method for key in keys[:2]] == [name, plain]
    fitted = script.Key(name, 0.7, "fit")
    assert evidence.at(0.7, "fit", "fit+full")[0] == fitted
    evidence.cells[fitted] = evidence.cells[fitted] | {"kl": {"value": 50.0}}
    (row,) = _rows(script.recovered_table(evidence, 0.7), name)
    assert row[1:] == ["no", "layer-wise", "20.44", "50.000"]
    kept = [key for key in evidence.at(0.7, "fit") if not evidence.cells[key]["reconstructs"]]
    assert kept[-1] == fitted


def test_what_single_files_say_is_found_by_their_names(script, tmp_path):
    experiments = tmp_path / "experiments"
    shutil.copytree(
        REPOSITORY / "experiments",
        experiments,
        ignore=lambda folder, names: {"cells"} & set(names),
    )
    whole = experiments / "smollm2-whole-test"
    for name in ("rap-paper-0.7", "rap-0.5-distilled", "unknown-0.7"):
        (whole / f"{name}.json").write_text(json.dumps({"value": 77.0}), encoding="utf-8")
    far = [{"task": task, "accuracy": {"value": 0.77}} for task in script.TASKS]
    (experiments / "smollm2-ruler-8k").mkdir(exist_ok=True)
    file = experiments / "smollm2-ruler-8k" / "rap-paper-0.7.json"
    file.write_text(json.dumps({"ruler": far}), encoding="utf-8")
    found = script.Evidence(experiments)
    assert found.whole[script.Key("rap:paper", 0.7)] == {"value": 77.0}
    assert found.whole[script.Key(script.SEPARATE, 0.5, "fit+full")] == {"value": 77.0}
    assert not any(key.method == "unknown" for key in found.whole)
    tables = script.beyond_tables(found)
    assert ["rap:paper at 0.7", "77.00"] in _rows(tables["whole_table"], "rap:paper at 0.7")
    (row,) = _rows(tables["ruled_table"], "rap:paper at 0.7")
    assert row[1:] == ["8,192", "77%", "77%", "77%"]
    # Models that were made on other text are not of this table.
    assert not any("repeated" in table for table in tables.values())


def test_merged_heads_are_found_once_there_are_results(script, tmp_path):
    experiments = tmp_path / "experiments"
    shutil.copytree(
        REPOSITORY / "experiments",
        experiments,
        ignore=lambda folder, names: {"cells", *script.MERGED} & set(names),
    )
    assert "merge=a" not in script.methods_page(script.Evidence(experiments))
    result = json.loads((experiments / "smollm2-fit-block" / "compare.json").read_text("utf-8"))
    for cell in result["cells"]:
        if cell["method"] == "rap":
            texts = {key: {"perplexity": 7.77} for key in ("bundled", "code.txt")}
            recall = [{"distance": distance, "accuracy": 0.5} for distance in (256, 1000)]
            cell |= {"method": "rap:merge=auto", "other_texts": texts, "recall": recall}
    merged = experiments / script.MERGED[0]
    merged.mkdir()
    (merged / "compare.json").write_text(json.dumps(result), encoding="utf-8")
    whole = json.dumps({"value": 22.22})
    (merged / "rap-merge-auto-0.5-fit.json").write_text(whole, encoding="utf-8")
    found = script.Evidence(experiments)
    assert _rows(script.recovered_table(found, 0.5), "rap:merge=auto")
    tables = script.beyond_tables(found)
    name = "rap:merge=auto at 0.5, layer-wise"
    assert _rows(tables["whole_table"], name) == [[name, "22.22"]]
    assert _rows(tables["texts_table"], name) == [[name, "7.77", "7.77", "50%", "50%"]]
    # Its retrieval and its tasks were not measured.
    assert not _rows(tables["ruled_table"], name)
    assert not _rows(tables["scored_table"], name)


def test_a_finding_that_the_results_do_not_bear_out_is_left_out(script):
    evidence = script.Evidence()
    found = script.findings(evidence)
    assert len(found) == 6
    assert "`rap:merge=all` loses least" in found[0]
    key = script.Key("palu", 0.7, "fit")
    evidence.cells[key] = evidence.cells[key] | {"kl": {"value": 50.0}}
    assert script.findings(evidence) == [found[0], *found[3:]]
    merged = script.Key("rap:merge=all", 0.7)
    evidence.cells[merged] = evidence.cells[merged] | {"kl": {"value": 50.0}}
    assert script.findings(evidence) == found[4:]


def test_a_method_whose_times_were_not_taken_is_not_among_the_costs(script):
    evidence = script.Evidence()
    key = script.Key(script.SEPARATE, 0.7)
    assert _rows(script.pruned_table(evidence, 0.7), script.SEPARATE)
    times = {"decode_seconds": 1.0, "dense_decode_seconds": 2.0}
    evidence.timed[key] = times
    assert not _rows(script.pruned_table(evidence, 0.7), script.SEPARATE)
    evidence.timed[key] = times | {"prefill_seconds": 1.0, "dense_prefill_seconds": 4.0}
    (row,) = _rows(script.pruned_table(evidence, 0.7), script.SEPARATE)
    assert row[5:7] == ["50%", "25%"]


def test_the_devices_of_times_are_said_once(script):
    evidence = script.Evidence()
    assert script.timed_on(evidence, 0.7).startswith("Timed on cpu (x86_64, 1 or 2 threads), ")
    evidence.timed = {
        script.Key("a", 0.7): {"provenance": {"device": "cpu (x86_64, 2 threads)"}},
        script.Key("b", 0.7): {"provenance": {"device": "a GPU"}},
    }
    assert " on a GPU or cpu (x86_64, 2 threads), " in script.timed_on(evidence, 0.7)
    assert script.timed_on(evidence, 0.1) == ""


def test_methods_are_followed_from_ratio_to_ratio(script):
    evidence = script.Evidence()
    tables = script.sweep_tables(evidence)
    for table in tables.values():
        assert _lines(table)[0][1:] == ["90%", "80%", "70%", "60%", "50%", "35%", "25%"]
    for method in script.FOLLOWED:
        cell = evidence.cells[script.Key(method, 0.9)]
        (row,) = _rows(tables["pruned"], method)
        assert row[1] == f"{cell['perplexity']:.2f} ({cell['kl']['value']:.3f})"
    (row,) = _rows(tables["recovered"], "rap:merge=all")
    # At 0.5 there are both, and the longer one counts.
    assert [cell.endswith(r"\*") for cell in row[1:]] == [
        True,
        True,
        False,
        True,
        False,
        True,
        True,
    ]
    # What was recovered at some ratios only is in the tables of those.
    assert not _rows(tables["recovered"], "rap:paper")
    (row,) = _rows(tables["costs"], "rap:merge=1")
    assert row[5] == "50% / 50% / 93%"
