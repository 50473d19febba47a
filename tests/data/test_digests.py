"""A text that changed is not taken for the one that was measured."""

import hashlib
from pathlib import Path

import pytest

from rap.data.digests import NOTED, check_digests, note_digests
from rap.model.errors import CalibrationError


def test_a_changed_file_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    out, mine, other = tmp_path / "out", tmp_path / "mine.txt", tmp_path / "other.txt"
    mine.write_text("one", encoding="utf-8")
    other.write_text("two", encoding="utf-8")
    check_digests(out, str(mine))
    note_digests(out, "bundled", f"repeated:{mine}")
    note_digests(out, other)
    digests = [hashlib.sha256(text).hexdigest() for text in (b"one", b"two")]
    noted = (out / NOTED).read_text(encoding="utf-8").splitlines()
    assert noted == [f"{digests[0]}  {mine}", f"{digests[1]}  {other}"]
    check_digests(out, f"bundled,{mine}", other)
    mine.write_text("other words", encoding="utf-8")
    check_digests(out, "bundled", other)
    for named in (str(mine), f"bundled,repeated:{mine}"):
        with pytest.raises(
            CalibrationError, match=r"mine\.txt has changed since .*out was measured"
        ):
            check_digests(out, named)
    assert not list(tmp_path.glob("out/.*"))


def test_nothing_is_noted_where_no_file_is_read(tmp_path: Path) -> None:
    note_digests(tmp_path / "out", "bundled", "c4")
    assert not (tmp_path / "out").exists()
