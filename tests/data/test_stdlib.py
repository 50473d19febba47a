"""Python's standard library as a source: code to calibrate on, and other code to evaluate on."""

from pathlib import Path
from typing import Any

import pytest

from rap.data import stdlib
from rap.data.held_out import HELD_OUT, evaluation_tokens, split
from rap.data.text import check_sources, load_windows, read_text, shown_name
from rap.model.errors import CalibrationError


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A standard library of four modules."""
    for name in ("ast", "dis", "enum", "zlib"):
        (tmp_path / f"{name}.py").write_text(f"import {name}\n", encoding="utf-8")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def test_modules_are_parted_by_their_letters(modules: Path) -> None:
    check_sources("python", "python-test")
    assert read_text("python") == "import enum\nimport zlib\n"
    assert read_text("python-test") == "import ast\nimport dis\n"


def test_it_is_on_this_machine(tokenizer: Any) -> None:
    assert load_windows("python", tokenizer, num_windows=3, window=64).shape == (3, 64)
    assert "class Enum" in read_text("python")
    assert len(evaluation_tokens("python-test", tokenizer)) > 8 * 2048


@pytest.mark.parametrize(
    ("sources", "evaluated"),
    [
        ("python", "python-test"),
        ("own,python", "python-test"),
        ("bundled,repeated:bundled,own,python", "bundled"),
    ],
)
def test_what_is_asked_for_is_evaluated_and_code_where_nothing_else_is(
    sources: str, evaluated: str
) -> None:
    assert split(sources, HELD_OUT) == (sources, evaluated)


def test_a_library_that_is_not_in_files_is_refused(modules: Path) -> None:
    for file in modules.glob("*.py"):
        file.unlink()
    with pytest.raises(CalibrationError, match="give a file of code instead"):
        read_text("python")


def test_a_report_says_what_was_read() -> None:
    assert shown_name("python") == "Python's standard library (modules e to z)"
