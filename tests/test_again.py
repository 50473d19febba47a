"""Measuring experiments again: all of them are found, nothing is taken as measured, it resumes."""

import json
import math
import subprocess
from dataclasses import asdict
from functools import partial

import pytest

from cases.scripts import REPOSITORY, load_script
from rap.data.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from rap.pipeline.defaults import UNASKED
from rap.recovery.config import PRESETS
from rap.recovery.layer_fit import FitConfig

RECORDED = load_script("experiments/recorded_commands.py")
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
    folders = [path.parent for path in REPOSITORY.glob("experiments/**/README.md")]
    assert found == {path.name for path in folders} - {"experiments"}


def test_it_is_measured_anew_once_and_compared(again, capsys):
    assert again.run() == 0
    said = capsys.readouterr().out
    assert "1 figures, the largest change 10.00% (speed.json rows 0 perplexity)" in said
    assert again.run() == 0
    assert (again.TREE / "runs.txt").read_text() == "x"
    assert json.loads((again.ROOT / "experiments/speed/speed.json").read_text())["rows"] == [
        {"perplexity": 10.0}
    ]


def test_an_archived_study_is_measured_anew_where_it_lies(again, capsys):
    """Its result records the command as it ran, before the folder was moved."""
    folder = again.ROOT / "experiments" / "archive"
    folder.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    moved = ["mv", "experiments/speed", "experiments/archive/speed"]
    script = folder / "speed" / "speed.py"
    subprocess.run([*git, *moved], cwd=again.ROOT, check=True)
    script.write_text(
        script.read_text().replace('"experiments/speed', '"experiments/archive/speed')
    )
    subprocess.run([*git, "commit", "-qam", "Archive"], cwd=again.ROOT, check=True)
    assert again.run("speed") == 0
    assert "1 figures, the largest change 10.00%" in capsys.readouterr().out
    assert not (again.TREE / "experiments" / "speed").exists()
    again.MODELS["fitted/fast"] = "speed/models/x"
    assert again.folder_of(again._maker("fitted/fast")) == "experiments/archive/speed"


def test_what_failed_is_run_again(again, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", "1")
    assert again.run() == 1
    assert "exit code 3" in capsys.readouterr().out
    monkeypatch.delenv("FAIL")
    assert again.run() == 0
    assert (again.TREE / "runs.txt").read_text() == "xx"


def test_a_result_of_tables_alone_is_not_called_equal(again, monkeypatch, capsys):
    monkeypatch.setattr(again, "NO_FIGURES", {*again.NO_FIGURES, "rows", "perplexity"})
    assert again.run() == 0
    said = capsys.readouterr().out
    assert "0 figures, its figures stand in tables alone, and nothing was compared" in said
    assert "all equal" not in said


def test_what_reads_a_text_that_is_not_there_is_left_out(again, tmp_path):
    command = "rap compare --measure text=wikitext2-test.txt"
    assert "there is no wikitext2-test.txt" in again.missing(command, tmp_path)
    (tmp_path / "wikitext2-test.txt").touch()
    assert again.missing(command, tmp_path) is None
    assert "no own.jsonl" in again.missing("rap compare --calibration bundled,own.jsonl", tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "rap evaluate cache smollm2 --press keydiff:0.5",
        "python experiments/composition/composition.py",
    ],
)
def test_what_needs_a_package_that_is_not_there_is_left_out(again, tmp_path, monkeypatch, command):
    monkeypatch.setattr(again, "_importable", lambda package: package != "kvpress")
    assert again.missing(command, tmp_path) == "left out, there is no package kvpress"
    monkeypatch.setattr(again, "_importable", lambda package: True)
    assert again.missing(command, tmp_path) is None


def test_packages_are_looked_up_and_all_of_them_are_of_some_command():
    module = load_script("experiments/again.py")
    assert module._importable("json")
    assert not module._importable("json.no_such_part")
    assert not module._importable("no_such_package.part")
    words = {word for _, command in module.commands([]) for word in module._words(command)}
    assert words >= module.PACKAGES.keys()


