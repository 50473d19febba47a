"""A command in a process of its own that is stopped, starved or robbed, and how it ended.

Processes are forked from the test's own, where everything is imported already: starting one costs
what the command costs. Faults are set in the child, before the command, and are gone with it.
"""

import contextlib
import ctypes
import hashlib
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rap.cli import main

Fault = Callable[[], None]
_CRASHED = 70
# The library prints this of a damaged file by itself, past Python's standard output.
_SAID_BY_TOKENIZERS = "Ignored unknown kwarg option "
_CLONE_NEWNS = 0x20000
_CAPABILITIES_3 = 0x20080522
# Reading, writing and searching what the modes forbid: what makes root ignore them.
_OVERRIDES = 0b110
# What changes a file system, as Python's auditing names it: the points at which to stop a process.
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.copyfile"}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), and all it printed."""

    code: int
    out: str
    err: str

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


def ended(arguments: Sequence[Any], *faults: Fault, place: Path) -> Ended:
    """`rap ARGUMENTS` with `place` as its folder.

    `faults` are called in the process before the command. A traceback is exit code 70.
    """
    # Pipes: a file could not take what a process says that may write no file.
    (read_out, out), (read_err, err) = os.pipe(), os.pipe()
    process = os.fork()
    if not process:
        _child(arguments, faults, place, out, err)
    os.close(out)
    os.close(err)
    with ThreadPoolExecutor(2) as readers:
        said = list(readers.map(_all_of, (read_out, read_err)))
    _, status = os.waitpid(process, 0)
    return Ended(os.waitstatus_to_exitcode(status), *said)


def _all_of(pipe: int) -> str:
    with open(pipe, encoding="utf-8", errors="replace") as file:
        return file.read()


def _child(
    arguments: Sequence[Any], faults: Sequence[Fault], place: Path, out: int, err: int
) -> None:
    """Be the command: this process never returns to the test."""
    code = _CRASHED
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        for copied in (out, err):  # else a process that outlives this one holds the pipe
            os.close(copied)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)  # threads of the parent are not here
        os.chdir(place)
        for fault in faults:
            fault()
        with mock.patch.object(sys, "argv", ["rap", *map(str, arguments)]):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def refusal_violations(end: Ended) -> list[str]:
    """How an end differs from a clean refusal: exit code 2, and last one line that says why.

    What a command says of its progress before it meets the fault may stand above.
    """
    lines = end.err.splitlines()
    found = [] if end.code == 2 else [f"exit code {end.code}"]
    if any(not line.startswith(_SAID_BY_TOKENIZERS) for line in end.out.splitlines()):
        found.append(f"standard output {end.out!r}")
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or lines[-1] != errors[0]:
        found.append(f"not one line of error: {end.err[-2000:]!r}")
    elif len(errors[0]) < len("error: ") + 10:
        found.append(f"it says nothing: {errors[0]!r}")
    return found


def contents(*places: Path) -> dict[str, str]:
    """Every file below some folders, by name, with a digest of what is in it."""
    found = {}
    for path in sorted(inner for place in places for inner in [place, *place.rglob("*")]):
        if path.is_file() and not path.is_symlink():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir():
            found[str(path)] = "folder"
    return found


def killed_at(number: int, once: Path | None = None) -> Fault:
    """SIGKILL at the n-th change of a file system, counted from zero, before it is made.

    With a file, changes are counted from when that is `once` there.
    """

    def fault() -> None:
        seen = [0]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if not _changes(event, arguments) or (once is not None and not once.exists()):
                return
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen[0] += 1

        sys.addaudithook(hook)

    return fault


def killed_after(seconds: float) -> Fault:
    """SIGKILL after some time of work, wherever the process is then."""

    def fault() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        killer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()

    return fault


def counting(file: Path) -> Fault:
    """Add a letter to `file` for every such change, so that the test knows how many there are."""

    def fault() -> None:
        counter = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if _changes(event, arguments):
                os.write(counter, b".")

        sys.addaudithook(hook)

    return fault


def _changes(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & _WRITE_FLAGS)
    return event in WRITES


def small_files(most: int) -> Fault:
    """No file may grow beyond so many bytes: writes fail with an error, as on a full disk."""

    def fault() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return fault


def small_disk(folder: Path, num_bytes: int) -> Fault:
    """A file system of its own for `folder`, so small; its content is copied there by the test."""

    def fault() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = 0x40000 | 0x4000  # private, recursively: the mount is seen in this process alone
        done = libc.unshare(_CLONE_NEWNS) == 0
        done = done and libc.mount(b"none", b"/", None, flags, None) == 0
        size = f"size={num_bytes}".encode()
        done = done and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, size) == 0
        if not done:
            raise OSError(ctypes.get_errno(), "cannot mount a file system here")

    return fault


def can_mount() -> bool:
    """Whether this process may mount file systems, as root outside a container may."""
    process = os.fork()
    if not process:
        with tempfile.TemporaryDirectory() as folder:
            try:
                small_disk(Path(folder), 2**16)()
            except OSError:
                os._exit(1)
            os._exit(0)
    return os.waitpid(process, 0)[1] == 0


def obeying_modes() -> None:
    """Give up what lets root read and write against the modes of files."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "cannot read capabilities")
    for index in range(3):
        sets[index] &= ~_OVERRIDES
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "cannot drop capabilities")
