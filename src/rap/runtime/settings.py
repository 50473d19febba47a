"""Settings as a person writes them, `name=value`, and as fields of a dataclass.

One reader for all that is set so: of methods, of what a comparison measures, of recoveries.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..model.errors import RapError

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_SAID = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


def split_setting(text: str) -> tuple[str, str]:
    """Name and value of `name=value`, with `_` for `-` in the name; RapError for anything else."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise RapError(f"cannot set {text!r}: write name=value")
    return name.replace("-", "_"), value


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """A dictionary of `name=value` strings; RapError for one without a value, or named twice."""
    settings: dict[str, Any] = {}
    for name, value in map(split_setting, texts):
        if name in settings:
            raise RapError(f"{name} is set twice; set it once")
        settings[name] = read_value(value)
    return settings


def read_value(text: str) -> Any:
    """A whole number, a number (1e-4 is one), true, false, null, or else the text as it is."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


@dataclass(frozen=True)
class Within:
    """What a number of a setting may be, as an annotation: `Annotated[int, Within(least=1)]`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def holds(self, number: Any) -> bool:
        """Whether the number is inside."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and (self.most is None or number <= self.most)
        )

    def __str__(self) -> str:
        words = {"{:g} or more": self.least, "more than {:g}": self.above}
        words |= {"less than {:g}": self.below, "at most {:g}": self.most}
        return " and ".join(text.format(end) for text, end in words.items() if end is not None)


Count = Annotated[int, Within(least=1)]
NotNegative = Annotated[float, Within(least=0)]
Positive = Annotated[float, Within(above=0)]
Share = Annotated[float, Within(above=0, most=1)]


def check_fields(settings: object, owner: str = "") -> None:
    """Raise RapError, with what is possible, for a field that its annotation does not allow.

    True is no number, a whole number is a number, and of a Literal only what it lists is right.
    `owner` says in messages what the settings are of.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):  # type: ignore[arg-type]
        value, kinds = getattr(settings, field.name), _members(hints[field.name])
        if any(_fits(value, kind) for kind in kinds):
            continue
        name = f"{owner} {field.name}".strip()
        words = sorted(str(word) for kind in kinds for word in _listed(kind))
        plain = [said for kind in kinds if (said := _said(kind, value))]
        if not plain:
            raise RapError(f"unknown {name} {value!r}: use one of {', '.join(words)}")
        raise RapError(f"{name} cannot be {value!r}: give {' or '.join([*plain, *words])}")


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _listed(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _said(kind: Any, value: Any) -> str:
    """What a value of another kind should have been; of a number that is outside, its ends."""
    if get_origin(kind) is Annotated:
        plain, ends = get_args(kind)
        return str(ends) if _fits(value, plain) else _SAID[plain]
    if get_origin(kind) is tuple:
        return "whole numbers, such as 256,1000"
    return _SAID.get(kind, "")


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Annotated:
        plain, ends = get_args(kind)
        return _fits(value, plain) and ends.holds(value)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(one, get_args(kind)[0]) for one in value)
    return isinstance(value, get_origin(kind) or kind)
