"""Run a command line inside the test's own process, as the installed script would."""

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rap.cli import main


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code, and all it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON object and nothing else."""
        return json.loads(self.out)


def run(*arguments: Any) -> Result:
    """`rap ARGUMENTS`; an exception other than the exit is a traceback and comes through."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["rap", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            return Result(int(ended.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main() returned without an exit code")


PROGRESS = ("device: ", "rewriting", "calibrating")


def error_violations(result: Result) -> list[str]:
    """How a result differs from a clean refusal: exit code 2 and one line that says why."""
    found = []
    if result.code != 2:
        found.append(f"exit code {result.code}")
    if result.out:
        found.append(f"standard output {result.out!r}")
    # A fault that only the whole input shows comes after the device, or a progress bar.
    lines = [x for x in result.err.splitlines() if not x.startswith(PROGRESS)]
    if len(lines) != 1 or not lines[0].startswith("error: "):
        found.append(f"not one line of error: {result.err!r}")
    return found
