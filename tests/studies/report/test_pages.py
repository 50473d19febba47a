"""Pages by topic: every result on one of them, and the committed ones up to date."""

import json
from pathlib import Path

import pytest

from cases.command import error_violations, run
from rap.cli.compare import default_sources
from rap.model.errors import RapError
from rap.studies.report.page import INDEX, TOPICS, Topic, markdown_pages, read_topics

REPOSITORY = Path(__file__).parents[3]


def _result(path: Path, command: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"title": f"Table {path.stem}", "header": ["a"], "rows": [[path.stem]]}
    path.write_text(json.dumps({"table": table, "command": command}), encoding="utf-8")


@pytest.fixture
def root(tmp_path) -> Path:
    """Two experiments and a benchmark, and topics for all but one of them."""
    _result(tmp_path / "experiments" / "needle" / "needle.json", "python needle.py")
    _result(tmp_path / "experiments" / "new-study" / "new.json")
    _result(tmp_path / "benchmarks" / "results" / "decode-cpu.json", "python decode.py")
    _result(tmp_path / "benchmarks" / "results" / "rope-cpu.json")
    topics = tmp_path / "docs" / TOPICS
    topics.parent.mkdir()
    topics.write_text(
        "speed: {title: Speed, results: [results/rope-*.json, results/*.json]}\n"
        "absent: {title: Absent, results: [absent/*.json]}\n"
        "quality: {title: Quality of a cut, results: [needle/*.json]}\n",
        encoding="utf-8",
    )
    return tmp_path


def _titles(page: str) -> list[str]:
    return [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]


def test_every_result_is_on_the_page_of_its_topic_in_the_order_of_patterns(root):
    pages = markdown_pages(default_sources(root), root / "docs")
    assert list(pages) == [INDEX, "speed.md", "quality.md", "new-study.md"]
    assert _titles(pages["speed.md"]) == ["Table rope-cpu", "Table decode-cpu"]
    assert _titles(pages["quality.md"]) == ["Table needle"]
    assert pages["new-study.md"].startswith("# New study\n")


def test_a_folder_named_like_a_topic_shares_its_page(root):
    _result(root / "experiments" / "quality" / "left.json")
    pages = markdown_pages(default_sources(root), root / "docs")
    assert _titles(pages["quality.md"]) == ["Table needle", "Table left"]


def test_the_index_leads_from_every_result_file_to_its_command_and_page(root):
    index = markdown_pages(default_sources(root), root / "docs")[INDEX]
    file = "benchmarks/results/decode-cpu.json"
    _, _, section = index.partition("### results\n\n")
    row = next(line for line in section.splitlines() if "decode-cpu" in line)
    assert row == f"* [{file}](../{file}); `python decode.py`; shown in [Speed](speed.md)"
    assert "* [Speed](speed.md): 2 result files\n" in index
    assert "* [Quality of a cut](quality.md): 1 result file\n" in index
    headings = [line for line in index.splitlines() if line.startswith("### ")]
    assert headings == ["### needle", "### new-study", "### results"]


def test_archived_studies_are_results_too(root):
    _result(root / "experiments" / "archive" / "old" / "old.json")
    topics = root / "docs" / TOPICS
    topics.write_text(
        f"{topics.read_text()}archive: {{title: Finished, results: [archive/*/*.json]}}\n"
    )
    pages = markdown_pages(default_sources(root), root / "docs")
    assert _titles(pages["archive.md"]) == ["Table old"]
    assert "experiments/archive/old/old.json" in pages[INDEX]
    assert len(default_sources(root)) == len(set(default_sources(root))) == 4


def test_a_page_a_folder_without_topics(root):
    (root / "docs" / TOPICS).unlink()
    pages = markdown_pages(default_sources(root), root / "docs")
    assert list(pages) == [INDEX, "needle.md", "new-study.md", "results.md"]


@pytest.mark.parametrize("text", ["- a list", "speed: fast", "speed: {title: Speed}", "{"])
def test_damaged_topics_are_refused(root, text):
    (root / "docs" / TOPICS).write_text(text, encoding="utf-8")
    with pytest.raises(RapError, match=r"topics\.yaml is damaged"):
        read_topics(root / "docs")


def test_a_pattern_is_of_the_end_of_a_path():
    topic = Topic("quality", "Quality", ["quality/*.json"])
    assert topic.place(Path("experiments/quality/a.json")) == 0
    assert topic.place(Path("experiments/cost/quality.json")) is None


def test_report_command_writes_a_folder_of_pages(root, monkeypatch):
    monkeypatch.chdir(root)
    result = run("report", "-o", "docs")
    assert result.code == 0, result.err
    found = {path.name: path.read_text(encoding="utf-8") for path in (root / "docs").glob("*.md")}
    assert found == markdown_pages(default_sources(Path()), Path("docs"))
    one = run("report", "experiments/needle/needle.json")
    assert _titles(one.out) == ["Table needle"]
    monkeypatch.chdir(root / "docs")
    nothing = run("report")
    assert error_violations(nothing) == []
    assert "this directory has no result files" in nothing.err


def test_the_committed_pages_are_built_from_the_committed_results():
    folder = REPOSITORY / "docs" / "results"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert committed == markdown_pages(default_sources(REPOSITORY), folder)
