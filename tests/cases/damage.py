"""What is done to files, and the cheap commands that meet it."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]
Command = tuple[Any, ...]
TEXT = "It was a dark evening, and the wind blew over the hills.\n"
# What makes calibration cheap, and its windows those of the text beside the checkpoint.
QUICK = ("--calibration", "text.txt", "--windows", 2, "--window", 32, "--evaluate", "none")
EVALUATE = ("--text", "text.txt", "--window", 32, "--max-windows", 1)
HEADER = 400  # bytes at the start of a file that hold names, types and sizes


def short(command: Sequence[Any]) -> str:
    """A command without what all of its kind share, and without names of places."""
    words = [str(word) for word in command]
    groups = ("evaluate", "export", "inspect")
    names = words[:2] if words[0] in groups and words[1] in NAMES else words[:1]
    flags = [word for word in words if word in ("--stream", "--force", "--dry-run")]
    given = [f"{a} {b}" for a, b in itertools.pairwise(words) if a in SHOWN]
    return " ".join([*names, *flags, *given])


NAMES = ("perplexity", "gguf", "stock", "plan")
SHOWN = ("--recover", "--preset")


def empty(path: Path) -> None:
    """Nothing in it."""
    path.write_bytes(b"")


def half(path: Path) -> None:
    """Its first half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def last_byte(path: Path) -> None:
    """All but its last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def zeros(path: Path) -> None:
    """Zeros, as many as there were bytes: what a crashed file system leaves."""
    path.write_bytes(bytes(path.stat().st_size))


def gone(path: Path) -> None:
    """No file."""
    path.unlink()


def folder(path: Path) -> None:
    """A folder of its name."""
    path.unlink()
    path.mkdir()


def more(path: Path) -> None:
    """Something behind its end."""
    path.write_bytes(path.read_bytes() + b"and more")


def a_list(path: Path) -> None:
    """JSON of another kind."""
    path.write_text("[]")


def null(path: Path) -> None:
    """JSON that says nothing."""
    path.write_text("null")


def bare(path: Path) -> None:
    """JSON without any entry."""
    path.write_text("{}")


def deep(path: Path) -> None:
    """JSON that no recursive reader survives."""
    path.write_text("[" * 100_000)


def flipped(seed: int, limit: int | None = None) -> Damage:
    """One bit that is another, anywhere or in the first bytes."""

    def damage(path: Path) -> None:
        draw, size = random.Random(seed), path.stat().st_size
        flip(path, draw.randrange(min(limit or size, size)), draw.randrange(8))

    damage.__name__ = f"bit {seed}" + (" of the header" if limit else "")
    return damage


def flip(path: Path, position: int, bit: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


BROKEN: tuple[Damage, ...] = (
    *(empty, half, last_byte, zeros, gone, folder, more),
    *(a_list, null, bare, deep),
)
FLIPS = (*map(flipped, range(3)), *(flipped(seed, HEADER) for seed in range(3)))
