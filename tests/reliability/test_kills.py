"""Long commands killed at any point: what was there is whole, and the same command then finishes.

A process kills itself before its n-th change of a file system, where half an output would arise, or
is killed from outside at a random time.
"""

import functools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cases.damage import QUICK, Command
from cases.ending import (
    Ended,
    contents,
    counting,
    ended,
    killed_after,
    killed_at,
    refusal_violations,
)
from rap.checkpoint.load import load
from rap.model.fingerprint import fingerprint_model
from rap.recovery import stages
from rap.recovery.layer_fit import FitConfig

TINY_FIT = {"num_windows": 6, "window": 32, "steps": 2, "validation_windows": 2, "held_out": 0.34}
SETTINGS = [word for name, value in TINY_FIT.items() for word in ("--set", f"{name}={value}")]


def tiny_fit() -> None:
    """Make the fit of a streamed compression as cheap, which has no settings for it."""
    fit = stages._Run.fit
    stages._Run.fit = lambda run, config: fit(run, FitConfig(**TINY_FIT))  # type: ignore[method-assign]


def one_file(place: Path) -> bytes:
    """All of the one file that is written."""
    path = place / "out.rap"
    return (path if path.exists() else place / "out.gguf").read_bytes()


def weights(place: Path) -> str:
    """What the checkpoint holds, which must be what its config says."""
    return fingerprint_model(load(place / "out"))


def cells(place: Path) -> list[str]:
    """Which cells of a comparison are there."""
    return sorted(str(path.relative_to(place)) for path in place.glob("out/cells/*/result.json"))


@dataclass(frozen=True)
class Long:
    """A command that takes long on a real model, what it leaves, and what it keeps to go on from.

    `kept` are patterns of what a killed run may leave beside its output.
    """

    command: Command
    left: Callable[[Path], Any]
    kept: tuple[str, ...] = ()
    faults: tuple[Callable[[], None], ...] = ()


LONG = {
    "compress": Long(("compress", "dense", "-o", "out", *QUICK), weights),
    "compress --stream --recover fit": Long(
        ("compress", "dense", "-o", "out", *QUICK, "--stream", "--recover", "fit"),
        weights,
        (".out.recovery",),
        (tiny_fit,),
    ),
    "recover --preset fit": Long(
        (
            *("recover", "small", "--teacher", "dense", "--preset", "fit", "-o", "out"),
            *("--text", "text.txt", "--evaluate", "none", *SETTINGS),
        ),
        weights,
        (".out.recovery",),
    ),
    "apply": Long(("apply", "dense", "plan.rap", "-o", "out"), weights),
    "apply --stream": Long(("apply", "sharded", "plan.rap", "-o", "out", "--stream"), weights),
    "plan": Long(("plan", "dense", "-o", "out.rap", *QUICK[:-2]), one_file),
    "export gguf": Long(("export", "gguf", "dense", "-o", "out.gguf", "--pre", "gpt-2"), one_file),
    "compare": Long(
        (
            *("compare", "dense", "--methods", "random,magnitude", "--retain", "0.5", "-o", "out"),
            *("--calibration", "text.txt", "--windows", 2, "--window", 32),
            *("--measure", "text=bundled", "--measure", "window=32"),
            *("--measure", "num_windows=1", "--measure", "recall_documents=0"),
            *("--measure", "decode_steps=2"),
        ),
        cells,
        ("out",),
    ),
}
OUTPUTS = ("out", "out.rap", "out.gguf")
POINTS = 6  # of each command, by its number of changes
TIMES = 2
OFTEN = {("apply --stream", 0), ("export gguf", 1)}


