"""How a grid is written: methods with their settings, and lists and ranges of retain ratios."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any

import yaml

from ...methods import METHODS, Method
from ...model.errors import RapError

DENSE = "dense"


@dataclass(frozen=True)
class Variant:
    """A method as the grid names it, `name[:recipe][:setting=value]...`.

    A recipe is a class method that makes one (`rap:paper`); settings are the method's own fields
    (`palu:group_size=4`).
    """

    spec: str

    def build(self, retain: float, **common: Any) -> Method:
        """The method at a retain ratio; of the `common` settings those that it has.

        Raises RapError for a method, recipe or setting that does not exist.
        """
        name, *rest = self.spec.split(":")
        if name not in METHODS:
            raise RapError(f"unknown method {name!r}: use one of {', '.join(METHODS)}")
        maker, known = METHODS[name], {field.name for field in fields(METHODS[name])}
        settings: dict[str, Any] = {}
        for part in rest:
            key, given, value = part.partition("=")
            if given:
                settings[key] = read_value(value)
            elif key in recipes(METHODS[name]):
                maker = getattr(METHODS[name], key)
            else:
                found = ", ".join(recipes(METHODS[name])) or "none"
                raise RapError(f"method {name!r} has no recipe {key!r}; it has: {found}")
        for key in settings:
            if key not in known or key == "retain":
                others = ", ".join(sorted(known - {"retain"}))
                raise RapError(f"method {name!r} has no setting {key!r}; it has: {others}")
        shared = {key: value for key, value in common.items() if key in known and value is not None}
        return maker(retain=retain, **(shared | settings))


def recipes(method: type[Method]) -> list[str]:
    """Names of a method's ready-made settings: its public class methods."""
    return [
        name
        for name in dir(method)
        if not name.startswith("_")
        and isinstance(inspect.getattr_static(method, name), classmethod)
    ]


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
    found: list[Decimal] = []
    try:
        for part in text.split(","):
            start, *others = (Decimal(number.strip()) for number in part.split(":"))
            if not others:
                found.append(start)
                continue
            stop, step = others
            count = (stop - start) / step
            if step <= 0 or count < 0:
                raise ValueError
            found += [start + step * index for index in range(int(count) + 1)]
    except (InvalidOperation, ValueError, ArithmeticError) as error:
        raise RapError(
            f"retain {text!r} is no list of ratios: write 0.7,0.5 or first:last:step (0.5:0.9:0.1)"
        ) from error
    ratios = sorted({float(ratio) for ratio in found}, reverse=True)
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise RapError(f"retain {text!r} leaves (0, 1]: give fractions of the cache to keep")
    return tuple(ratios)


def parse_names(text: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a comma list, each once, in order."""
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))


def parse_settings(changes: Sequence[str]) -> dict[str, Any]:
    """A dictionary of `name=value` texts; RapError for one without a value."""
    pairs = [change.partition("=") for change in changes]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise RapError(f"cannot set {name + equals + value!r}: write name=value")
    return {name.replace("-", "_"): read_value(value) for name, _, value in pairs}


def read_value(text: str) -> Any:
    """A number, true, false, null or a word, as YAML reads it, and 1e-4 as a number too."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RapError(f"cannot read the value {text!r}: give a number or a word") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
