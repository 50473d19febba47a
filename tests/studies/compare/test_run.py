"""`rap compare`: what is finished stays, what fails is told, what is asked decides the cell."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.normalizers import Lowercase

import rap
from cases.command import error_violations, run
from cases.family_cases import CASES
from cases.fits import SHORT
from cases.models import tiny_model
from rap import assets
from rap.calibration import dense_context
from rap.checkpoint.card import interval_text
from rap.checkpoint.files import write_json
from rap.cli import compare as command_line
from rap.methods import METHODS, Rap
from rap.model.errors import CalibrationError, RapError
from rap.recovery import stages as stages_of_recovery
from rap.recovery.layer_fit import FitConfig
from rap.studies.compare import run as running
from rap.studies.compare.closeness import other_texts
from rap.studies.compare.grid import CONFIG, RESULT, Cell, Grid, finished, store
from rap.studies.compare.measurement import Measures, dense_states
from rap.studies.compare.run import cell_command

TINY = Measures(
    window=128,
    num_windows=2,
    recall_distances=(64,),
    recall_documents=2,
    copy_documents=2,
    decode_context=32,
    decode_steps=2,
    prefill_tokens=24,
)
SMALL = {"num_windows": 2, "window": 128}
FLAGS = "--windows 2 --window 128 --measure window=128 --measure num_windows=2 --measure"
FLAGS += " recall_documents=0 --measure decode_steps=0"


@dataclass(frozen=True, kw_only=True)
class Broken(Rap):
    """A method that plans, and then cannot be applied."""

    name = "broken"

    def apply(self, model: Any, plan: Any) -> Any:
        raise ZeroDivisionError("nothing left to divide")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Measures:
    """Measures on the start of the bundled text: all of it takes seconds to tokenize."""
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(assets.reference_text("test")[:12_000], encoding="utf-8")
    return replace(TINY, text=str(path))


@pytest.fixture(scope="module")
def grid(tmp_path_factory, tiny) -> tuple[Path, dict[str, Any], list[str]]:
    """A finished grid with a method that fails, what it returned, and what it said."""
    output, said = tmp_path_factory.mktemp("compare") / "grid", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "broken", Broken)
        found = rap.compare(
            output=output,
            methods=["rap:paper", "broken", "rap"],
            retain=(0.5,),
            paper=[{"method": "rap", "retain": 0.5, "perplexity": 10.82, "source": "here"}],
            say=said.append,
            measures=tiny,
            **SMALL,
        )
    return output, found, said


def test_every_cell_is_measured_on_the_same_things(grid, reference_model):
    dense, paper, default = grid[1]["cells"]
    fingerprint = rap.fingerprint_model(reference_model)
    assert dense["fingerprint"] == fingerprint
    # Of two heads merged at 0.5, only what makes keys and values shrinks: a third of the attention.
    assert default["attention_parameters"] * 6 == dense["attention_parameters"] * 5
    assert paper["attention_parameters"] * 2 == dense["attention_parameters"]
    assert paper["attention_flops"]["value"] * 2 == dense["attention_flops"]["value"]
    for cell in (paper, default):
        assert cell["kv_bytes_per_token"] * 2 == dense["kv_bytes_per_token"]
        assert cell["prefill_kv_bytes_per_token"] == cell["kv_bytes_per_token"]
        assert not cell["reconstructs"]
        assert cell["decode_seconds"] > 0
        assert cell["prefill_seconds"] > 0
        assert cell["prefill_tokens"] == 24
        assert cell["dense_fingerprint"] == fingerprint
        assert cell["provenance"]["packages"]["torch"]
        assert [entry["distance"] for entry in cell["recall"]] == [64]
        assert cell["perplexity"] > dense["perplexity"]
        assert cell["kl"]["low"] <= cell["kl"]["value"] <= cell["kl"]["high"]
        assert 0 < cell["kl"]["value"] < cell["kl_p99"]
        assert 0 < cell["top1"]["value"] < 1
        assert len(cell["evaluation"]["window_nats"]) == TINY.num_windows
        ratio = cell["perplexity"] / dense["perplexity"]
        assert cell["perplexity_ratio"]["value"] == pytest.approx(ratio, rel=1e-12)
    assert (dense["kl"]["value"], dense["kl_p99"], dense["top1"]["value"]) == (0, 0, 1)
    assert default["paper"] == {"perplexity": 10.82, "source": "here"}
    assert "paper" not in paper


def test_the_table_shows_the_cells(grid):
    table, near = grid[1]["tables"]
    header, rows = table["header"], {row[0]: row for row in table["rows"]}
    assert list(rows) == ["dense", "rap:paper", "rap"]
    by_name = dict(zip(header, rows["rap"], strict=True))
    assert by_name["KV"] == "50.0%"
    assert by_name["PPL, no recovery"] == f"{grid[1]['cells'][2]['perplexity']:.2f}"
    assert by_name["paper PPL, no recovery"] == "10.82"
    rows = {row[0]: dict(zip(near["header"], row, strict=True)) for row in near["rows"]}
    assert list(rows) == ["dense", "rap:paper", "rap"]
    assert (rows["dense"]["KL"], rows["dense"]["top-1"]) == ("0", "100.0%")
    for cell in grid[1]["cells"][1:]:
        shown = rows[cell["method"]]
        assert shown["KL"] == interval_text(cell["kl"], ".3g")
        assert shown["top-1"] == interval_text(cell["top1"], ".1%")
        # The dense cell's windows give the same pairs as those that the cut was compared with.
        assert shown["PPL of dense"] == interval_text(cell["perplexity_ratio"], ".3f")


def test_fidelity_can_be_left_out_and_changes_no_perplexity(grid, tiny, tmp_path):
    plain = replace(tiny, fidelity=False, recall_documents=0, decode_steps=0)
    # What is named twice is measured once.
    asked = {"methods": ["rap", "rap"], "retain": (0.5, 0.5), "measures": plain}
    found = rap.compare(output=tmp_path / "grid", **asked, **SMALL)
    with_it = {cell["method"]: cell for cell in grid[1]["cells"]}
    assert len(found["cells"]) == 2
    for cell in found["cells"]:
        assert not {"kl", "kl_p99", "top1"} & cell.keys()
        assert cell["evaluation"] == with_it[cell["method"]]["evaluation"]
    # Windows in pairs need no divergence.
    near = found["tables"][1]
    shown = dict(zip(near["header"], near["rows"][1], strict=True))
    assert shown["PPL of dense"] == interval_text(with_it["rap"]["perplexity_ratio"], ".3f")
    assert (shown["KL"], shown["top-1"]) == ("", "")


def test_other_texts_are_measured_as_the_first_is(grid, tiny, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(assets.reference_text("validation")[:8_000], encoding="utf-8")
    plain = replace(tiny, recall_documents=0, decode_steps=0)
    asked = {"methods": ["rap"], "retain": (0.5,), **SMALL}
    both = replace(plain, other_texts=f"{other}, ")
    found = rap.compare(output=tmp_path / "both", measures=both, **asked)
    alone = replace(plain, text=str(other))
    apart = rap.compare(output=tmp_path / "apart", measures=alone, **asked)
    known = {cell["method"]: cell for cell in grid[1]["cells"]}
    for cell, one in zip(found["cells"], apart["cells"], strict=True):
        assert cell["perplexity"] == known[cell["method"]]["perplexity"]
        figures = cell["other_texts"][str(other)]
        assert figures["perplexity"] != cell["perplexity"]
        assert figures == {name: one[name] for name in figures}
    assert {"kl", "top1", "perplexity", "evaluation"} <= figures.keys()
    table = next(one for one in found["tables"] if one["title"].startswith("Other datasets"))
    dense, cut = table["rows"]
    assert table["header"] == ["method", "other.txt PPL", "other.txt KL"]
    lost = figures["perplexity"] / float(apart["cells"][0]["perplexity"]) - 1
    assert (dense[0], dense[2]) == ("dense", "0")
    assert cut == [
        "rap",
        f"{figures['perplexity']:.2f} ({lost:+.0%})",
        f"{figures['kl']['value']:.3g}",
    ]
    assert not any(one["title"].startswith("Other datasets") for one in apart["tables"])
    command = shlex.split(found["cells"][1]["command"])
    assert f"other_texts={other}, " in command


def test_a_text_that_changed_is_not_taken_for_what_was_measured(tiny, tmp_path):
    held_out = tmp_path / "mine.txt"
    held_out.write_text(assets.reference_text("test")[:6_000], encoding="utf-8")
    fast = replace(tiny, text=str(held_out), recall_documents=0, decode_steps=0, num_windows=1)
    asked = {"output": tmp_path / "grid", "methods": ["rap"], "retain": (0.5,), **SMALL}
    known = rap.compare(measures=fast, **asked)
    assert rap.compare(measures=fast, **asked)["cells"] == known["cells"]
    held_out.write_text(assets.reference_text("validation")[:6_000], encoding="utf-8")
    with pytest.raises(RapError, match=r"mine\.txt has changed since .*grid was measured on it"):
        rap.compare(measures=fast, **asked)
    assert json.loads((tmp_path / "grid" / "compare.json").read_text())["cells"] == known["cells"]


def test_a_config_that_changed_is_not_taken_for_what_was_measured(tiny, tmp_path):
    """Cells are named by weights, and the base of rotation is in the config alone."""
    model = assets.reference_model()
    fast = replace(tiny, recall_documents=0, decode_steps=0, num_windows=1)
    asked = {"output": tmp_path / "grid", "methods": ["rap"], "retain": (0.5,), **SMALL}
    asked |= {"tokenizer": assets.reference_tokenizer(), "measures": fast}
    known = rap.compare(model, **asked)
    assert rap.compare(model, **asked)["cells"] == known["cells"]
    model.config.rope_parameters["rope_theta"] *= 2
    with pytest.raises(
        RapError, match=r"another config \(rope_parameters\): choose another output"
    ):
        rap.compare(model, **asked)
    assert json.loads((tmp_path / "grid" / "compare.json").read_text())["cells"] == known["cells"]


def test_a_tokenizer_that_changed_is_not_taken_for_what_was_measured(tiny, tmp_path):
    """Cells are named by weights, and the same text is other tokens."""
    model = assets.reference_model()
    fast = replace(tiny, recall_documents=0, decode_steps=0, num_windows=1)
    asked = {"output": tmp_path / "grid", "methods": ["rap"], "retain": (0.5,), **SMALL}
    asked |= {"measures": fast, "tokenizer": assets.reference_tokenizer()}
    known = rap.compare(model, **asked)
    noted = tmp_path / "grid" / "dense.tokenizers"
    assert rap.compare(model, **asked)["cells"] == known["cells"]
    changed = assets.reference_tokenizer()
    changed.backend_tokenizer.normalizer = Lowercase()
    with pytest.raises(RapError, match="with another tokenizer: choose another output"):
        rap.compare(model, **asked | {"tokenizer": changed})
    assert json.loads((tmp_path / "grid" / "compare.json").read_text())["cells"] == known["cells"]
    noted.unlink()  # as a folder of an earlier release
    assert rap.compare(model, **asked)["cells"] == known["cells"]
    assert noted.is_file()


def test_a_comparison_that_is_killed_again_loses_nothing(grid, tiny, monkeypatch):
    """One that only retries a failed cell is repeated, and ends at its first line."""
    output = grid[0]
    asked = {"output": output, "methods": ["rap:paper", "broken", "rap"], "retain": (0.5,)}
    asked |= {"measures": tiny, **SMALL}
    monkeypatch.setitem(METHODS, "broken", Broken)
    before = rap.compare(**asked)["cells"]
    count = 0

    def after_one(line):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rap.compare(**asked, say=after_one)
    assert json.loads((output / "compare.json").read_text())["cells"] == before


def test_texts_of_different_lengths_say_how_much_of_each_was_read():
    def figures(count):
        return {"perplexity": 9.0, "kl": {"value": 0.0}, "evaluation": {"num_windows": count}}

    dense = {"method": "dense", "evaluation": {"num_windows": 4, "window": 64}}
    dense["other_texts"] = {"a.txt": figures(4), "b.txt": figures(2)}
    note = other_texts("m", 0.5, dense, [])["note"]
    assert "; 4 windows of a.txt and 2 windows of b.txt, of 64 tokens." in note
    dense["other_texts"]["b.txt"] = figures(4)
    assert "; 4 windows of each text, of 64 tokens." in other_texts("m", 0.5, dense, [])["note"]


def test_a_text_is_not_measured_twice():
    with pytest.raises(RapError, match=r"names a text twice: bundled, a\.txt, bundled"):
        Measures(text="bundled", other_texts="a.txt,bundled")


def test_the_dense_model_reads_the_text_once_for_all_cells(tiny, tmp_path, monkeypatch):
    made: list[int] = []

    def count(*given: Any) -> Any:
        made.append(1)
        return dense_states(*given)

    monkeypatch.setattr(running, "dense_states", count)
    fast = replace(tiny, recall_documents=0, decode_steps=0, num_windows=1)
    asked = {"methods": ["rap", "random"], "retain": (0.5,), "measures": fast, **SMALL}
    rap.compare(output=tmp_path / "grid", **asked)
    assert made == [1]
    rap.compare(output=tmp_path / "grid", **asked)
    assert made == [1], "nothing was left to compare"


def test_a_failed_cell_is_recorded_and_the_rest_goes_on(grid):
    output, found, said = grid
    (failed,) = found["failed"]
    assert failed["method"] == "broken"
    assert failed["error"] == "ZeroDivisionError: nothing left to divide"
    assert "Failed: broken (none)." in found["tables"][0]["note"]
    assert any("failed: ZeroDivisionError" in line for line in said)
    (record,) = output.glob("cells/broken-*/error.json")
    assert "in apply" in json.loads(record.read_text(encoding="utf-8"))["traceback"]


def test_a_model_that_a_method_is_not_made_for_fails_in_a_sentence(tiny, tmp_path):
    """Also where the plan could be made, and what it makes would crash."""
    model = tiny_model("llama", head_dim=80, hidden=160, vocab_size=4096)
    found = rap.compare(
        model,
        tokenizer=assets.reference_tokenizer(),
        output=tmp_path,
        methods=["transmla"],
        retain=(0.7,),
        measures=replace(tiny, recall_documents=0, decode_steps=0),
        **SMALL,
    )
    (failed,) = found["failed"]
    assert failed["error"].startswith("layer 0: 40 pairs of a head do not divide into 32 slots")


def test_a_model_of_which_not_all_layers_attend_is_compared_without_times(tiny, tmp_path):
    case = next(case for case in CASES if case.name == "lfm2")
    model = case.model(dtype=torch.float32, vocab_size=4096)
    found = rap.compare(
        model,
        tokenizer=assets.reference_tokenizer(),
        output=tmp_path,
        methods=["magnitude"],
        retain=(0.5,),
        measures=replace(tiny, recall_documents=0),
        **SMALL,
    )
    assert not found["failed"]
    assert all("decode_seconds" not in cell for cell in found["cells"])


def test_a_command_whose_cell_failed_ends_in_exit_code_1(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "broken", Broken)
    plain = ["--measure", f"text={tiny.text}", *shlex.split(FLAGS)]
    asked = ["--methods", "broken", "--retain", "0.5", *plain, "-o", tmp_path / "out"]
    for _ in range(2):
        result = run("compare", *asked)
        assert result.code == 1
        failed, closing = result.err.splitlines()[-2:]
        assert failed.startswith("failed: broken at 0.5, recovery none: ZeroDivisionError")
        assert closing.startswith(f"wrote {tmp_path / 'out' / 'report.html'}; ")
        assert closing.endswith("1 of 2 runs failed: the same command tries them again")
    monkeypatch.setattr(Broken, "apply", Rap.apply)
    assert run("compare", *asked).code == 0


def test_a_finished_cell_is_not_run_again(grid, tiny, tmp_path, monkeypatch):
    output = tmp_path / "grid"
    shutil.copytree(grid[0], output)
    for place, name in (
        (running, "measure"),
        (running, "dense_states"),
        (dense_context, "calibrate"),
    ):
        monkeypatch.setattr(place, name, lambda *_, name=name, **__: pytest.fail(f"{name} again"))
    methods = ["rap:paper", "rap"]
    found = rap.compare(output=output, methods=methods, retain=(0.5,), measures=tiny, **SMALL)
    kept = {cell["cell"]: cell["perplexity"] for cell in grid[1]["cells"]}
    assert {cell["cell"]: cell["perplexity"] for cell in found["cells"]} == kept


SHORT_FIT = {f"fit.{name}": value for name, value in SHORT.items()}


def test_kept_models_are_measured_otherwise_and_distilled(tiny, tmp_path, monkeypatch):
    plain = replace(tiny, recall_documents=0, decode_steps=0)
    asked = {"methods": ["rap"], "retain": (0.5,), **SMALL}
    asked |= {"recovery": SHORT_FIT}
    both = {"steps": 2, "global_batch": 2, "num_windows": 4, "evaluate_every": 2} | SHORT_FIT
    recoveries = ["none", "fit", "fit+fast"]
    whole = asked | {"recover": recoveries, "recovery": both, "measures": plain}
    apart = rap.compare(output=tmp_path / "not", **whole)
    assert not (tmp_path / "not" / "models").exists()
    output = tmp_path / "kept"
    first = rap.compare(output=output, recover=recoveries[:2], measures=plain, keep=True, **asked)
    assert len(list(output.glob("models/rap-0.5-*"))) == 2
    for place, name in ((dense_context, "calibrate"), (stages_of_recovery, "fit_layers")):
        monkeypatch.setattr(place, name, lambda *_, name=name, **__: pytest.fail(f"{name} again"))
    measures = replace(plain, num_windows=1)
    other = rap.compare(output=output, recover=recoveries[:2], measures=measures, **asked)
    last = rap.compare(output=output, **whole)

    def fingerprints(found: dict[str, Any]) -> list[str]:
        assert found["failed"] == []
        return [cell["fingerprint"] for cell in found["cells"]]

    assert fingerprints(other) == fingerprints(first) == fingerprints(apart)[:3]
    assert fingerprints(last) == fingerprints(apart)
    for one, two in zip(last["cells"], apart["cells"], strict=True):
        assert one["perplexity"] == two["perplexity"]
        assert one.get("kept_fraction") == two.get("kept_fraction")
    assert [len(cell["evaluation"]["window_nats"]) for cell in other["cells"]] == [1] * 3
    (folder,) = output.glob("models/rap-0.5-fit-*")
    assert rap.load(folder).config.architectures
    assert (folder / "tokenizer.json").is_file()


def test_a_changed_setting_is_another_cell():
    def names(**changes: Any) -> set[str]:
        grid = Grid(**{"methods": ("rap",), "retains": (0.5,), **changes})
        return {cell.name for cell in grid.cells("fingerprint", "float32")}

    same = names()
    assert names() == same
    for change in (
        {"align": 8},
        {"calibration": "paper"},
        {"num_windows": 65},
        {"seed": 1},
        {"measures": Measures(num_windows=47)},
        {"measures": Measures(fidelity=False)},
        {"measures": Measures(recall_wording="natural")},
        {"methods": ("rap:values=channels",)},
    ):
        dense_and_cell = names(**change)
        assert len(dense_and_cell) == 2
        # The dense row depends on measures and seed alone.
        shared = 0 if {"seed", "measures"} & change.keys() else 1
        assert len(dense_and_cell & same) == shared, change
    distilled = {"recoveries": ("fast",)}
    assert not {*names(**distilled, recovery={"steps": 9})} <= names(**distilled)
    both = {"recoveries": ("fit+fast",)}
    assert not {*names(**both, recovery={"steps": 9})} <= names(**both)
    fitted = {"recoveries": ("fit",)}
    assert not {*names(**fitted, recovery={"fit.steps": 9})} <= names(**fitted)
    assert names(**fitted, recovery={"fit.steps": FitConfig().steps}) == names(**fitted)


def test_the_plain_wording_leaves_cells_their_names():
    """They are those of the time when there was no other."""
    assert not {"recall_wording", "other_texts"} & Measures().settings().keys()
    assert Measures(other_texts="a.txt").settings()["other_texts"] == "a.txt"
    assert Measures(recall_wording="natural").settings()["recall_wording"] == "natural"
    with pytest.raises(RapError, match="use plain, natural"):
        Measures(recall_wording="odd")


def test_a_cell_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    cell = Cell("rap", 0.5, "none", None, {"seed": 0})
    folder = tmp_path / cell.name

    def full(path: Path, data: Any) -> None:
        if path.name == RESULT:
            raise OSError("no space left on device")
        write_json(path, data)

    monkeypatch.setattr("rap.studies.compare.grid.write_json", full)
    with pytest.raises(RapError, match="no space left"):
        store(folder, cell, result={"perplexity": 1.0})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    store(folder, cell, result={"perplexity": 1.0})
    assert finished(folder) == {"perplexity": 1.0}
    assert json.loads((folder / CONFIG).read_text(encoding="utf-8")) == {"seed": 0}


def test_a_killed_comparison_continues(tiny, tmp_path):
    output = tmp_path / "out"
    arguments = (
        f"--methods rap,rap:paper --retain 0.7,0.5 {FLAGS} -o {output} --measure text={tiny.text}"
    )
    script = "from rap.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "compare", *shlex.split(arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while len(list(output.glob("cells/*/result.json"))) < 2:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path: path.stat().st_mtime_ns for path in output.glob("cells/*/result.json")}
    assert 2 <= len(before) < 5
    result = run("compare", *shlex.split(arguments), "--json")
    assert result.code == 0, result.err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [cell["method"] for cell in result.json["cells"]] == [
        "dense", "rap", "rap:paper", "rap", "rap:paper",
    ]  # fmt: skip
    assert result.err.count("finished before") == len(before)
    assert not list(output.rglob("*.partial-*"))


def test_the_command_of_a_cell_asks_for_that_cell(monkeypatch):
    grid = Grid(
        methods=("rap", "rap:paper:seed=3"),
        retains=(0.7, 1 / 3),
        recoveries=("none", "fit", "fast", "fit+fast"),
        align=None,
        recovery={"learning_rate": 2e-5, "steps": 3, "fit.rate": 2e-3},
        measures=Measures(
            num_windows=None, recall_distances=(64, 128), text="a b.txt", fidelity=False
        ),
    )
    asked: dict[str, Any] = {}

    def remember(model: str, **given: Any) -> dict[str, Any]:
        asked.update(given, model=model)
        raise RapError("enough")

    monkeypatch.setattr(command_line, "compare", remember)
    for cell in grid.cells("f", "float32"):
        if cell.method is None:
            continue
        typed = cell_command(cell, grid, "some/model", "bfloat16", device_map="auto")
        program, *arguments = shlex.split(typed)
        assert program == "rap"
        assert run(*arguments).err == "error: enough\n"
        names = ("align", "calibration", "num_windows", "window", "seed", "recovery", "measures")
        again = Grid(
            methods=tuple(asked["methods"]),
            retains=tuple(asked["retain"]),
            recoveries=tuple(asked["recover"]),
            **{name: asked[name] for name in names},
        )
        assert (asked["model"], asked["dtype"]) == ("some/model", "bfloat16")
        assert asked["device_map"] == "auto"
        assert [one.name for one in again.cells("f", "float32")][1:] == [cell.name]


def test_the_demo_ends_with_a_page(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "DEMO_METHODS", ("rap", "not-yet-there"))
    monkeypatch.setattr(command_line, "DEMO_RETAINS", "0.5")
    monkeypatch.setattr(command_line, "DEMO_MEASURES", tiny)
    result = run("compare", "--demo", "--windows", 2, "-o", tmp_path / "demo")
    assert result.code == 0, result.err
    assert "At retain 0.5, bundled" in result.out
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") > 3


@pytest.mark.parametrize(
    ("arguments", "retains", "windows"),
    [
        ("", (0.8, 0.7, 0.5), 32),
        ("--retain 0.7,0.5", (0.7, 0.5), 32),
        ("--windows 64", (0.8, 0.7, 0.5), 64),
        ("--config run.yaml", (0.9,), 32),
    ],
)
def test_what_is_given_wins_over_the_demo(tmp_path, monkeypatch, arguments, retains, windows):
    asked: dict[str, Any] = {}

    def remember(model: str, **given: Any) -> dict[str, Any]:
        asked.update(given)
        raise RapError("enough")

    monkeypatch.setattr(command_line, "compare", remember)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("retain: '0.9'\n", encoding="utf-8")
    assert run("compare", "--demo", *arguments.split()).err == "error: enough\n"
    assert (asked["retain"], asked["num_windows"]) == (retains, windows)
    assert (asked["window"], asked["measures"].window) == (512, 512), "a demo is quick"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--methods nothing", "unknown method 'nothing'"),
        ("--methods rap:nothing", "has no recipe 'nothing'; it has: general, paper"),
        ("--methods rap:rank=4", "has no setting 'rank'"),
        ("--methods rap:retain=0.4", "has no setting 'retain'"),
        ("--retain 0.5:0.9", "no list of ratios"),
        ("--retain 1.5", "leaves (0, 1]"),
        ("--recover sometimes", "unknown recovery 'sometimes'"),
        ("--recover fast --set rate=1", "recovery has no setting 'rate'"),
        ("--measure speed=4", "cannot measure 'speed=4'"),
        (
            "--measure window=0",
            "measure window cannot be 0: it should be greater than or equal to 1",
        ),
        ("--measure window=soon", "measure window cannot be 'soon'"),
        (
            "--measure prefill_tokens=-1",
            "prefill_tokens cannot be -1: it should be greater than or equal to 0",
        ),
        (
            "--measure recall_distances=64,soon",
            "cannot be (64, 'soon'): it should be a valid integer",
        ),
        ("--recover fast --set dropout=1", "dropout cannot be 1: it should be less than 1"),
        ("--methods ,", "a comparison needs methods: name at least one"),
        ("--demo --methods ' '", "a comparison needs methods: name at least one"),
        ("--retain ,", "retain ',' is no list of ratios"),
        ("--recover ,", "a comparison needs recoveries: name at least one"),
        (
            "--recover fast --set steps=abc",
            "recovery steps cannot be 'abc': it should be a valid integer",
        ),
        (
            "--recover fit --set fit.steps=abc",
            "fit steps cannot be 'abc': it should be a valid integer",
        ),
        ("--recover fit --set fit.foo=3", "fit has no setting foo; it has: batch"),
        (
            "--recover none,fit --set steps=3",
            "cannot set steps of none, fit: fit.NAME=VALUE applies to",
        ),
        ("--recover fast --set fit.steps=3", "cannot set fit.steps of fast"),
        ("--set steps=3", "cannot set steps of none"),
        ("--calibration nofile.txt", "there is no file nofile.txt"),
        ("--calibration bundled,repeated:nofile.txt", "there is no file nofile.txt"),
        ("--measure text=nofile.txt", "there is no file nofile.txt"),
        ("--measure other_texts=nofile.txt", "there is no file nofile.txt"),
        ("--measure fidelity=0", "measure fidelity cannot be 0: it should be a valid boolean"),
    ],
)
def test_a_bad_request_is_refused_before_any_work(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "Bench", lambda *_: pytest.fail("a model was loaded"))
    result = run("compare", *shlex.split(arguments), "-o", tmp_path / "out")
    assert error_violations(result) == []
    assert reason in result.err
    assert not (tmp_path / "out").exists()


def test_other_texts_are_apart_from_the_calibration_data_too(tiny, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("Some words. " * 4000)
    measures = replace(tiny, other_texts=str(mine))
    with pytest.raises(CalibrationError, match="is calibrated on as well; evaluate on held-out:"):
        rap.compare(
            output=tmp_path / "out", measures=measures, calibration=str(mine), methods=["rap"]
        )
