"""What documents tell a reader to type: commands and options that exist, and code that runs."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import typer
import yaml

import rap
from cases.command import run
from cases.scripts import load_script
from rap.calibration.registry import STATISTICS
from rap.cli import app
from rap.cli.setup import command_tree
from rap.methods import METHODS
from rap.recovery.config import PRESETS, RecoveryConfig
from rap.recovery.layer_fit import FitConfig

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
EXTEND = DOCS / "how-to" / "extend"
# Pages whose commands run on the bundled model, in the order in which they are printed.
RUN = (
    "tutorials/quickstart",
    "how-to/combine",
    "how-to/evaluate",
    "how-to/other-engines",
    "how-to/recover",
    "how-to/serve-llamacpp",
    "how-to/serve-vllm",
    "how-to/speed",
)
# Pages of results name commands as they were typed then, the others as they are now.
RECORDS = (DOCS / "results", DOCS / "log.md", DOCS / "reference" / "commands.md")
BY_HAND = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if not {path, *path.parents} & {*RECORDS}),
]
WIDTH = 88  # characters of a code block beside the navigation, in a window of 1,280 pixels
PLACES = dict(command_tree(typer.main.get_command(app)))
NOT_RUN = re.compile(r"<!-- not run:[^>]*-->\n$")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> Iterator[tuple[str, bool]]:
    """Fenced blocks of a language, each with whether it is to be run."""
    for found in FENCE.finditer(text):
        if found[1] == language:
            yield found[2], NOT_RUN.search(text[: found.start()]) is None


def commands(text: str) -> Iterator[str]:
    """Lines that call rap, in fenced or indented blocks, without what is behind a `#`."""
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        stripped = line.strip().removeprefix(". .venv/bin/activate && ")
        indented = line.startswith("    ") or stripped == line
        if indented and re.match(r"rap [a-z]", stripped):
            yield from (part.strip() for part in stripped.split("  #")[0].split("&&"))


def violations(line: str) -> list[str]:
    """What a command line asks for that does not exist."""
    words = shlex.split(line)[1:]
    if "--" in words:
        words = words[: words.index("--")]
    place = ""
    for word in words:
        deeper = f"{place} {word}".strip()
        if deeper not in PLACES:
            break
        place = deeper
    if not place or getattr(PLACES[place], "commands", None):
        return [f"{line}: no such command"]
    known = {flag for one in PLACES[place].params for flag in one.opts} | {"--help"}
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [f"{line}: {place} has no {flag}" for flag in flags if flag not in known]


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_commands_in_documents_exist(path):
    # Running text may begin a line with the package's name.
    lines = [line for line in commands(path.read_text("utf-8")) if line.startswith("rap ")]
    told = [line for line in lines if line.split()[1] in {p.split()[0] for p in PLACES if p}]
    assert [found for line in told for found in violations(line)] == []


def test_documents_tell_many_commands_and_a_wrong_one_is_seen():
    told = [line for path in BY_HAND for line in commands(path.read_text("utf-8"))]
    assert len(told) > 80
    assert violations("rap compress bundled --retain 0.7 -o out") == []
    assert violations("rap serve out -- --max-model-len 8") == []
    assert violations("rap compress bundled --keep 0.7") != []
    assert violations("rap evaluate out") != []


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_code_fits_into_a_page_of_the_site(path):
    """Commands and Python of pages; README.md is not a page."""
    text = path.read_text("utf-8") if DOCS in path.parents else ""
    lines = [
        line
        for one in ("sh", "python")
        for code, _ in blocks(text, one)
        for line in code.splitlines()
    ]
    assert [line for line in lines if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", ["method", "family", "statistic"])
def test_code_of_extensions_runs(name):
    text = (EXTEND / f"{name}.md").read_text("utf-8")
    (code,) = [block for block, wanted in blocks(text, "python") if wanted]
    with mock.patch.dict(METHODS), mock.patch.dict(STATISTICS):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUN)
def test_commands_of_pages_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = [
        line
        for block, wanted in blocks((DOCS / f"{name}.md").read_text("utf-8"), "sh")
        if wanted
        for line in commands(block)
    ]
    assert told
    for line in told:
        result = run(*shlex.split(line)[1:])
        assert result.code == 0, (line, result.err)


@pytest.mark.parametrize("name", ["tutorials/quickstart", "how-to/speed"])
def test_code_of_pages_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rap.compress("bundled", 0.7, num_windows=2, window=64, evaluate=None, output="out")
    found = blocks((DOCS / f"{name}.md").read_text("utf-8"), "python")
    scope = {"__name__": "__main__"}
    for code in [block for block, wanted in found if wanted]:
        exec(compile(code, name, "exec"), scope)


def test_modules_of_the_reference_exist():
    pages = (DOCS / "reference").glob("*.md")
    named = {
        name
        for page in pages
        for name in re.findall(r"automodule:: (\S+)", page.read_text("utf-8"))
    }
    assert named
    assert {name for name in named if importlib.util.find_spec(name) is None} == set()


def test_settings_of_methods_and_recoveries_are_documented():
    text = (DOCS / "reference" / "settings.md").read_text("utf-8")
    configs = [*METHODS.values(), FitConfig, RecoveryConfig]
    names = {field.name for config in configs for field in fields(config)}
    assert {name for name in names if f"`{name}`" not in text} == set()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_presets_are_documented_as_they_are():
    page = (REPOSITORY / "docs/reference/settings.md").read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        count = "all," if preset.num_windows is None else f"{preset.num_windows:,}"
        length = preset.steps if preset.steps is None else f"{preset.steps:,}"
        row = (
            f"`{name}`",
            f"{count} of {preset.window:,} tokens",
            length or f"{preset.epochs} epochs",
            str(preset.global_batch),
            f"{preset.learning_rate:f}".rstrip("0"),
            "LoRA" if preset.tune == "lora" else "projections",
        )
        assert f"| {' | '.join(row)} |" in page, name


def test_code_of_the_first_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "README.md").read_text("utf-8")
    (code,) = [block for block, _ in blocks(text, "python")]
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_the_page_of_commands_names_its_columns_and_writes_lists_as_typed():
    lines = load_script("docs/site/commands.py").page().splitlines()
    above = {lines[at - 1] for at, line in enumerate(lines) if line.startswith("|---")}
    assert all(cell.strip() for line in above for cell in line.split("|")[1:-1])
    assert any(line.startswith("| `--task` | `single-needle, multi-key, ") for line in lines)
    assert not any(re.search(r"`\[[^`]*\]`", line) for line in lines if line.startswith("| `--"))


def test_old_addresses_lead_to_pages(tmp_path):
    redirects = load_script("docs/site/redirects.py")
    for old, new in redirects.MOVED.items():
        assert not (DOCS / f"{old}.md").exists()
        assert (DOCS / f"{new}.md").is_file()
    (tmp_path / "how-to").mkdir()
    (tmp_path / "how-to" / "new.html").write_text("<p>new</p>")
    redirects.write(tmp_path, {"a/old": "how-to/new"})
    assert 'url=../how-to/new.html"' in (tmp_path / "a" / "old.html").read_text("utf-8")
    with pytest.raises(ValueError, match="is no page"):
        redirects.write(tmp_path, {"old": "gone"})
    with pytest.raises(ValueError, match="still a page"):
        redirects.write(tmp_path, {"how-to/new": "how-to/new"})


def test_links_of_a_built_site_are_checked(tmp_path):
    links = load_script("docs/site/links.py")
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a><a href="https://else.org">c</a>')
    (tmp_path / "b.html").write_text('<p id="here">b</p><link rel="canonical" href="https://x.y">')
    assert links.violations(tmp_path) == []
    (tmp_path / "c.html").write_text(
        '<a href="d.html">d</a><a href="b.html#there">b</a><script src="https://cdn.org/x.js">'
    )
    assert links.violations(tmp_path) == [
        "c.html: loads https://cdn.org/x.js from another server",
        "c.html: d.html leads nowhere",
        "c.html: b.html#there has no such anchor",
    ]
    (tmp_path / "c.html").write_text('<span class="xref myst">a page outside the site</span>')
    assert links.violations(tmp_path) == ["c.html: 1 links to no page of the site"]


def test_workflows_call_targets_of_the_makefile():
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    workflows = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    assert workflows
    for path in workflows:
        jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
        for job in jobs:
            called = [step["run"] for step in job["steps"] if "run" in step]
            wanted = job.get("strategy", {}).get("matrix", {}).get("target", [])
            assert len(called) == 1
            assert re.fullmatch(r"make (\S+|\$\{\{ matrix\.target \}\})", called[0])
            assert set(wanted or [called[0].split()[1]]) <= targets


def test_the_version_is_said_alike_everywhere():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    changes = (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    assert citation["version"] == rap.__version__
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == rap.__version__
