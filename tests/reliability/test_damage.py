"""Files that are cut short, changed, empty, of another kind or gone: one line, or no harm."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rap
from cases.damage import BROKEN, EVALUATE, FLIPS, QUICK, Command, flip
from cases.ending import contents, ended
from rap.calibration.statistics import Statistics
from rap.checkpoint.load import load
from rap.model.errors import RapError
from rap.planning.plan import Plan

STREAM: Command = ("apply", "dense", "plan.rap", "-o", "out", "--stream")
APPLY = STREAM[:-1]
JUDGE: Command = ("evaluate", "perplexity", "small", *EVALUATE)
TOKENS: Command = ("evaluate", "perplexity", "dense", *EVALUATE)
DRY: Command = (
    *("recover", "small", "--teacher", "dense", "--preset", "closed-form"),
    *("-o", "out", "--dry-run"),
)
SHARDED: Command = ("apply", "sharded", "plan.rap", "-o", "out")
FILES: dict[str, tuple[Command, ...]] = {
    "dense/config.json": (STREAM, APPLY, ("compress", "dense", "-o", "out", *QUICK)),
    "dense/generation_config.json": (STREAM, APPLY),
    "dense/model.safetensors": (STREAM, APPLY),
    "dense/tokenizer.json": (TOKENS,),
    "dense/tokenizer_config.json": (TOKENS,),
    "sharded/model.safetensors.index.json": (SHARDED, (*SHARDED, "--stream")),
    "sharded/model-00002-of-*.safetensors": (SHARDED, (*SHARDED, "--stream")),
    "plan.rap": (STREAM, ("inspect", "plan", "plan.rap")),
    "small/config.json": (JUDGE, ("inspect", "small")),
    "small/model.safetensors": (JUDGE, ("export", "stock", "small", "-o", "out")),
    "small/tokenizer.json": (JUDGE,),
    "small/plan.rap": (DRY,),
    "small/rap_report.json": (DRY,),
    "small/README.md": (JUDGE,),
    "small/modeling.py": (JUDGE,),
    "tiny.gguf": (("inspect", "tiny.gguf"), ("evaluate", "perplexity", "tiny.gguf", *EVALUATE)),
}
# The part of the table that runs with every test: what was once a traceback, or went unseen.
OFTEN = {
    ("dense/config.json", "null"),
    ("dense/tokenizer.json", "bare"),
    ("dense/model.safetensors", "last_byte"),
    ("small/rap_report.json", "half"),
    ("small/model.safetensors", "bit 1"),
    ("plan.rap", "bit 0"),
    ("tiny.gguf", "half"),
}


def _cases() -> Iterator[Any]:
    for file, commands in FILES.items():
        for damage in (*BROKEN, *FLIPS):
            for number, command in enumerate(commands if damage in BROKEN else commands[:1]):
                often = number == 0 and (file, damage.__name__) in OFTEN
                marks = () if often else (pytest.mark.faults,)
                name = f"{file}: {damage.__name__}, {number}"
                yield pytest.param(file, damage, command, marks=marks, id=name)


def test_the_part_that_runs_often_is_of_the_table():
    assert {(file, damage.__name__) for file in FILES for damage in (*BROKEN, *FLIPS)} >= OFTEN


@pytest.mark.parametrize(("file", "damage", "command"), list(_cases()))
def test_a_damaged_file_is_refused_or_does_no_harm(
    origin, place, judged, record, file, damage, command
):
    [path] = place.glob(file)
    damage(path)
    before = contents(place)
    end = ended(command, place=place)
    writes = "-o" in command and "--dry-run" not in command
    how = judged(end, before, *(["out"] if writes else []))
    if how == "whole" and file in ("plan.rap", "small/plan.rap"):
        assert Plan.load(place / file) == Plan.load(origin / file)
    if how == "whole" and file == "small/model.safetensors":
        load(place / "small")  # by its fingerprint
    record("damaged file", command, f"{file}: {damage.__name__}", how)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(*("plan", 100), id="plan"),
        pytest.param(*("statistics", 100), id="statistics"),
        pytest.param(*("plan", 3000), marks=pytest.mark.faults, id="more of a plan"),
        pytest.param(*("statistics", 3000), marks=pytest.mark.faults, id="more of statistics"),
    ],
)
def test_no_bit_of_a_sealed_file_changes_unseen(origin, tmp_path, record, name, bits):
    """Read here, without a command for each: what is read is what was written, or nothing is."""
    path = tmp_path / name
    if name == "plan":
        Plan.load(origin / "plan.rap").save(path)
    else:
        windows = torch.arange(64).view(2, 32)
        rap.calibrate(load(origin / "dense"), windows, {"energy"}).save(path)
    read = Plan.load if name == "plan" else Statistics.load
    wanted, whole, refused = _said(read(path)), path.read_bytes(), 0
    draw = random.Random(bits)
    for position in (draw.randrange(len(whole)) for _ in range(bits)):
        path.write_bytes(whole)
        flip(path, position, draw.randrange(8))
        found = _read(read, path)
        assert found in (None, wanted), f"byte {position} makes another {name}"
        refused += found is None
    record(
        "changed bits", ("apply" if name == "plan" else "compress",), f"{name}: {bits}", "refused"
    )
    # Padding of the header, and the name of the digest itself, may change.
    assert refused > 0.95 * bits


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    """What a file says, or None if it is refused."""
    with contextlib.suppress(RapError):
        return _said(read(path))
    return None


def _said(read: Any) -> Any:
    """What a plan or statistics say, so that two can be compared."""
    if isinstance(read, Statistics):
        layers = [{k: v.tolist() for k, v in (x or {}).items()} for x in read.layers]
        return layers, read.num_windows, read.window, read.needs, read.fingerprint
    return read
