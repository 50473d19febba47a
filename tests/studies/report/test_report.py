"""The report says what the result files say, and committed documents are up to date."""

import json
from pathlib import Path

import pytest

from rap.model.errors import RapError
from rap.studies.report.report import markdown_report, numeric, tables_of


def test_a_table_becomes_markdown(tmp_path: Path) -> None:
    table = {"title": "T", "header": ["a", "b"], "rows": [["x", "1.5"]]}
    result = {"table": table, "command": "rap demo"}
    (tmp_path / "b.json").write_text(json.dumps(result), encoding="utf-8")
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    page = markdown_report([tmp_path])
    assert page.splitlines()[0] == "# Results"
    assert "## T\n\n| a | b |\n| --- | ---: |" in page
    assert "| x | 1.5 |" in page
    assert "`rap demo`" in page


def test_columns_of_numbers_alone_are_to_the_right() -> None:
    header = ["name", "number", "signed", "text", "empty", "open"]
    rows = [["1", "1,024 (50%)", "+3%", "hqq4: 0.1", "", ""], ["2", "0.5", "-3%", "2", "", "7"]]
    table = {"header": header, "rows": rows}
    assert numeric(table) == [False, True, True, False, False, True]
    assert numeric({"header": header, "rows": []}) == [False] * 6


def test_headings_of_a_page_differ(tmp_path: Path) -> None:
    table = {"title": "T", "header": ["a"], "rows": [["x"]]}
    for name, title in (("a", "T"), ("b", "T"), ("c", "U")):
        result = {"table": table | {"title": title}}
        (tmp_path / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    page = markdown_report([tmp_path])
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [
        f"T ({tmp_path.name}/a.json)",
        f"T ({tmp_path.name}/b.json)",
        "U",
    ]


def test_a_bar_in_a_cell_does_not_end_it(tmp_path: Path) -> None:
    table = {"title": "T", "header": ["a", "b"], "rows": [["KL(dense || pruned)", "1.5"]]}
    (tmp_path / "a.json").write_text(json.dumps({"table": table}), encoding="utf-8")
    assert r"| KL(dense \|\| pruned) | 1.5 |" in markdown_report([tmp_path])


def test_single_files_are_shown_in_the_order_given(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        table = {"title": name, "header": ["x"], "rows": [[1]]}
        (tmp_path / f"{name}.json").write_text(json.dumps({"table": table}), encoding="utf-8")
    page = markdown_report([tmp_path / "c.json", tmp_path / "a.json"])
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## c", "## a"]
    (tmp_path / "plain.json").write_text('{"command": "rap demo"}', encoding="utf-8")
    with pytest.raises(RapError, match=r"plain\.json has no table"):
        markdown_report([tmp_path / "plain.json"])
    for broken in ({"table": {"title": "T"}}, {"tables": 3}, {"tables": [[1]]}):
        (tmp_path / "plain.json").write_text(json.dumps(broken), encoding="utf-8")
        with pytest.raises(RapError, match=r"plain\.json has a table without a header and rows"):
            markdown_report([tmp_path / "plain.json"])


def test_the_commit_is_shown_that_ran_or_else_that_brought_the_file(tmp_path: Path) -> None:
    packages = {"torch": "2", "transformers": "5"}
    made = {"rap": "0.1", "packages": packages, "device": "cpu", "time": "2026-11-21T08:00:00Z"}
    table = {"title": "T", "header": ["x"], "rows": [[1]]}
    path = tmp_path / "a.json"
    for commit, brought, shown in (
        ("abc1234+", None, "rap 0.1, code abc1234+, torch 2"),
        (None, "def5678", "code unrecorded, file committed in def5678"),
        (None, None, "rap 0.1, torch 2"),
    ):
        result = {"table": table, "provenance": {**made, "commit": commit}}
        result |= {"file_committed_in": brought} if brought else {}
        path.write_text(json.dumps(result), encoding="utf-8")
        assert shown in markdown_report([path])


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(RapError, match="run a benchmark"):
        markdown_report([tmp_path])
    with pytest.raises(RapError, match="this directory has no result files"):
        markdown_report([])


def test_broken_result_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(RapError, match="not JSON"):
        markdown_report([tmp_path])


def test_a_cell_that_failed_is_named(tmp_path: Path) -> None:
    table = {"title": "At retain 0.7", "header": ["method"], "rows": [["dense"]]}
    failed = {"method": "palu", "retain": 0.5, "recover": "fit", "error": "no memory"}
    result = {"table": table, "failed": [failed]}
    (tmp_path / "a.json").write_text(json.dumps(result), encoding="utf-8")
    assert "Failed: palu at 0.5, recovery fit: no memory" in markdown_report([tmp_path])


def test_a_column_that_says_nothing_is_left_out() -> None:
    table = {"header": ["method", "PPL", "recall"], "rows": [["a", 0, ""], ["b", "", ""]]}
    [found] = tables_of({"table": table})
    assert found == {"header": ["method", "PPL"], "rows": [["a", 0], ["b", ""]]}
    [found] = tables_of({"table": table | {"rows": []}})
    assert found["header"] == ["method", "PPL", "recall"]
