"""What a result says of where it came from: the commit, the command, and nothing of the machine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rap.checkpoint.provenance import CHECKOUT, code_commit, command_line, provenance


def _git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    command = ["git", *person, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def module(tmp_path, monkeypatch) -> Iterator[Path]:
    """A module committed in a repository of its own, taken for provenance; nothing is cached."""
    code_commit.cache_clear()
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "repository" / "module.py"
    path.parent.mkdir()
    path.write_text("x = 1\n", encoding="utf-8")
    _git(path.parent, "init", "--quiet")
    _git(path.parent, "add", "module.py")
    _git(path.parent, "commit", "--quiet", "--no-verify", "-m", "Begin")
    monkeypatch.setattr("rap.checkpoint.provenance.HERE", path)
    yield path
    code_commit.cache_clear()


def test_the_commit_is_that_of_the_checkout_and_a_change_is_marked(module):
    commit = _git(module.parent, "rev-parse", "HEAD")
    _git(module.parent, "tag", "-a", "v1", "-m", "v1")
    assert code_commit.__wrapped__() == commit[:7]
    module.write_text("x = 2\n", encoding="utf-8")
    assert code_commit.__wrapped__() == f"{commit[:7]}+"
    # Asked once a process: the code that runs is the code that was read.
    assert code_commit() == f"{commit[:7]}+"
    _git(module.parent, "checkout", "--quiet", "--", "module.py")
    assert code_commit() == f"{commit[:7]}+"


def test_a_repository_that_does_not_track_the_module_is_not_its_own(module, monkeypatch):
    installed = module.parent / "site-packages" / "module.py"
    installed.parent.mkdir()
    installed.write_text("", encoding="utf-8")
    monkeypatch.setattr("rap.checkpoint.provenance.HERE", installed)
    assert code_commit() is None


def test_the_repository_of_a_hook_does_not_answer(module, monkeypatch):
    commit = code_commit.__wrapped__()
    monkeypatch.setenv("GIT_DIR", str(module.parent / "elsewhere"))
    assert code_commit.__wrapped__() == commit


def test_no_commit_without_a_checkout_or_git(module, tmp_path, monkeypatch):
    assert code_commit.__wrapped__() is not None
    monkeypatch.setattr("rap.checkpoint.provenance.HERE", tmp_path / "nowhere" / "module.py")
    assert code_commit.__wrapped__() is None
    monkeypatch.setattr("rap.checkpoint.provenance.HERE", module)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_commit() is None


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["bin/rap", "demo", "--out", "a b"], "rap demo --out 'a b'"),
        ([CHECKOUT / "benchmarks/all.py", "--rounds", "2"], "python benchmarks/all.py --rounds 2"),
        ([CHECKOUT / ".venv" / "lib" / "pytest" / "__main__.py"], None),
        ([CHECKOUT / "src" / "rap" / "__main__.py", "doctor"], "rap doctor"),
        (["/elsewhere/script.py"], None),
        (["-c"], None),
    ],
)
def test_the_command_is_written_as_it_is_typed_in_the_checkout(words, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    assert command_line() == command


@pytest.mark.parametrize("used", [None, 1])
def test_the_device_is_the_one_that_was_used(used, monkeypatch):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "get_device_name", lambda index=0: f"GPU {index}")
    counts = {index: {"allocation.all.allocated": int(index == used)} for index in range(2)}
    monkeypatch.setattr(cuda, "memory_stats", lambda index: counts[index])
    found = provenance()["device"]
    if used is None:
        assert found.startswith("cpu (")
        assert found.endswith("not used here: GPU 0)")
    else:
        assert found == "GPU 1"


def test_nothing_of_the_machine_is_recorded(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(CHECKOUT / "experiments" / "cost" / "cost.py")])
    made = provenance(seed=1)
    assert made["command"] == "python experiments/cost/cost.py"
    assert made["settings"] == {"seed": 1}
    assert str(CHECKOUT) not in json.dumps(made)
