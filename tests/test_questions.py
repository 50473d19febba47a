"""The index of experiments, the archive, and the links from pages to the runs that they show."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from cases.scripts import REPOSITORY, load_script

DOCS = REPOSITORY / "docs"
ARCHIVED = sorted(path.parent.name for path in REPOSITORY.glob("experiments/archive/*/README.md"))
# Pages that scripts write tables of results into; those of `rap report` print every command.
GENERATED = (
    "measurements/methods.md",
    "measurements/data-and-tasks.md",
    "explanation/paper-replication.md",
    "explanation/pruning-vs-quantization.md",
    "how-to/choose.md",
    "measurements/cache-size.md",
)
NO_RESULTS = ("Paper replication",)  # headings whose tables have no result: a setup, and counts
FIGURE = re.compile(r"^\|.*\d\.\d", re.MULTILINE)


@pytest.fixture(scope="module")
def questions() -> ModuleType:
    """docs/questions.py, which is no package."""
    return load_script("docs/questions.py")


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    """docs/sources.py, which is no package."""
    return load_script("docs/sources.py")


def pages() -> list[Path]:
    """The pages of the documentation that are no records of results."""
    records = {DOCS / "results", DOCS / "log.md"}
    return [path for path in sorted(DOCS.rglob("*.md")) if not {path, *path.parents} & records]


def sections(text: str) -> list[str]:
    """A page in parts, each with its heading."""
    return re.split(r"^(?=#+ )", text, flags=re.MULTILINE)


def test_the_index_is_that_of_the_experiments(questions):
    """If it is not: python docs/questions.py."""
    text = questions.README.read_text(encoding="utf-8")
    assert questions.with_index(text) == text
    for folder in (*questions.experiments(), *questions.experiments(questions.README.parent)):
        assert f"[{folder.name}]({folder.name}/README.md)" in text


def test_an_experiment_is_in_one_group(questions, monkeypatch):
    assert {len(questions.groups_of(path.name)) for path in questions.experiments()} == {1}
    assert questions.groups_of("smollm2-merged-0.9") == ["What do merged heads keep?"]
    assert questions.groups_of("new-study") == []
    monkeypatch.setitem(questions.GROUPS, "What else?", ("smollm2*",))
    with pytest.raises(SystemExit, match=r"smollm2-pareto.*edit GROUPS"):
        questions.main()


def test_questions_are_plain(questions):
    prose = load_script("docs/prose.py")
    folders = questions.experiments(), questions.experiments(questions.README.parent / "archive")
    for folder in (path for some in folders for path in some):
        found = [one for one in prose.violations(questions.question(folder)) if one.rule != "line"]
        assert found == [], folder.name


def test_a_question_or_a_place_that_is_not_there_is_said(questions, tmp_path):
    (tmp_path / "README.md").write_text("What?\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="does not begin with"):
        questions.question(tmp_path)
    with pytest.raises(SystemExit, match=r"README\.md has no place for what is generated"):
        questions.with_index("# Experiments\n")


@pytest.mark.parametrize("name", ARCHIVED)
def test_an_archived_study_is_in_the_log_and_on_no_page(name, sources):
    log = (DOCS / "log.md").read_text(encoding="utf-8")
    entry = next(one for one in log.split("\n## ") if f"experiments/archive/{name}" in one)
    assert re.search(r"^Verdict: (?!open)", entry, re.MULTILINE)
    shown = {anchor for path in pages() for anchor in sources.linked(path.read_text("utf-8"))}
    assert sources.anchor(name) not in shown
    assert not (REPOSITORY / "experiments" / name).exists()


def test_links_to_runs_lead_to_their_commands(sources):
    index = (REPOSITORY / sources.INDEX).read_text(encoding="utf-8")
    headings = {sources.anchor(one[4:]) for one in index.splitlines() if one.startswith("### ")}
    linked = {path: sources.linked(path.read_text("utf-8")) for path in pages()}
    assert sum(map(len, linked.values())) > 50
    assert {path.name: found - headings for path, found in linked.items() if found - headings} == {}


@pytest.mark.parametrize("page", GENERATED)
def test_every_table_of_a_generated_page_links_to_its_runs(page, sources):
    bare = [
        part.splitlines()[0]
        for part in sections((DOCS / page).read_text(encoding="utf-8"))
        if FIGURE.search(part) and not sources.linked(part)
    ]
    assert [one for one in bare if one.lstrip("# ") not in NO_RESULTS] == []


def test_links_are_relative_to_their_page(sources):
    assert sources.link("smollm2-merged-0.7", "docs/how-to/choose.md") == (
        "[smollm2-merged-0.7](../results/README.md#smollm2-merged-07)"
    )
    assert sources.runs(["a", "b", "a"], "README.md") == (
        "Runs and commands: [a](docs/results/README.md#a), [b](docs/results/README.md#b)."
    )
