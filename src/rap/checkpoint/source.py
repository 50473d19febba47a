"""Resolve a model argument: local directory, Hub ID, built-in name, or GGUF file."""

import functools
import sys
from pathlib import Path

from .. import assets
from ..model.errors import CheckpointError
from .fetch import FETCHED, fetched_path
from .gguf import checkpoint_of, is_gguf

BUNDLED = "bundled"


def resolve_source(source: str | Path) -> str:
    """The directory or Hub ID that transformers loads for a model argument.

    `bundled` is the model in the package, a name of `fetch.FETCHED` one that `rap fetch` brought,
    a .gguf file is dequantized once (with a line on standard error that says so). Raises
    CheckpointError for a model that was not fetched, or a file that cannot be read or is no GGUF.
    """
    name = str(source)
    if name == BUNDLED:
        return str(assets.reference_path())
    if name in FETCHED:
        return str(fetched_path(name))
    if is_gguf(name):
        return _dequantized(name)
    if Path(name).is_file():
        raise CheckpointError(f"{name} is a file; give its directory, a Hub ID or a .gguf file")
    return name


def check_apart(output: str | Path, *sources: object) -> None:
    """Raise CheckpointError for an output that replaces what it is made from, or cannot be named.

    `sources` are whatever stands for a model; hub names and models in memory are safe. Raises as
    `resolve_source` too.
    """
    path = Path(output)
    if str(output) in (BUNDLED, *FETCHED) or is_gguf(output):
        other = "a .gguf file" if is_gguf(output) else "a model of this package"
        raise CheckpointError(
            f"{output} names {other} wherever a model is asked for: choose another directory"
        )
    for source in sources:
        if not isinstance(source, (str, Path)):
            continue
        given = Path(source) if Path(source).exists() else Path(resolve_source(source))
        if given.exists() and given.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(
                f"{source} would be replaced by what is made of it: choose another output"
            )


def _dequantized(file: str) -> str:
    """A line for each content, as a command asks for its source several times."""
    path = Path(file)
    found = path.stat() if path.is_file() else None  # what is missing, the reader says
    return _converted(file, found and (found.st_mtime_ns, found.st_size))


@functools.cache
def _converted(file: str, _changed: tuple[int, int] | None) -> str:
    return str(checkpoint_of(file, say=lambda line: print(line, file=sys.stderr)))
