"""The pages of all methods on SmolLM2: they show what was measured, the rest is open."""

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


def _rows(table: str, name: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return [row for row in rows if row[0].strip("*") == name]


def test_methods_that_reconstruct_nothing_come_first_and_by_their_best(script):
    evidence = script.Evidence()
    evidence.timed = {}
    name = "rap:merge=all"
    merged = script.Key(name, 0.7)
    order = [keys[0].method for keys in evidence.at(0.7)]
    reconstructing = [evidence.cells[keys[0]]["reconstructs"] for keys in evidence.at(0.7)]
    assert reconstructing == sorted(reconstructing)
    plain = f"{name}:profile=stock"
    assert order[:3] == [name, plain, script.SEPARATE]
    # Its fit alone puts it there.
    evidence.cells.pop(script.Key(name, 0.7, "fit"))
    evidence.cells[merged] = evidence.cells[merged] | {"kl": {"value": 50.0}}
    assert [keys[0].method for keys in evidence.at(0.7)][:2] == [plain, script.SEPARATE]
    (row,) = _rows(script.main_table(evidence, 0.7), name)
    assert row[6:] == ["21.40", "", "", "50.000", "", ""]


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
    table = script.beyond_table(found)
    (row,) = _rows(table, "rap:paper at 0.7")
    assert (row[1], row[6]) == ("77.00", "77% / 77% / 77%")
    # Models that were made on other text are not of this table.
    assert "repeated" not in table


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
            texts = {"code.txt": {"perplexity": 7.77}}
            cell |= {"method": "rap:merge=auto", "other_texts": texts}
    merged = experiments / script.MERGED[0]
    merged.mkdir()
    (merged / "compare.json").write_text(json.dumps(result), encoding="utf-8")
    whole = json.dumps({"value": 22.22})
    (merged / "rap-merge-auto-0.5-fit.json").write_text(whole, encoding="utf-8")
    found = script.Evidence(experiments)
    assert _rows(script.main_table(found, 0.5), "rap:merge=auto")
    (row,) = _rows(script.beyond_table(found), "rap:merge=auto at 0.5, layer-wise")
    assert row[1:4] == ["22.22", "", "7.77"]


def test_times_of_prompts_are_shown_once_there_are_some(script):
    evidence = script.Evidence()
    evidence.timed = {}
    assert "prefill" not in script.methods_page(evidence)
    cell = evidence.cells[script.Key(script.SEPARATE, 0.7)] | {
        "prefill_tokens": 512,
        "prefill_seconds": 1.0,
        "dense_prefill_seconds": 2.0,
    }
    evidence.timed = {script.Key(script.SEPARATE, 0.7): cell}
    assert "prefill (512 tokens)" in script.methods_page(evidence)
    (row,) = _rows(script.main_table(evidence, 0.7), script.SEPARATE)
    assert row[6] == "50%"


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
    rows = script.sweep_table(evidence).splitlines()[2:]
    shares = {line.split("|")[3].strip() for line in rows}
    assert {"90%", "80%", "70%", "60%", "50%", "35%"} <= shares
    for method in script.FOLLOWED:
        row = next(line for line in rows if f"| {method} |" in line.replace("**", ""))
        cell = evidence.cells[script.Key(method, 0.9)]
        assert f"| {cell['perplexity']:.2f} |" in row
