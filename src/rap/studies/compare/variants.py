"""How a grid is written: methods, recoveries, and lists and ranges of retain ratios."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from ...methods import METHODS
from ...methods.naming import recipes
from ...model.errors import RapError

DENSE = "dense"
_RECOVERED = {"none": "no recovery", "closed-form": "refitted"}


def recovery_name(recover: str) -> str:
    """A recovery as tables name it."""
    return _RECOVERED.get(recover, recover)


def all_variants() -> tuple[str, ...]:
    """Every registered method, and its `paper` recipe where it has one."""
    named = [(name, f"{name}:paper") for name in METHODS]
    return tuple(
        spec
        for name, paper in named
        for spec in (name, paper)
        if spec == name or "paper" in recipes(METHODS[name])
    )


def parse_retains(text: str) -> tuple[float, ...]:
    """Retain ratios of a list such as `0.7,0.5` or a range with both ends, `0.5:0.9:0.1`.

    Highest first. Raises RapError for anything else.
    """
    decimals: list[Decimal] = []
    try:
        for part in text.split(","):
            start, *others = (Decimal(number.strip()) for number in part.split(":"))
            if not others:
                decimals.append(start)
                continue
            stop, step = others
            count = (stop - start) / step
            if step <= 0 or count < 0:
                raise ValueError
            decimals += [start + step * index for index in range(int(count) + 1)]
    except (InvalidOperation, ValueError, ArithmeticError) as error:
        raise RapError(
            f"retain {text!r} is no list of ratios: write 0.7,0.5 or first:last:step (0.5:0.9:0.1)"
        ) from error
    ratios = sorted({float(ratio) for ratio in decimals}, reverse=True)
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise RapError(f"retain {text!r} leaves (0, 1]: give fractions of the cache to keep")
    return tuple(ratios)


def parse_names(text: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a comma list, each once, in order."""
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))
