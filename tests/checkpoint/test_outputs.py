"""What a command may replace: a checkpoint, and never what others wrote or where one works."""

import pytest

from rap.checkpoint.files import check_folder, check_output, whole_directory
from rap.model.errors import CheckpointError


def _names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _write(output, **options) -> None:
    with whole_directory(output, **options) as partial:
        (partial / "new").write_text("new")


@pytest.mark.parametrize(
    "content",
    [
        *({"keep.txt": "mine"}, {".env": ""}, {"notes/keep.txt": "mine"}),
        *({"config.json": c, "keep.txt": ""} for c in ('{"port": 80}', "[]", "{", "[" * 100_000)),
    ],
    ids=[
        *("a file", "a hidden one", "a folder"),
        *("another program's config", "no object", "no JSON", "deep"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_others_wrote_is_never_replaced(tmp_path, content, force):
    output = tmp_path / "out"
    for name, text in content.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(text)
    first = sorted(content)[0].split("/")[0]
    with pytest.raises(CheckpointError, match=rf"in the way \({first}.*name another output, or em"):
        _write(output, force=force)
    assert all((output / name).read_text() == text for name, text in content.items())
    assert _names(tmp_path) == ["out"]


def test_many_files_in_the_way_are_not_all_named(tmp_path):
    for name in "dcba":
        (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError, match=r"\(a, b, c, \.\.\.\)"):
        _write(tmp_path, force=True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("output", [".", "..", "../inner", "/"])
def test_where_one_works_is_never_replaced(tmp_path, monkeypatch, output, force):
    """Empty or a checkpoint, under whatever name; a folder beside it may be."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "link").symlink_to(inner)
    monkeypatch.chdir(inner)
    for name in (output, tmp_path / "link"):
        with pytest.raises(CheckpointError, match=r"you work in, or one above it.* inside it"):
            check_output(name, force=force)
    (inner / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="you work in"):
        check_output(output, force=force)
    (tmp_path / "inner2").mkdir()
    check_output("../inner2", force=force)


def test_folders_of_its_own_are_replaced_whatever_they_hold(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "half").write_text("half")
    _write(tmp_path / "out", own=True)
    assert _names(tmp_path / "out") == ["new"]


def test_files_are_written_into_any_folder(tmp_path, monkeypatch):
    """Nothing is removed there: reports and analyses go beside what there is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep.txt").write_text("mine")
    check_folder(".")
    with pytest.raises(CheckpointError, match="is a file: name a directory"):
        check_folder("keep.txt")


def test_a_repository_is_not_replaced_with_its_history(tmp_path):
    output = tmp_path / "clone"
    (output / ".git").mkdir(parents=True)
    (output / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="is a git repository, which would be replaced"):
        check_output(output, force=True)
    (output / ".git").rmdir()
    check_output(output, force=True)
