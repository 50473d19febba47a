"""Every recipe resolves to settings that exist, and its published figures to cells of its grid."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.command import error_violations, run
from rap.cli import compare as compare_command
from rap.cli import compress as compress_command
from rap.cli import recover as recover_command
from rap.methods import Rap
from rap.model.errors import RapError
from rap.recovery.config import recovery_config
from rap.studies.compare.grid import Grid

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
TEST_TEXT = "Salesforce/wikitext:wikitext-2-raw-v1:test"
GENTLE = {"llama3.2-3b": {}, "qwen2.5-14b": {"epochs": 8}}


@pytest.fixture
def asked(monkeypatch) -> dict[str, Any]:
    """What the command asks the library to do, which then is not done."""
    given: dict[str, Any] = {}

    def remember(model: str, **settings: Any) -> None:
        given.update(settings, model=model)
        raise RapError("enough")

    monkeypatch.setattr(compress_command, "compress", remember)
    monkeypatch.setattr(compare_command, "compare", remember)
    return given


def grid_of(asked: dict[str, Any]) -> Grid:
    """The grid that the library would make of what it is asked."""
    lists = {"methods": "methods", "retain": "retains", "recover": "recoveries"}
    others = (
        "align",
        "calibration",
        "num_windows",
        "window",
        "seed",
        "bos",
        "recovery",
        "measures",
    )
    return Grid(
        **{field: tuple(asked[name]) for name, field in lists.items()},
        **{name: asked[name] for name in others},
    )


def test_every_model_of_the_paper_has_a_recipe():
    assert [path.stem for path in RECIPES] == [
        "llama2-7b", "llama3-8b", "llama3.2-3b", "mistral-7b", "qwen2.5-14b",
    ]  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_compress_resolves_to_the_papers_method(path, asked):
    assert run("compress", "--config", path).err == "error: enough\n"
    assert asked["method"] == Rap.paper(retain=0.7, align=2)
    assert (asked["calibration"], asked["num_windows"], asked["window"]) == ("paper", 32, 1024)
    assert (asked["evaluate"], asked["bos"]) == (TEST_TEXT, "never")
    assert asked["recover"] == ("none" if path.stem in GENTLE else "paper")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_compare_resolves_to_a_grid_with_the_papers_cells(path, asked, tmp_path):
    assert run("compare", "--config", path, "--seed", 3).err == "error: enough\n"
    grid = grid_of(asked)
    assert (grid.seed, grid.bos) == (3, "never")
    assert (grid.calibration, grid.num_windows, grid.window) == ("paper", 32, 1024)
    assert (grid.measures.text, grid.measures.window) == (TEST_TEXT, 2048)
    assert grid.measures.num_windows is None
    cells = {(cell.spec, cell.retain, cell.recover) for cell in grid.cells("f", "bfloat16")}
    figures = yaml.safe_load(path.read_text(encoding="utf-8"))["paper"]
    assert asked["paper"] == figures
    for figure in figures:
        assert (figure["method"], figure["retain"], figure["recover"]) in cells, figure
        assert figure["source"].startswith(("tab:", "app:"))
        assert figure["perplexity"] == "diverged" or figure["perplexity"] > 1
    keys = [(figure["method"], figure["retain"], figure["recover"]) for figure in figures]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", GENTLE)
def test_small_and_large_models_are_recovered_as_the_paper_did(name, monkeypatch, tmp_path):
    (path,) = [path for path in RECIPES if path.stem == name]
    wanted: dict[str, Any] = {}

    def configured(*arguments: Any) -> None:
        wanted["recover"] = original(*arguments)
        raise RapError("enough")

    original = recover_command.configured
    monkeypatch.setattr(recover_command, "configured", configured)
    monkeypatch.chdir(tmp_path)
    assert run("recover", "cut", "--config", path).err == "error: enough\n"
    expected = recovery_config("paper", learning_rate=2e-5, clip=0.3, **GENTLE[name])
    assert wanted["recover"] == expected


@pytest.mark.parametrize("name", GENTLE)
def test_the_grid_distils_as_the_paper_did(name, asked):
    (path,) = [path for path in RECIPES if path.stem == name]
    run("compare", "--config", path)
    expected = recovery_config("paper", learning_rate=2e-5, clip=0.3, **GENTLE[name])
    assert grid_of(asked).distillation("paper") == expected


def test_a_group_of_commands_has_sections_of_its_commands(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("evaluate: {bos: odd, fidelity: {dense: nowhere}}\n", encoding="utf-8")
    for command in ("perplexity", "retrieval"):
        result = run("evaluate", command, "bundled", "--config", path)
        assert error_violations(result) == []
        assert "odd" in result.err, "a setting of all commands of the group"
    path.write_text("evaluate: {retrieval: {speed: 3}}\nspeed: {}\n", encoding="utf-8")
    result = run("evaluate", "retrieval", "bundled", "--config", path)
    assert error_violations(result) == []
    assert "unknown options: speed" in result.err
    path.write_text("evaluate: {retrieval: {speed: 3}, bos: odd}\n", encoding="utf-8")
    assert "speed" not in run("evaluate", "perplexity", "bundled", "--config", path).err
    assert "odd" not in run("compress", "nowhere", "-o", "x", "--config", path).err


def test_a_section_wins_over_what_stands_outside(asked, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("retain: 0.9\ncompress: {output: a, retain: 0.4, key_share: 0.6}\n")
    assert run("compress", "bundled", "--config", path).err == "error: enough\n"
    assert (asked["method"].retain, asked["method"].key_share) == (0.4, 0.6)
    assert asked["output"] == Path("a")


def test_sections_belong_to_their_commands_alone(asked, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "recover: fast\nmodel: bundled\ncompress: {output: a, retain: 0.4}\n"
        "compare: {output: b, retain: '0.6', methods: rap}\n",
        encoding="utf-8",
    )
    run("compress", "--config", path)
    assert (asked["method"].retain, asked["recover"]) == (0.4, "fast")
    run("compare", "--config", path)
    assert (asked["retain"], asked["recover"]) == ((0.6,), ("fast",))
    path.write_text("compress: {output: a, speed: 4}\n", encoding="utf-8")
    result = run("compress", "bundled", "--config", path)
    assert error_violations(result) == []
    assert "unknown options: speed" in result.err
    assert "unknown options: compress" not in run("compare", "--config", path).err
    path.write_text("paper: 3\n", encoding="utf-8")
    assert "paper must be a list" in run("compare", "--config", path).err
