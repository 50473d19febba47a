"""What local texts held when something was measured on them, so that a changed one is noticed.

A folder of results keeps it in `texts.sha256`, as `sha256sum` writes it.
"""

import hashlib
from pathlib import Path

from ..checkpoint.files import whole_file
from ..model.errors import CalibrationError
from .text import REPEATED, named_sources

NOTED = "texts.sha256"


def check_contents(folder: str | Path, *texts: str | Path) -> None:
    """Raise CalibrationError for a file that is not as `note_contents` of the folder saw it.

    What was measured on it before would pass for a measurement of what it holds now.
    """
    noted = _noted(Path(folder))
    for name, digest in _digests(texts).items():
        if noted.get(name, digest) != digest:
            raise CalibrationError(
                f"{name} has changed since {folder} was measured on it: name another output, or "
                "give the text another name"
            )


def note_contents(folder: str | Path, *texts: str | Path) -> None:
    """Keep the digests of all local files among the texts, beside those that are kept already."""
    noted = _noted(Path(folder))
    known = noted | _digests(texts)
    if known != noted:
        with whole_file(Path(folder) / NOTED) as partial:
            lines = (f"{digest}  {name}\n" for name, digest in sorted(known.items()))
            partial.write_text("".join(lines), encoding="utf-8")


def _digests(texts: tuple[str | Path, ...]) -> dict[str, str]:
    found = {}
    for source in (name for text in texts for name in named_sources(text)):
        path = Path(source.removeprefix(REPEATED))
        if path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _noted(folder: Path) -> dict[str, str]:
    path = folder / NOTED
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
