"""A place with one of everything that commands read, and the record of how each fault ended."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import logging as transformers_logging

from cases.command import run
from cases.damage import QUICK, TEXT, short
from cases.ending import Ended, contents, refusal_violations
from cases.fault_record import FaultRecord, kept_file, result_of
from cases.gguf_file import tiny_llama, write_gguf
from rap import assets
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.provenance import code_commit, provenance

RECORD, SHARE = "RAP_FAULT_CASES", "RAP_FAULT_SHARE"
RUNS = Path(__file__).parents[2] / "runs"
_RECORD = FaultRecord(kept_file(RUNS, code_commit()) if RECORD in os.environ else None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a share of the faults, always the same ones, where no more is asked for.

    Of every test the first case stays. What a stopped run has already seen pass is left out too.
    """
    share, seen, left = float(os.environ.get(SHARE, 1)), set(), []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("faults") and test in seen and _place_of(item) >= share:
            left.append(item)
            _RECORD.cases.pop(item.nodeid, None)
        elif item.nodeid in _RECORD.cases:
            left.append(item)
        seen.add(test)
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


def _place_of(item: pytest.Item) -> float:
    """Where in [0, 1) a case stands by its name, which says nothing of its kind."""
    return int(hashlib.sha256(item.nodeid.encode()).hexdigest()[:8], 16) / 2**32


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the case of a test that passed."""
    if report.when == "call" and report.passed:
        _RECORD.passed(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write every case to the file that is asked for, unless a test failed."""
    if RECORD not in os.environ or exitstatus == pytest.ExitCode.INTERRUPTED:
        return
    if exitstatus == pytest.ExitCode.OK:
        share = float(os.environ.get(SHARE, 1))
        command = f"python experiments/reliability/reliability.py --share {share:g}"
        cases = [case for noted in _RECORD.cases.values() for case in noted]
        result = json.dumps(result_of(cases, command, provenance()), indent=1)
        Path(os.environ[RECORD]).write_text(result + "\n", "utf-8")
    _RECORD.through()


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every case gets a copy of: a checkpoint, its plan, what it becomes, and a text."""
    # A tiny model that commands made in this process would print.
    transformers_logging.set_verbosity_error()
    place = tmp_path_factory.mktemp("origin")
    (place / "text.txt").write_text(TEXT * 150, encoding="utf-8")
    model = tiny_llama()
    model.save_pretrained(place / "dense")
    assets.reference_tokenizer().save_pretrained(place / "dense")
    model.save_pretrained(place / "sharded", max_shard_size="600KB")
    assets.reference_tokenizer().save_pretrained(place / "sharded")
    write_gguf(place / "tiny.gguf", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        # Of the stock profile, so that all exports have something to read.
        done = run("compress", "dense", "-o", "small", "--profile", "stock", *QUICK)
    assert done.code == 0, done.err
    shutil.copyfile(place / "small" / "plan.rap", place / "plan.rap")
    return place


@pytest.fixture
def place(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of it, which a case may damage; what is dequantized is kept inside."""
    folder = tmp_path / "place"
    shutil.copytree(origin, folder)
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(folder)
    return folder


Record = Callable[[str, Sequence[Any], str, str], None]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Note a case: the kind of fault, the command, what exactly was done to it, how it ended."""
    return lambda kind, command, fault, ended: _RECORD.note(
        request.node.nodeid,
        {"kind": kind, "command": short(command), "fault": fault, "ended": ended},
    )


@pytest.fixture
def judged(place: Path) -> Callable[..., str]:
    """How a command ended that met a fault: `whole` or `refused`; anything else fails the test.

    Refused is exit code 2, one line, and every file in the place as it was `before`.
    """

    def judge(end: Ended, before: dict[str, str], *outputs: str) -> str:
        if end.code == 0:
            for output in outputs:
                check_whole(place / output)
            return "whole"
        assert refusal_violations(end) == []
        assert contents(place) == before, "something was left on disk"
        return "refused"

    return judge


def check_whole(output: Path) -> None:
    """A checkpoint that is there loads, with the weights that its config describes."""
    load(output)
    load_tokenizer(output)
