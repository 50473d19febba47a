"""Errors of libraries that read files, in one line."""

import contextlib
from collections.abc import Iterator

from ..model.errors import CheckpointError, RapError


@contextlib.contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Turn what libraries raise over a damaged or senseless file, of any class, into one line.

    That is a CheckpointError, which says that one cannot do `what`, why, and the `remedy` where
    that is known. Raises errors of this package as they are.
    """
    try:
        yield
    except RapError:
        raise
    except Exception as error:
        end = f": {remedy}" if remedy else ""
        raise CheckpointError(f"cannot {what}: {_reason(error)}{end}") from error


def _reason(error: Exception) -> str:
    """The line of an error that says most, by its class where the text alone says nothing."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "ignore_mismatched_sizes" in str(error):
        return "their shapes are not those that its config.json describes"
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    telling = isinstance(error, (OSError, ValueError, ImportError))
    return text if telling else f"{type(error).__name__}: {text}"
