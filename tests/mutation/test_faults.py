"""Faults that the mutation run plants quote the code as it is."""

from pathlib import Path

import pytest

from cases.scripts import load_script

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


RUNNER = load_script("tests/mutation/run.py")


@pytest.mark.parametrize("entry", RUNNER.read_faults([]), ids=lambda entry: entry["path"])
def test_every_fault_is_planted_in_one_place(entry):
    code = RUNNER._file_of(SOURCE, entry["path"]).read_text(encoding="utf-8")
    lost = {before: code.count(before) for before, *_ in entry["faults"]}
    assert {before: count for before, count in lost.items() if count != 1} == {}
    assert all(before != after for before, after, *_ in entry["faults"])
    RUNNER._pytest_arguments(entry)  # finds every test file that is named, once
