"""README.md and docs/measurements/defaults.md: their tables are what the result files say."""

import json

import pytest

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/default_tables.py")


@pytest.mark.parametrize("page", [SCRIPT.README, SCRIPT.PAGE, SCRIPT.CHOICE])
def test_the_committed_tables_are_built_from_the_committed_results(page):
    """If they are not: python docs/default_tables.py."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for name, table in SCRIPT.made()[page].items():
        begun = text.split(SCRIPT.BEGIN.format(name))[1].split(SCRIPT.END)[0]
        assert begun.strip() == table.strip()


def test_the_last_that_is_kept_of_each_model_is_half_of_its_cache():
    """As the page says; others keep half as well, or more, but no more than they were asked to.

    Without a target, the nearest step of 8 channels, of the 192 of a merged head of SmolLM2.
    """
    for model in SCRIPT.MODELS:
        dense, pruned = model.kept[-1].cache()
        assert pruned == dense / 2, model.name
        for kept in model.kept:
            dense, pruned = kept.cache()
            asked = kept.compressed()["retain"]
            if kept.name == SCRIPT.UNTARGETED:
                assert pruned == round(asked * 24) * dense / 24, model.name
            else:
                assert dense / 2 <= pruned <= round(asked * dense), model.name


def test_a_row_that_was_not_measured_whole_is_left_out():
    table = {"header": ["model", "a", "b"], "rows": [["x", "", "1"], ["y", "2", "3"]]}
    lines = SCRIPT.filled(table).splitlines()
    assert lines[0] == "| model | a | b |"
    assert lines[2:] == ["| y | 2 | 3 |"]


def test_what_is_measured_today_is_in_every_table():
    """Nobody would miss a row of the default otherwise; the answers are of half of the cache."""
    for page in (SCRIPT.README, SCRIPT.PAGE):
        tables = SCRIPT.made()[page]
        names = {model.row(kept) for model in SCRIPT.today() for kept in model.kept}
        for name in tables.keys() - {"answers", "distilled on a CPU", "distilled on a GPU", "runs"}:
            shown = [line.split("|")[1].strip() for line in tables[name].splitlines()]
            assert [one for one in names if shown.count(one) != 2] == [], (page, name)


def test_the_page_links_to_every_result_that_it_shows(monkeypatch):
    read, real = set(), SCRIPT._read
    monkeypatch.setattr(SCRIPT, "_read", lambda file: read.add(file.split("/")[0]) or real(file))
    made = SCRIPT.made()[SCRIPT.PAGE]["runs"]
    index = {folder: f"README.md#{folder.replace('.', '')})" for folder in read}
    files = {folder: f"experiments/{folder}/" for folder in read}
    assert [x for x in sorted(read) if index[x] not in made and files[x] not in made] == []


def test_the_first_page_shows_todays_default_alone(monkeypatch):
    other, new = (SCRIPT.Kept("", "", name) for name in ("`palu`", SCRIPT.TODAY))
    monkeypatch.setattr(SCRIPT, "MODELS", (SCRIPT.Model("a", (other, new)),))
    assert [model.kept for model in SCRIPT.today()] == [(new,)]


def written(folder, files):
    """Result files, by their names in a folder of experiments."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))


def found(task, value):
    """A result of retrieval at 4,096 tokens."""
    accuracy = {"value": value, "low": 0.0, "high": 1.0}
    return {"ruler": [{"task": task, "length": 4096, "accuracy": accuracy}]}


SIZES = {"dense": {"kv_bytes_per_token": 10}, "pruned": {"kv_bytes_per_token": 5}}


def test_a_row_of_retrieval_has_what_its_model_retrieves(monkeypatch, tmp_path):
    """That of the dense model is in files of its own."""
    files = {
        "report.json": SIZES,
        "own/retrieval-4096.json": found("single-needle", 0.25),
        "one/dense.json": found("single-needle", 0.5),
        "other/dense.json": found("multi-key", 0.75),
    }
    written(tmp_path, files)
    dense = ("one/dense.json", "other/dense.json")
    models = (
        SCRIPT.Model("a", (SCRIPT.Kept("report.json", "own"),), retrieved=dense),
        SCRIPT.Model("b", (SCRIPT.Kept("report.json", "nothing"),)),
    )
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(SCRIPT, "MODELS", models)
    header, *rows = SCRIPT.filled(SCRIPT.retrieval("single-needle", [4096])).splitlines()
    assert header == "| model | KV cache | 4,096 tokens |"
    assert rows[1:] == [
        "| a, dense | 100% | 50% (0% to 100%) |",
        "| a, **`rap`** | 50% | 25% (0% to 100%) |",
    ]
    rows = SCRIPT.retrieval("multi-key", [4096])["rows"]
    assert [row[2] for row in rows] == ["75% (0% to 100%)", "", "", ""]


