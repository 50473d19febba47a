"""The report says what the result files say, and committed documents are up to date."""

import json
from pathlib import Path

import pytest

from rap.cli.report import FOLDERS
from rap.model.errors import RapError
from rap.studies.report.report import markdown_report

REPOSITORY = Path(__file__).parents[3]


def test_a_table_becomes_markdown(tmp_path: Path) -> None:
    table = {"title": "T", "header": ["a", "b"], "rows": [["x", "1.5"]]}
    result = {"table": table, "command": "rap demo"}
    (tmp_path / "b.json").write_text(json.dumps(result), encoding="utf-8")
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    page = markdown_report([tmp_path], "Page")
    assert page.splitlines()[0] == "# Page"
    assert "## T\n\n| a | b |\n| --- | ---: |" in page
    assert "| x | 1.5 |" in page
    assert "`rap demo`" in page


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(RapError, match="run a benchmark"):
        markdown_report([tmp_path])


def test_broken_result_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(RapError, match="not JSON"):
        markdown_report([tmp_path])


def test_the_committed_page_is_built_from_the_committed_results() -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == markdown_report([REPOSITORY / folder for folder in FOLDERS])