def test_heads_that_were_separate_are_separate_again(tmp_path):
    command = "rap compare --methods rap,rap:paper --retain 0.5 -o experiments/old"
    cells = [{"method": name, "settings": {"name": "rap"}} for name in ("rap", "rap:paper")]
    found = RECORDED.complete({"command": command, "cells": cells}, tmp_path)
    assert found == command.replace("rap,rap:paper", "rap:merge=1,rap:paper")
    cells[0]["settings"]["merge"] = "auto"
    assert RECORDED.complete({"command": command, "cells": cells}, tmp_path) == command


KEEPER = """import pathlib
cell = pathlib.Path("experiments/keeper/models/rap-0.7-fit-1")
cell.mkdir(parents=True)
(cell / "weights").write_text("2")
pathlib.Path("keeper.txt").write_text("once")
figures = '{"command": "python experiments/keeper/keeper.py wikitext2-test.txt --keep"}'
pathlib.Path("experiments/keeper/keeper.json").write_text(figures)
"""
READER = """import json, pathlib, sys
name, folder = sys.argv[1].split("=")
row = {"perplexity": int((pathlib.Path(folder) / "weights").read_text())}
command = "python experiments/reader/reader.py 'rap 0.7=fitted/rap'"
pathlib.Path("experiments/reader/reader.json").write_text(json.dumps({"command": command} | row))
"""


