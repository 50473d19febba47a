"""The lint of documents and of texts in the package: every rule sees a planted fault."""

import json
import re
from collections.abc import Iterator

import pytest
import typer

from cases.scripts import load_script
from rap.cli import TOPICS, app
from rap.cli.setup import command_tree
from rap.studies.compare.tables import tables

prose = load_script("docs/prose.py")
VALUES = re.compile(r"\b(?:stock|fidelity)\b")  # of options and commands, among their choices
CLEAN = "`rap` prunes the attention projections and writes a checkpoint.\n"


def rules(text: str) -> list[str]:
    """The rules that a document breaks."""
    return [found.rule for found in prose.violations(text)]


def test_checked_documents_follow_the_rules():
    checked = prose.pages()
    assert checked
    found = {str(path): prose.violations(path.read_text("utf-8")) for path in checked}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("name", ["compare", "compare-sweep", "smollm2-texts", "smollm2-times"])
def test_tables_of_comparisons_use_the_terms(name):
    """Titles, headers and notes as `rap compare` makes them of committed runs."""
    file = prose.REPOSITORY / "experiments" / name / "compare.json"
    result = json.loads(file.read_text("utf-8"))
    made = tables("smollm2", result["cells"], result["failed"])
    shown = [text for one in made for text in (one["title"], one["note"], *one["header"])]
    found = [one for text in shown for one in prose.violations(text) if one.rule == "term"]
    assert len(made) > 5
    assert found == []


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("`rap` cuts the attention projections.", "term"),
        ("A fitted model has 0.1 nats a token more.", "term"),
        ("The command refuses the model.", "term"),
        ("It costs 14 % of the perplexity.", "term"),
        ("The error is normalised per token.", "term"),
        ("| method | rebuilt |", "term"),
        ("One two three four five " * 5 + "six.", "sentence"),
        ("`rap` reads\nthe file, and " + "then more of it, " * 7 + "and ends.", "sentence"),
        ("* First item.\n* The second " + "goes on and on and " * 6 + "ends.", "sentence"),
        ("Perplexity is 22.21, 21.81 and 45.0.", "numbers"),
        ("See `docs/prose.py` for more.", "link"),
        ("See `README.md` for more.", "link"),
        ("A line of more than a hundred characters. " * 3, "line"),
        ("An em dash \N{EM DASH} here.", "ascii"),
    ],
)
def test_a_planted_fault_is_seen(fault, rule):
    assert rules(CLEAN) == []
    assert rule in rules(f"{CLEAN}\n{fault}\n")


@pytest.mark.parametrize(
    "text",
    [
        "Run `rap compare --recover fit` on SmolLM2-135M, Llama-3-8B and WikiText-2 at int8.",
        "```sh\nrap serve out  # cuts, fitted, 1 2 3 4\n```",
        "| 19.13 | 24.94 | 21.81 | 42.86 |",
        "See [the lint](docs/prose.py) and [`README.md`](README.md).",
        "<!-- measured: x -->\nfitted 1 2 3 4\n<!-- end of what is measured -->",
        "$$\n1 + 2 + 3 + 4\n$$",
        "Compare vs. PaLU, e.g. at 0.7. It has 0.5. " + "Short sentences end. " * 2,
        "The cache fits in memory, and `rap export stock` writes it.",
    ],
)
def test_code_tables_formulas_and_names_are_no_prose(text):
    assert rules(f"{CLEAN}\n{text}\n") == []


def test_violations_name_the_line_they_begin_in():
    text = "# Title\n\n```sh\nrap doctor\n```\n\nA cut.\n"
    assert [(found.line, found.rule) for found in prose.violations(text)] == [(7, "term")]


def test_statistics_count_prose_alone():
    text = "# T\n\n`rap` has 2 parts and [a link](x.md).\n\n```sh\nrap doctor 1 2 3\n```\n"
    assert prose.stats(text) == {
        "lines": 7,
        "numbers per 100 words": 14.29,
        "links": 1,
        "first command, line": 6,
        "longest sentence, words": 7,
    }


def test_the_exit_code_is_that_of_a_lint(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prose, "REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(CLEAN)
    assert prose.main([str(page)]) == 0
    page.write_text("It stands here.\n")
    assert prose.main([str(page)]) == 1
    assert "page.md:1: term: 'stands'" in capsys.readouterr().out


def test_texts_of_the_package_follow_the_rules():
    checked = prose.modules()
    assert len(checked) > 200
    found = {str(path): prose.source_violations(path) for path in checked}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ('"""Cut a model."""', ["term"]),
        (f'"""A {"long " * 25}line."""', ["sentence"]),
        ('"""M."""\ndef f():\n    """Normalise."""', ["term"]),
        (
            '"""M."""\nclass C:\n    """C."""\n    def f(self):\n        """What it says."""',
            ["term"],
        ),
        ('raise RapError("the model refuses this")', ["term"]),
        ('raise RapError(f"{x} is judged: " f"it stands {y}")', ["term", "term"]),
        ('raise RapError("good" if x else "in fewer bits")', ["term"]),
        ('raise RapError("a" + "cell")', []),
        ('raise RapError("a " + "cell")', ["term"]),
        ('raise RapError("of the stock form")', ["term"]),
        # Values, what is private, and all but the first line.
        ("raise RapError(\"profile 'stock': remove --profile stock\")", []),
        ('raise RapError(f"{stock} and `stock`")', []),
        ('"""M."""\ndef _f():\n    """Cut."""', []),
        ('"""M."""\ndef f():\n    """F.\n\n    It cuts.\n    """', []),
        ('"""M."""\nmessage = "a cut"', []),
    ],
)
def test_faults_of_texts_in_a_module_are_seen(tmp_path, source, rules):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [found.rule for found in prose.source_violations(path)] == rules


def test_cells_are_internal_to_studies(tmp_path):
    path = tmp_path / "studies" / "module.py"
    path.parent.mkdir()
    path.write_text('"""A cell, judged."""')
    assert [found.what.split(";")[0] for found in prose.source_violations(path)] == ["'judged'"]


def test_the_page_of_commands_follows_the_rules():
    page = load_script("docs/site/commands.py").page()
    assert "# Command line" in page
    assert prose.violations(VALUES.sub("x", page)) == []


def helps() -> Iterator[tuple[str, str]]:
    """Every help text of the command line: of commands (their first line) and of options."""
    for place, command in command_tree(typer.main.get_command(app)):
        yield f"rap {place}", (command.help or "").split("\n\n")[0]
        for one in command.params:
            yield f"rap {place} {one.opts[0]}", getattr(one, "help", None) or ""
    for entries in TOPICS.values():
        for name, entry in entries.items():
            yield f"topic of rap {name}", entry.summary


def test_help_texts_use_the_terms_of_the_glossary():
    found = {
        place: [
            one.what for one in prose.violations(f"{VALUES.sub('x', text)}\n") if one.rule == "term"
        ]
        for place, text in helps()
        # Typer adds these two.
        if "completion" not in place
    }
    assert {place: what for place, what in found.items() if what} == {}


def test_help_texts_are_short_sentences():
    long = {
        place: sentence
        for place, text in helps()
        for sentence in prose.sentences(" ".join(text.split()))
        if prose.words(sentence) > prose.MAX_WORDS and "one of" not in sentence.lower()
    }
    assert long == {}
