"""What a result must carry to be repeated: code, versions, device, seed and the command."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .version import __version__

PACKAGES = ("torch", "transformers", "safetensors", "peft", "accelerate", "datasets")
HERE = Path(__file__).resolve()
CHECKOUT = HERE.parents[3]  # where the package runs from a checkout; git says whether it does
GIT_SECONDS = 20


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(kind: str | None = None) -> str:
    """The device of a kind (`cuda` or `cpu`), by default the accelerator if there is one."""
    if torch.cuda.is_available() if kind is None else kind == "cuda":
        return torch.cuda.get_device_name()
    return _processor()


def device_used() -> str:
    """The accelerator that this process had tensors on, or the processor, and unused devices."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if torch.cuda.memory_stats(index).get("allocation.all.allocated", 0):
            return torch.cuda.get_device_name(index)
    idle = f"; not used here: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return _processor(idle)


def _processor(more: str = "") -> str:
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads{more})"


@cache
def code_commit() -> str | None:
    """The commit of the checkout that holds this file, shortened, `+` if tracked files differ.

    None outside a checkout, and where git does not answer. Asked once a process: the code that
    runs is what it was when the process began.
    """
    # An installed package may lie in somebody else's repository, which does not track it.
    if _git("ls-files", "--error-unmatch", "--", HERE.name) is None:
        return None
    return _git("describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+")


def command_line() -> str | None:
    """The command of this process as typed in the checkout: `rap`, or one of its scripts.

    None for other programs, whose path would be that of one machine.
    """
    program = Path(sys.argv[0])
    # `python -m rap` runs this file, which does not run by its path.
    if program.name == "rap" or program.resolve() == HERE.parents[1] / "__main__.py":
        return shlex.join(["rap", *sys.argv[1:]])
    path = program.resolve()
    if program.suffix != ".py" or not path.is_relative_to(CHECKOUT):
        return None
    inside = path.relative_to(CHECKOUT)
    # An environment inside the checkout has programs of its own, such as the test runner.
    if any(part.startswith(".") for part in inside.parts):
        return None
    return shlex.join(["python", inside.as_posix(), *sys.argv[1:]])


def provenance(**settings: Any) -> dict[str, Any]:
    """A JSON-able record of the code, the environment, the command and the resolved `settings`."""
    return {
        "rap": __version__,
        "commit": code_commit(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "device": device_used(),
        "command": command_line(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": settings,
    }


def _git(*arguments: str) -> str | None:
    """What git prints, run where this file lies; None if it fails in any way."""
    # A hook of another repository sets GIT_DIR, which would win over the folder.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=HERE.parent,
            env=clean,
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