@pytest.fixture
def models(again, tmp_path, monkeypatch):
    """Two more experiments: one reads a model that the other keeps."""
    commands = {
        "keeper": "python experiments/keeper/keeper.py wikitext2-test.txt --keep",
        "reader": "python experiments/reader/reader.py 'rap 0.7=fitted/rap'",
    }
    for name, script in {"keeper": KEEPER, "reader": READER}.items():
        folder = tmp_path / "experiments" / name
        folder.mkdir()
        (folder / "README.md").write_text("Question: ?\n")
        (folder / f"{name}.py").write_text(script)
        result = {"command": commands[name], "perplexity": 1}
        (folder / f"{name}.json").write_text(json.dumps(result))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["add", "-A"], ["commit", "-qm", "Keep a model"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(again, "MODELS", {"fitted/rap": "keeper/models/rap-0.7-fit-*"})
    return again


def test_a_model_that_another_experiment_keeps_is_made_first_and_once(models, tmp_path, capsys):
    (tmp_path / "wikitext2-test.txt").touch()
    texts = ["--texts", str(tmp_path)]
    assert models.run("reader", *texts) == 0
    assert "1 figures, the largest change 100.00%" in capsys.readouterr().out
    assert (models.TREE / "keeper.txt").read_text() == "once"
    # The keeper would fail at its folder of models if it ran a second time.
    assert models.run("keeper", "reader", *texts) == 0


def test_a_model_whose_text_is_not_there_or_that_was_not_kept_is_said(models, tmp_path, capsys):
    assert models.run("reader") == 0
    assert "reader: left out, there is no wikitext2-test.txt" in capsys.readouterr().out
    (tmp_path / "wikitext2-test.txt").touch()
    models.MODELS["fitted/rap"] = "keeper/models/rap-0.5-fit-*"
    assert models.run("reader", "--texts", str(tmp_path)) == 1
    assert "its model fitted/rap is not in keeper: 0 of keeper" in capsys.readouterr().out


def test_the_keeper_of_a_model_may_read_it_afterwards(again, tmp_path, monkeypatch):
    """One command of an experiment makes a model, another measures it: each runs once."""
    folder = tmp_path / "experiments" / "wide"
    folder.mkdir()
    (folder / "README.md").write_text("Question: ?\n")
    make = "rap compress smollm2 --retain 0.5 -o experiments/wide/out"
    measure = "python experiments/wide/after.py fitted/wide"
    for name, command in {"after": measure, "compress": make}.items():
        (folder / f"{name}.json").write_text(json.dumps({"command": command}))
    monkeypatch.setattr(again, "MODELS", {"fitted/wide": "wide/out"})
    ran = []

    def run(words, **_):
        ran.append(" ".join(words))
        (again.TREE / "experiments" / "wide" / "out").mkdir(parents=True, exist_ok=True)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(again.subprocess, "run", run)
    rows = [again.again("wide", command, tmp_path) for command in (measure, make)]
    assert ran == [make, measure]
    assert not any(row.get("failed") for row in rows)


def test_every_model_that_an_experiment_reads_has_its_keeper():
    module = load_script("experiments/again.py")
    commands = module.commands([])
    words = {word for _, command in commands for word in module._words(command)}
    read = {word for word in words if word.startswith(("cut/", "fitted/", "distilled/"))}
    assert read == module.MODELS.keys()
    for model, kept in module.MODELS.items():
        (maker,) = module._making(model)
        experiment, kind, cells = kept.partition("/models/")
        if not kind:  # the command writes a single checkpoint
            experiment = kept.partition("/")[0]
            assert maker.endswith(f" -o {module.folder_of(experiment)}/out")
            continue
        assert "--keep" in maker
        then = cells.replace("-merge=1", "")  # what heads that are not merged were recorded as
        assert len(list((REPOSITORY / module.folder_of(experiment) / "cells").glob(then))) == 1


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


def test_a_figure_or_a_file_that_is_gone_is_no_equal_one(again):
    cells = {"cells": [{"kl": 0.1}, {"kl": 0.2}]}
    found = list(again.figures(cells, {"cells": cells["cells"][:1]}, "file"))
    assert found[0] == ("file cells 0 kl", 0.1, 0.1)
    assert (found[1][0], math.isnan(found[1][2])) == ("file cells 1 kl", True)
    row = again.compared("speed", "python experiments/speed/speed.py")
    assert (row["figures"], row["largest_change"]) == (1, math.inf)


def test_times_and_what_others_published_are_no_figures(again):
    same = {"paper": [1.0], "decode_seconds": 2.0, "tables": [3], "rap:paper at 0.5": {"kl": 0.4}}
    assert list(again.figures(same, same, "file")) == [("file rap:paper at 0.5 kl", 0.4, 0.4)]


def repeated(folder, command, config):
    """How a command is repeated that left a cell with this config in the folder."""
    cell = folder / "cells" / "one"
    cell.mkdir(parents=True)
    (cell / "config.json").write_text(json.dumps(config))
    settings = {"num_windows": 24, "window": 1024, "measures": {}}
    made = {"command": command, "provenance": {"settings": settings}}
    return load_script("experiments/again.py")._command(made, folder)


def test_a_distillation_of_other_defaults_is_set_to_what_it_was(tmp_path):
    """Cells keep all its settings, a command only those that were given."""
    default = asdict(FitConfig())
    fit = default | {"steps": default["steps"] + 7, "rate": default["rate"] * 2, "seed": 3}
    full = asdict(PRESETS["full"]) | {"learning_rate": 0.5, "seed": 3}
    config = {"fit": fit, "recover": "fit+full", "recovery": full}
    command = "rap compare --windows 24 --window 1024 --recover fit+full --set fit.rate=0.5 -o x"
    more = f"--set fit.steps={default['steps'] + 7} --set learning_rate=0.5"
    assert repeated(tmp_path, command, config) == f"{command} {more}"


def test_a_distillation_of_before_products_was_a_setting_is_in_float32(tmp_path):
    fit = {name: x for name, x in asdict(FitConfig()).items() if name != "products"}
    command = "rap compare --windows 24 --window 1024 --recover fit -o x"
    assert repeated(tmp_path, command, {"fit": fit}) == f"{command} --set fit.products=float32"


def test_a_distillation_of_before_layers_tried_rates_has_one(tmp_path):
    fit = {name: x for name, x in asdict(FitConfig()).items() if name != "rate_choices"}
    command = "rap compare --windows 24 --window 1024 --recover fit -o x"
    assert repeated(tmp_path, command, {"fit": fit}) == f"{command} --set fit.rate_choices=1"


def test_one_end_to_end_is_in_float32_too(tmp_path):
    full = {name: x for name, x in asdict(PRESETS["full"]).items() if name != "products"}
    command = "rap compare --windows 24 --window 1024 --recover full -o x"
    config = {"fit": None, "recover": "full", "recovery": full}
    assert repeated(tmp_path, command, config) == f"{command} --set products=float32"


def kept_without_cells(time, **settings):
    """A comparison after `fit`, of which no cells were kept."""
    settings = {"num_windows": 24, "window": 1024, "recoveries": ["none", "fit"]} | settings
    command = "rap compare --windows 24 --window 1024 --recover none,fit -o x"
    return {"command": command, "provenance": {"settings": settings, "time": time}}


@pytest.mark.parametrize(
    ("time", "recoveries", "more"),
    [
        ("2026-11-21T13:22:39Z", ["none", "fast"], "--set products=float32"),
        (
            "2026-11-26T12:00:00Z",
            ["none", "fit", "fit+full"],
            "--set fit.rate_choices=1",
        ),
        ("2026-11-21T13:22:39Z", ["none", "closed-form"], ""),
        ("2026-11-29T01:34:29Z", ["none", "fit"], ""),
        (None, ["none", "fit"], ""),
    ],
)
def test_a_comparison_without_cells_is_set_to_what_its_time_tells(tmp_path, time, recoveries, more):
    made = kept_without_cells(time, recoveries=recoveries)
    assert RECORDED.complete(made, tmp_path) == f"{made['command']} {more}".rstrip()


def test_settings_that_no_cells_record_are_said(again, capsys):
    folder = again.ROOT / "experiments" / "speed"
    (folder / "compare.json").write_text(json.dumps(kept_without_cells("2026-11-26T12:00:00Z")))
    again.run("--list")
    said = capsys.readouterr().out
    assert "speed: no cells record the settings of fit: those that its command does not " in said
    assert "give are today's, but fit.rate_choices=1" in said
    (folder / "cells" / "one" / "config.json").write_text("{}")
    again.run("--list")
    assert "no cells record" not in capsys.readouterr().out


def test_a_compression_of_other_defaults_is_given_what_it_read_and_was_set_to(tmp_path):
    default = {name: x for name, x in asdict(FitConfig()).items() if name != "rate_choices"}
    fit = default | {"steps": default["steps"] + 7, "window": 512, "seed": 3}
    settings = {"calibration": "bundled,own", "num_windows": 16, "window": 512}
    made = {
        "command": "rap compress smollm2 --window 512 --set fit.window=512 -o x/out",
        "provenance": {"settings": settings},
        "recovery": {"fit": {"config": fit}},
    }
    assert RECORDED.complete(made, tmp_path) == (
        "rap compress smollm2 --calibration bundled,own --windows 16 --set fit.rate_choices=1 "
        f"--set fit.steps={fit['steps']} --window 512 --set fit.window=512 -o x/out"
    )
    sources = ",".join(UNASKED)
    settings = {"calibration": sources, "num_windows": CALIBRATION_WINDOWS}
    made["provenance"] = {"settings": settings | {"window": CALIBRATION_WINDOW}}
    made["recovery"]["fit"]["config"] = asdict(FitConfig())
    assert RECORDED.complete(made, tmp_path) == made["command"]


def test_sizes_that_a_command_left_to_the_defaults_of_its_time_are_given(tmp_path):
    """The default protocol has changed since; results keep the settings that they were made by."""
    complete = partial(RECORDED.complete, folder=tmp_path)
    settings = {"num_windows": 64, "window": 512}
    settings["measures"] = {"text": "bundled", "window": 512, "num_windows": None}
    made = {
        "command": "rap compare --measure window=512 -o x",
        "provenance": {"settings": settings},
    }
    assert complete(made) == (
        "rap compare --measure window=512 -o x --windows 64 --window 512 --measure text=bundled "
        "--measure num_windows=null"
    )
    settings = {"windows": 16, "window": 512, "evaluate": "bundled", "max_windows": 12}
    made = {"command": "rap analyze loss --windows 16", "provenance": {"settings": settings}}
    assert complete(made) == (
        "rap analyze loss --windows 16 --window 512 --evaluate bundled --max-windows 12 "
        "--evaluate-window 512"
    )
    assert complete({"command": "python experiments/x.py"}) == "python experiments/x.py"


def test_foldings_end_where_they_did_before_a_default_was_farther(tmp_path):
    complete = partial(RECORDED.complete, folder=tmp_path)
    command = "rap compress smollm2 --retain 0.5 --target plain -o experiments/x/out"
    method = {"name": "rap", "keys": "fold"}
    near = "rap compress smollm2 --method rap:reach=90 --retain 0.5 --target plain -o experiments/x"
    assert complete({"command": command, "method": method}) == f"{near}/out"
    for today in (method | {"reach": "far"}, {"name": "rap", "keys": "pairs"}, {"name": "palu"}):
        assert complete({"command": command, "method": today}) == command
    toy = command.replace("smollm2", "bundled")
    assert complete({"command": toy, "method": method}) == toy
