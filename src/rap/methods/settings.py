"""Settings as a person writes them, `name=value`, and as fields of a dataclass.

One reader for all that is set so: of methods, of what a comparison measures, of recoveries.
"""

import types
from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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


def check_fields(settings: object) -> None:
    """Raise RapError, with what is possible, for a field that is not of its annotated type.

    True is no number, a whole number is a number, and of a Literal only what it lists is right.
    """
    for name, kinds in _kinds(type(settings)).items():
        value = getattr(settings, name)
        if any(_fits(value, kind) for kind in kinds):
            continue
        words = sorted(str(word) for kind in kinds for word in _listed(kind))
        plain = [_SAID[kind] for kind in kinds if kind in _SAID]
        if not plain:
            raise RapError(f"unknown {name} {value!r}: use one of {', '.join(words)}")
        raise RapError(f"{name} {value!r} is not possible: give {' or '.join([*plain, *words])}")


def _kinds(owner: type) -> dict[str, tuple[Any, ...]]:
    """The types that every field of a dataclass may have."""
    hints = get_type_hints(owner)
    return {field.name: _members(hints[field.name]) for field in fields(owner)}


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _listed(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)