def test_a_dense_perplexity_is_that_of_any_checkpoint_compared_with_it(monkeypatch, tmp_path):
    dense = {"dense_perplexity": {"value": 21.61}}
    written(tmp_path, {"report.json": SIZES, "second/default-whole-test.json": dense})
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    model = SCRIPT.Model("a", tuple(SCRIPT.Kept("report.json", name) for name in ("one", "second")))
    assert model.dense_perplexity("default-whole-test.json") == "21.61"
    assert model.dense_perplexity("fidelity-code.json") == ""


def test_models_that_read_the_full_test_set_by_themselves_are_compared(monkeypatch, tmp_path):
    """The dense one's result is of it alone, or a part of another."""
    name = "default-whole-test.json"
    files = {
        "report.json": SIZES,
        "pruned.json": {"value": 15.0},
        "dense.json": {"value": 10.0},
        "both.json": {"dense_perplexity": {"value": 12.0}, "perplexity": {"value": 1.0}},
    }
    written(tmp_path, files)
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    for dense, expected in (("dense.json", 10.0), ("both.json", 12.0)):
        kept = SCRIPT.Kept("report.json", "none", whole=dense, alone="pruned.json")
        found = kept.fidelity(name)
        assert (found["perplexity"]["value"], found["dense_perplexity"]["value"]) == (15, expected)
        assert "kl" not in found
        assert kept.fidelity("fidelity-code.json") == {}
    # Without another file, that of its own folder; and nothing where there is none.
    kept = SCRIPT.Kept("report.json", ".", whole="dense.json")
    assert kept.fidelity(name) == {}
    written(tmp_path, {SCRIPT.ALONE: {"value": 14.0}})
    assert kept.fidelity(name)["perplexity"]["value"] == 14


def test_a_dense_score_is_a_row_or_a_file_of_its_own(monkeypatch, tmp_path):
    score = {"mean": 0.5, "mean_stderr": 0.01}
    rows = [{"name": "other", "mean": 0.1, "mean_stderr": 0.01}, {"name": "dense", **score}]
    written(tmp_path, {"alone.json": score, "rows.json": {"rows": rows}})
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    scores = [SCRIPT.Model("a", (), file).dense_score() for file in ("alone.json", "rows.json", "")]
    assert scores[0] == scores[1] != scores[2] == ""
    assert scores[0].startswith("50.0%")


def test_a_result_that_a_row_names_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    with pytest.raises(FileNotFoundError):
        SCRIPT.Kept("report.json", "own").compressed()
    assert SCRIPT.Kept("report.json", "own").read("zero-shot.json") == {}


def test_answers_of_the_dense_model_are_above_those_of_what_is_kept(monkeypatch, tmp_path):
    def side(share):
        one = {"value": share, "low": share, "high": share}
        keys = ("length", "ended", "looping", "repetition", "kl")
        return dict.fromkeys(keys, one)

    sides = {"dense": side(0.25), "pruned": side(0.5)}
    written(tmp_path, {"report.json": SIZES, "own/generation.json": sides})
    monkeypatch.setattr(SCRIPT, "EXPERIMENTS", tmp_path)
    kept = SCRIPT.Kept("report.json", "own"), SCRIPT.Kept("report.json", "none")
    models = (SCRIPT.Model("a", kept), SCRIPT.Model("b", kept[1:]))
    monkeypatch.setattr(SCRIPT, "MODELS", models)
    rows = SCRIPT.answers()["rows"]
    assert [row[:2] for row in rows] == [["a, dense", "100%"], ["a, **`rap`**", "50%"]]
    assert [row[3].split()[0] for row in rows] == ["25%", "50%"]
    assert [row[-1].split()[0] for row in rows] == ["0.25", "0.50"]
