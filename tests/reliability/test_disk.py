"""A disk that fills up, and files that may not be read or written: one line, and nothing left."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from cases.damage import QUICK, Command
from cases.ending import (
    can_mount,
    contents,
    ended,
    obeying_modes,
    refusal_violations,
    small_disk,
    small_files,
)

WRITING: dict[str, Command] = {
    "compress": ("compress", "dense", "-o", "disk/out", *QUICK),
    "compress --stream": ("compress", "dense", "-o", "disk/out", *QUICK, "--stream"),
    "apply": ("apply", "dense", "plan.rap", "-o", "disk/out"),
    "apply --stream": ("apply", "dense", "plan.rap", "-o", "disk/out", "--stream"),
    "plan": ("plan", "dense", "-o", "disk/out.rap", *QUICK[:-2]),
    "export stock": ("export", "stock", "small", "-o", "disk/out"),
    "export gguf": ("export", "gguf", "dense", "-o", "disk/out.gguf", "--pre", "gpt-2"),
    "recover": (
        *("recover", "small", "--teacher", "dense", "--preset", "fit", "-o", "disk/out"),
        *("--text", "text.txt", "--evaluate", "none", "--set", "num_windows=6"),
        *("--set", "window=32", "--set", "steps=2", "--set", "validation_windows=2"),
    ),
    "compare": (
        *("compare", "dense", "--methods", "random", "--retain", "0.5", "-o", "disk/out"),
        *("--calibration", "text.txt", "--windows", 2, "--window", 32),
        *("--measure", "text=bundled", "--measure", "window=32", "--measure", "num_windows=1"),
        *("--measure", "recall_documents=0", "--measure", "decode_steps=0"),
    ),
    "evaluate": (
        *("evaluate", "perplexity", "dense", "--text", "text.txt", "--window", 32),
        *("--max-windows", 1, "-o", "disk/out.json"),
    ),
}
# What these have finished is kept, to go on from when the command is repeated.
RESUMING = ("recover", "compare", "compress --stream")
# Of the output: config, plan and card fit into the first, the weights into none.
SIZES = (0, 3_000, 20_000, 500_000)
OFTEN = {("apply --stream", 20_000), ("export gguf", 500_000), ("apply", 500_000)}
needs_mounts = pytest.mark.skipif(not can_mount(), reason="file systems cannot be mounted here")


def _cases() -> Iterator[Any]:
    for name in WRITING:
        for size in SIZES:
            marks = () if (name, size) in OFTEN else (pytest.mark.faults,)
            yield pytest.param(name, size, marks=marks, id=f"{name} in {size}")


@pytest.mark.parametrize(("name", "size"), list(_cases()))
def test_a_file_that_may_not_grow_is_one_line(place, judged, record, name, size):
    (place / "disk").mkdir()
    before = contents(place)
    end = ended(WRITING[name], small_files(size), place=place)
    if end.code == 0:  # small enough to fit
        assert size >= 500
        assert name in ("plan", "evaluate", "compare")
        how = "whole"
    elif name in RESUMING:
        assert refusal_violations(end) == []
        assert not list(place.rglob("*.partial-*"))
        assert [x for x in (place / "disk").rglob("*") if x.is_dir() and not any(x.iterdir())] == []
        how = "refused"
    else:
        how = judged(end, before)
    record("no file may grow", WRITING[name], f"beyond {size:,} bytes", how)


@pytest.mark.faults
@needs_mounts
@pytest.mark.parametrize("size", [2**16, 2**19, 2**21])
@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_is_one_line(place, record, name, size):
    """A file system of its own, which only the command sees: what it left is listed inside."""
    (place / "disk").mkdir()
    listing = place / "listing"

    def leave() -> None:
        exit_now = os._exit

        def listed(code: int) -> None:
            names = sorted(path.name for path in (place / "disk").rglob("*"))
            listing.write_text("\n".join(names))
            exit_now(code)

        os._exit = listed

    end = ended(WRITING[name], small_disk(place / "disk", size), leave, place=place)
    left = listing.read_text().split()
    if end.code == 0:
        how = "whole"
        assert left
    else:
        assert refusal_violations(end) == []
        assert "disk" in end.err
        how = "refused"
        assert not [x for x in left if ".partial-" in x]
        if name not in RESUMING:
            assert left == []
    record("full disk", WRITING[name], f"{size:,} bytes", how)


READS: dict[str, tuple[Command, str, int]] = {
    "weights": (WRITING["apply"], "dense/model.safetensors", 0),
    "weights, streamed": (WRITING["apply --stream"], "dense/model.safetensors", 0),
    "config": (WRITING["apply"], "dense/config.json", 0),
    "folder of the checkpoint": (WRITING["apply"], "dense", 0),
    "tokenizer": (WRITING["evaluate"], "dense/tokenizer.json", 0),
    "plan": (WRITING["apply --stream"], "plan.rap", 0),
    "text": (WRITING["compress"], "text.txt", 0),
    "gguf": (("inspect", "tiny.gguf"), "tiny.gguf", 0),
    "folder to write in": (WRITING["apply --stream"], "disk", 0o555),
    "folder to write in, file": (WRITING["plan"], "disk", 0o555),
    "folder to write in, gguf": (WRITING["export gguf"], "disk", 0o555),
    "folder of a comparison": (WRITING["compare"], "disk", 0o555),
    "folder of a recovery": (WRITING["recover"], "disk", 0o555),
    "folder of a result": (WRITING["evaluate"], "disk", 0o555),
    "home": (("evaluate", "perplexity", "tiny.gguf", *WRITING["evaluate"][3:-2]), "../home", 0o555),
}
ALSO = {"weights", "config", "plan", "folder to write in"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ALSO else (pytest.mark.faults,)) for n in READS],
)
def test_what_may_not_be_touched_is_one_line(place, judged, record, name):
    command, file, mode = READS[name]
    (place / "disk").mkdir()
    (place.parent / "home").mkdir()
    before, path = contents(place), place / file
    path.chmod(mode)
    try:
        end = ended(command, obeying_modes, place=place)
    finally:
        path.chmod(0o755)
    assert judged(end, before) == "refused"
    said = ("ermission denied", "not readable", "may not be written to")
    assert any(words in end.err for words in said)
    record("no permission", command, name, "refused")


@pytest.mark.faults
@pytest.mark.parametrize("output", ["-o dense/config.json/out", "-o missing/deep/out"])
def test_outputs_in_odd_places(place, record, output):
    command = ("apply", "dense", "plan.rap", *output.split(), "--stream")
    before = contents(place)
    end = ended(command, place=place)
    if "missing" in output:
        assert end.code == 0, end.err
        shutil.rmtree(place / "missing")
    else:
        assert refusal_violations(end) == []
    assert contents(place) == before
    record("odd output", command, output, "whole" if end.code == 0 else "refused")