@pytest.fixture(scope="module")
def undisturbed(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What a command leaves if nothing happens, and how many changes it makes on its way."""

    @functools.cache
    def run(name: str) -> tuple[Any, int]:
        place = tmp_path_factory.mktemp("undisturbed") / "place"
        shutil.copytree(origin, place)
        counter = place.parent / "changes"
        long = LONG[name]
        end = ended(long.command, *long.faults, counting(counter), place=place)
        assert end.code == 0, end.err
        return long.left(place), counter.stat().st_size

    return run


def _cases() -> Iterator[Any]:
    for name in LONG:
        for number in range(POINTS + TIMES):
            marks = () if (name, number) in OFTEN else (pytest.mark.faults,)
            yield pytest.param(name, number, marks=marks, id=f"{name}: {number}")


@pytest.mark.parametrize(("name", "number"), list(_cases()))
def test_a_killed_command_leaves_nothing_half_and_then_finishes(
    place, record, undisturbed, name, number
):
    long, (wanted, changes) = LONG[name], undisturbed(name)
    assert changes > 2, "the command changes nothing that could be seen"
    before = contents(place)
    draw = random.Random(f"{name} {number}")
    if number < POINTS:
        point = changes * number // POINTS + draw.randrange(max(1, changes // POINTS))
        stop, what = killed_at(min(point, changes - 1)), f"at change {point} of {changes}"
    else:
        stop, what = killed_after(seconds := draw.uniform(0.05, 2)), f"after {seconds:.2f} s"
    end = ended(long.command, *long.faults, stop, place=place)
    if end.code == 0:
        assert number >= POINTS, "it was to be killed"
    else:
        assert end.killed, end.err
        _check_left(place, before, long)
    again = ended(_again(long, place), *long.faults, place=place)
    assert again.code == 0, again.err
    assert long.left(place) == wanted
    assert _leftovers(place) == []
    record("killed", long.command, what, "finished when repeated")


def _again(long: Long, place: Path) -> Command:
    """The same command; one that was through with its output but not with its end replaces it."""
    done = any((place / name).exists() for name in OUTPUTS)
    resumes = long.command[0] == "compare"
    return (*long.command, "--force") if done and not resumes else long.command


def _check_left(place: Path, before: dict[str, str], long: Long) -> None:
    """Inputs are as they were; an output is whole, or there is none."""
    found = contents(place)
    assert {name: found.get(name) for name in before} == before
    hidden = (".partial-", *long.kept)
    new = [name for name in found.keys() - before.keys() if not any(x in name for x in hidden)]
    if any((place / name).exists() for name in OUTPUTS):
        assert long.left(place) is not None
    else:
        assert new == []


def _leftovers(place: Path) -> list[str]:
    return [str(path) for path in place.rglob("*") if ".partial-" in path.name] + [
        str(path) for path in place.glob(".*.recovery")
    ]


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.faults) for n in range(8)])
def test_what_is_to_be_replaced_stays_whole(place, record, undisturbed, number):
    """With --force there is one whole checkpoint at every moment: the old, or the new."""
    long = LONG["compress"]
    first = ended(("compress", "dense", "-o", "out", "--retain", 0.5, *QUICK), place=place)
    assert first.code == 0, first.err
    old, (new, changes) = weights(place), undisturbed("compress")
    assert old != new
    point = changes - 1 - number
    end = ended((*long.command, "--force"), killed_at(point), place=place)
    assert end.killed
    assert weights(place) in (old, new)
    again = ended((*long.command, "--force"), place=place)
    assert again.code == 0, again.err
    assert weights(place) == new
    assert _leftovers(place) == []
    record("killed", (*long.command, "--force"), f"at change {point}", "old or new whole")


@pytest.mark.faults
@pytest.mark.parametrize("content", [b"", b"no layer", None], ids=["empty", "words", "half"])
@pytest.mark.parametrize("name", ["recover --preset fit", "compress --stream --recover fit"])
@pytest.mark.parametrize("file", ["layer-000.safetensors", "run.json"])
def test_damaged_work_of_a_killed_run_says_what_to_remove(place, record, name, content, file):
    long = LONG[name]
    work = place / ".out.recovery" / "fit" / file
    end = ended(long.command, *long.faults, _stopping_when(work), place=place)
    assert end.killed, end.err
    work.write_bytes(work.read_bytes()[: work.stat().st_size // 2] if content is None else content)
    end = ended(long.command, *long.faults, place=place)
    assert _refused(end, str(work.parent.parent))
    record("damaged work", long.command, f"{file} of a killed run", "refused")
    work.unlink()
    again = ended(long.command, *long.faults, place=place)
    assert again.code == 0, again.err


def _refused(end: Ended, where: str) -> bool:
    assert refusal_violations(end) == []
    return where in end.err and "remove" in end.err


def _stopping_when(file: Path) -> Callable[[], None]:
    """Killed at the first change after a file has appeared."""
    return killed_at(0, once=file)
