"""What a command may replace: a checkpoint, and never what others wrote or where one works."""

import pytest

from cases.command import error_violations, run
from cases.models import tiny_model
from cases.plans import random_plan
from rap.checkpoint.files import check_folder, check_output, whole_directory
from rap.checkpoint.source import check_apart
from rap.model.errors import CheckpointError
from rap.pipeline import save
from rap.surgery.apply import apply


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
    with pytest.raises(
        CheckpointError, match=rf"in the way \({first}.*choose another output, or em"
    ):
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


@pytest.mark.parametrize("output", ["model", ".", "link"])
def test_what_is_read_is_never_replaced(tmp_path, monkeypatch, output):
    source = tmp_path / "inner" / "model"
    tiny_model().save_pretrained(source)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner" / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="would be replaced by what is made of it"):
        check_apart(tmp_path / "inner" / output, str(source))
    check_apart(tmp_path / "inner" / "small", str(source), "org/model", "bundled", None)


@pytest.mark.parametrize("command", ["compress", "apply", "recover"])
def test_no_command_replaces_the_dense_model(tmp_path, command):
    dense = tmp_path / "dense"
    model = tiny_model()
    model.save_pretrained(dense)
    before = {file.name: file.read_bytes() for file in dense.iterdir()}
    plan = random_plan(model, [(4, 8), (4, 8)])
    plan.save(tmp_path / "plan.rap")
    save(apply(model, plan), plan, tmp_path / "small")
    given = {
        "compress": ["compress", dense, "--windows", "2", "--window", "32"],
        "apply": ["apply", dense, tmp_path / "plan.rap"],
        "recover": ["recover", tmp_path / "small", "--teacher", dense],
    }[command]
    result = run(*given, "-o", dense, "--force")
    assert error_violations(result) == []
    assert "would be replaced by what is made of it" in result.err
    assert {file.name: file.read_bytes() for file in dense.iterdir()} == before


@pytest.mark.parametrize("name", ["bundled", "smollm2", "small.gguf"])
def test_an_output_that_no_command_could_name_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    result = run("compress", "bundled", "-o", name)
    assert error_violations(result) == []
    assert "wherever a model is asked for: choose another directory" in result.err
    assert not list(tmp_path.iterdir())
