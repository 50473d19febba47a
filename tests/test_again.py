"""Measuring experiments again: all of them are found, nothing is taken as measured, it resumes."""

import json
import math
import subprocess

import pytest

from cases.scripts import REPOSITORY, load_script

SCRIPT = """import json, os, pathlib
runs = pathlib.Path("runs.txt")
runs.write_text((runs.read_text() if runs.exists() else "") + "x")
result = pathlib.Path("experiments/speed/speed.json")
assert not result.exists(), "a result that stands there would be taken as measured"
assert not list(pathlib.Path("experiments/speed").glob("cells")), "so would a cell"
if os.environ.get("FAIL"):
    raise SystemExit(3)
figures = {"command": "python experiments/speed/speed.py", "rows": [{"perplexity": 11.0}]}
result.write_text(json.dumps(figures | {"provenance": {"seconds": 5}}))
"""


@pytest.fixture
def again(tmp_path, monkeypatch):
    """The script, at work on a repository of one experiment."""
    module = load_script("experiments/again.py")
    folder = tmp_path / "experiments" / "speed"
    (folder / "cells" / "one").mkdir(parents=True)
    (folder / "cells" / "one" / "result.json").write_text("{}")
    (folder / "README.md").write_text("Question: ?\n")
    (folder / "speed.py").write_text(SCRIPT)
    result = {"command": "python experiments/speed/speed.py", "rows": [{"perplexity": 10.0}]}
    (folder / "speed.json").write_text(json.dumps(result | {"provenance": {"seconds": 1}}))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Measure speed"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "TREE", tmp_path / "runs" / "evidence")
    monkeypatch.setattr(module, "RECORD", tmp_path / "runs" / "evidence.json")

    def run(*words):
        monkeypatch.setattr("sys.argv", ["again.py", *words])
        return module.main()

    module.run = run
    return module


def test_every_experiment_of_the_repository_has_a_command():
    found = {name for name, _ in load_script("experiments/again.py").commands([])}
    assert found == {path.parent.name for path in REPOSITORY.glob("experiments/*/README.md")}


def test_it_is_measured_anew_once_and_compared(again, capsys):
    assert again.run() == 0
    said = capsys.readouterr().out
    assert "1 figures, the largest change 10.00% (speed.json rows 0 perplexity)" in said
    assert again.run() == 0
    assert (again.TREE / "runs.txt").read_text() == "x"
    assert json.loads((again.ROOT / "experiments/speed/speed.json").read_text())["rows"] == [
        {"perplexity": 10.0}
    ]


def test_what_failed_is_run_again(again, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", "1")
    assert again.run() == 1
    assert "exit code 3" in capsys.readouterr().out
    monkeypatch.delenv("FAIL")
    assert again.run() == 0
    assert (again.TREE / "runs.txt").read_text() == "xx"


def test_what_reads_a_text_that_is_not_there_is_left_out(again, tmp_path):
    command = "rap compare --measure text=wikitext2-test.txt"
    assert "there is no wikitext2-test.txt" in again.missing(command, tmp_path)
    (tmp_path / "wikitext2-test.txt").touch()
    assert again.missing(command, tmp_path) is None


def test_an_unknown_experiment_and_a_tree_of_another_commit_are_one_line(again):
    with pytest.raises(SystemExit, match="no experiment sped"):
        again.run("sped")
    again.run()
    words = ["commit", "-q", "--allow-empty", "-m", "Go on"]
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], cwd=again.ROOT, check=True)
    with pytest.raises(SystemExit, match="of another commit"):
        again.run()


def test_a_figure_that_is_no_number_any_more_is_the_largest_change(again):
    (place,) = again.figures({"perplexity": 2.0}, {"perplexity": math.nan}, "file")
    assert place[0] == "file perplexity"
    again.run()
    new = again.TREE / "experiments" / "speed" / "speed.json"
    new.write_text(new.read_text().replace("11.0", "NaN"))
    assert again.compared("speed", "python experiments/speed/speed.py")["largest_change"] == (
        math.inf
    )
