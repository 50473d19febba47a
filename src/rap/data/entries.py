"""The documents of a file: lines of a .txt, or the entries of a .jsonl."""

import json
from pathlib import Path

from ..model.errors import CalibrationError

FILE_TYPES = (".txt", ".jsonl")


def read_entries(path: str | Path) -> list[str]:
    """The documents of a file one by one: lines of a .txt, or those of a .jsonl as in `read_text`.

    Blank lines are left out. Raises CalibrationError for a file that cannot be read.
    """
    path = Path(path)
    lines = enumerate(content_of(path).split("\n"), start=1)
    filled = [(number, line) for number, line in lines if line.strip()]
    if path.suffix == ".txt":
        return [line.strip() for _, line in filled]
    return [_field_of(path, number, line) for number, line in filled]


def check_file(path: Path) -> None:
    """Raise CalibrationError unless the path is of a file that can hold text."""
    if path.suffix not in FILE_TYPES:
        raise CalibrationError(f"{path} is neither .txt nor .jsonl: convert it to one of them")
    if not path.exists():
        raise CalibrationError(f"there is no file {path}: check the path")


def content_of(path: Path) -> str:
    """The whole file; CalibrationError if it cannot be read."""
    check_file(path)
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read {path} as UTF-8 text: {error}") from error


def _field_of(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path} line {number} is not JSON: {error}") from error
    text = text_of(entry)
    if text is None:
        raise CalibrationError(
            f"{path} line {number} has no text: every line must be an object with a string field"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can write half of a pair that stands for one character; no tokenizer takes it.
        raise CalibrationError(f"{path} line {number} is no text: {error}") from error
    return text


def text_of(entry: object) -> str | None:
    """The `text` field of an entry, else its first string field, if any."""
    fields = entry if isinstance(entry, dict) else {}
    candidates = (fields.get("text"), *fields.values())
    return next((value for value in candidates if isinstance(value, str)), None)
