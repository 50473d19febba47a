"""A run of all faults that is stopped goes on; one that is through begins again."""

from cases.fault_record import FaultRecord, kept_file

CASE = {"kind": "killed", "command": "apply", "fault": "at change 1", "ended": "whole"}


def test_a_stopped_run_keeps_the_cases_of_tests_that_passed(tmp_path):
    kept = tmp_path / "runs" / "faults.jsonl"
    stopped = FaultRecord(kept)
    stopped.note("first", CASE)
    stopped.passed("first")
    stopped.passed("one that notes nothing")
    stopped.note("failed", CASE)
    kept.write_text(kept.read_text() + '{"cut sho')
    again = FaultRecord(kept)
    assert again.cases == {"first": [CASE]}
    again.through()
    assert FaultRecord(kept).cases == {}


def test_a_line_after_one_that_was_cut_short_is_whole(tmp_path):
    kept = tmp_path / "faults.jsonl"
    kept.write_text('{"cut sho')
    again = FaultRecord(kept)
    again.note("second", CASE)
    again.passed("second")
    assert FaultRecord(kept).cases == {"second": [CASE]}


def test_code_that_no_commit_names_keeps_nothing(tmp_path):
    assert kept_file(tmp_path, "4dbc4f3+") is None
    assert kept_file(tmp_path, None) is None
    kept = kept_file(tmp_path, "4dbc4f3")
    assert kept is not None
    assert "4dbc4f3" in kept.name
