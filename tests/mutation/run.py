"""Plant one fault at a time in a copy of the package, and see whether the tests notice.

    python tests/mutation/run.py [MODULE ...] [--json runs/mutation.json]

The files of faults/ list them: a module, the tests that ought to notice, and fragments of its
source with what replaces them. Every fault is planted alone, and pytest stops at the first test
that fails. A fault that survives is a missing test, or one that no test can notice (`equivalent`,
with the reason). Modules are named by dotted path; an ending will do on the command line.

Prints a table, then what is wrong: survivors, fragments that are not there once (stale), and tests
that fail without a fault (broken). Exit status 1 if there are any.
"""

import argparse
import compileall
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
FAULTS = Path(__file__).with_name("faults")
LIMIT = 300  # seconds for the tests of one fault
COLUMNS = ("caught", "equivalent", "survived", "stale", "broken")
# Prints every module that the package and its parts bring into a process.
IMPORTED = """
import contextlib, importlib, pkgutil, sys
import hypothesis, pytest, pytest_timeout, rap
for module in pkgutil.walk_packages(rap.__path__, "rap."):
    if "vllm" not in module.name and not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of an engine that is not here
            importlib.import_module(module.name)
print(*(name for name in sys.modules if name.partition(".")[0] != "rap"))
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: `status` is one of COLUMNS, `by` the test that failed, or why not."""

    module: str
    old: str
    new: str
    status: str
    by: str
    seconds: float


def read_faults(wanted: list[str]) -> list[dict[str, Any]]:
    """The entries of faults/ whose module is named in `wanted`, all without names."""
    modules: list[dict[str, Any]] = []
    for path in sorted(FAULTS.glob("*.toml")):
        modules += tomllib.loads(path.read_text("utf-8"))["module"]
    for name in wanted:
        if not any(f".{entry['path']}".endswith(f".{name}") for entry in modules):
            raise SystemExit(f"no file of {FAULTS.name}/ has a module {name}")
    endings = tuple(f".{name}" for name in wanted) or ("",)
    return [entry for entry in modules if f".{entry['path']}".endswith(endings)]


def import_libraries(source: Path) -> None:
    """Import all that the package needs: each run inherits it, and would spend ten seconds on it.

    The package itself stays out, for every run imports another one.
    """
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env=os.environ | {"PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name in found.stdout.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # pytest collects garbage again and again: let it look at its own objects only


def plant_all(entry: dict[str, Any], source: Path) -> Iterator[Outcome]:
    """Every fault of a module planted in turn in the copy at `source`, which is mended again."""
    path = _file_of(source, entry["path"])
    good, tests = path.read_text("utf-8"), _pytest_arguments(entry)
    started = time.monotonic()
    failed = _first_failure(source, tests)
    if failed:
        seconds = round(time.monotonic() - started, 1)
        yield Outcome(entry["path"], "", "", "broken", failed, seconds)
        return
    for old, new, *reason in entry["faults"]:
        started = time.monotonic()
        if good.count(old) != 1 or old == new:
            status, by = "stale", f"{good.count(old)} times in the source"
        else:
            path.write_text(good.replace(old, new), "utf-8")
            by = _first_failure(source, tests)
            status = "caught" if by else "equivalent" if reason else "survived"
            by = by or " ".join(reason)
        yield Outcome(entry["path"], old, new, status, by, round(time.monotonic() - started, 1))
    path.write_text(good, "utf-8")


def _file_of(source: Path, dotted: str) -> Path:
    path = source.joinpath(*dotted.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _pytest_arguments(entry: dict[str, Any]) -> list[str]:
    """Test files are named without their folder, so that they may move; `::` names one test."""
    found = []
    for name in entry["tests"]:
        file, *inside = name.partition("::")
        [path] = TESTS.rglob(file)
        found.append(str(path) + "".join(inside))
    select = ["-k", entry["select"]] if "select" in entry else []
    plugins = ["-p", "pytest_timeout", "-p", "no:cacheprovider"]
    return ["-x", "-q", "--tb=no", *plugins, *select, *found]


def _first_failure(source: Path, arguments: list[str]) -> str:
    """The first test that fails on the package at `source`, empty if none does."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        run = multiprocessing.get_context("fork").Process(
            target=_run_tests, args=(source, arguments, log.name)
        )
        run.start()
        run.join(LIMIT)
        if run.is_alive():
            run.kill()
            run.join()
            return f"no end in {LIMIT} s"
        text = log.read()
    if run.exitcode == pytest.ExitCode.OK:
        return ""
    named = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0].split(" - ")[0] if named else f"exit status {run.exitcode}: {text[-500:]}"


def _run_tests(source: Path, arguments: list[str], log: str) -> None:
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)  # for tests that start a process
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = pytest.main(arguments)
    assert str(sys.modules["rap"].__file__).startswith(str(source)), "another package was tested"
    os._exit(status)


def table(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A row a module, in the order of planting, and one for all."""
    modules = dict.fromkeys(outcome.module for outcome in outcomes)
    rows = []
    for name in (*modules, "all"):
        own = [outcome for outcome in outcomes if name in (outcome.module, "all")]
        counts = Counter(outcome.status for outcome in own)
        planted = len(own) - counts["broken"]
        rows.append({"module": name, "planted": planted, **{key: counts[key] for key in COLUMNS}})
    return rows


def show(outcomes: list[Outcome]) -> None:
    """The table, and every fault that was neither caught nor explained."""
    rows = table(outcomes)
    print("| " + " | ".join(rows[0]) + " |")
    print("|---|" + "--:|" * (len(rows[0]) - 1))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    for outcome in outcomes:
        if outcome.status not in ("caught", "equivalent"):
            print(f"\n{outcome.module}: {outcome.status} {outcome.by}")
            print(f"  - {outcome.old}\n  + {outcome.new}")


def main() -> int:
    """Plant what the command line names; the exit status says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--json", type=Path, help="also write the table and every fault there")
    options = parser.parse_args()
    entries = read_faults(options.modules)
    # The same examples every time, and kernels in the interpreter, as tests/conftest.py asks for.
    os.environ |= {"CI": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(REPOSITORY)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(REPOSITORY / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        # By hash: a fault of the same size, planted in the same second, is another source.
        compileall.compile_dir(
            source, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        import_libraries(source)
        for entry in entries:
            for outcome in plant_all(entry, source):
                outcomes.append(outcome)
                shown = " ".join(outcome.new.split())[:60] or "(dropped)"
                line = f"{outcome.status:10} {outcome.seconds:5} s  {outcome.module}: {shown}"
                print(line, file=sys.stderr, flush=True)
    show(outcomes)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"table": table(outcomes), "faults": [asdict(outcome) for outcome in outcomes]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return int(any(outcome.status in COLUMNS[2:] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
