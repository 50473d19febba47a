"""How a method is named everywhere: `name[:recipe][:setting=value]...`.

`rap`, `rap:paper`, `palu:group_size=1`, `rap:paper:budget=uniform:align=4`. A recipe is a class
method that makes one; settings are the method's own fields.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..model.errors import RapError
from .base import Method
from .registry import METHODS
from .settings import read_settings

GRAMMAR = "name[:recipe][:setting=value]..."


@dataclass(frozen=True)
class MethodText:
    """What a text names: a registered method, one of its recipes or none, and settings."""

    name: str
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_method(text: str) -> MethodText:
    """The parts of a method's text; RapError for a method, recipe or setting that is not there."""
    name, *rest = (part.strip() for part in text.split(":"))
    if name not in METHODS:
        raise RapError(f"unknown method {name!r}: use one of {', '.join(METHODS)}")
    named = [part for part in rest if "=" not in part]
    known = recipes(METHODS[name])
    for recipe in named:
        if recipe not in known:
            raise RapError(
                f"method {name!r} has no recipe {recipe!r}; it has: {', '.join(known) or 'none'}"
            )
    if len(named) > 1:
        raise RapError(f"method {text!r} asks for {len(named)} recipes: name one")
    settings = read_settings([part for part in rest if "=" in part])
    _check_names(name, settings)
    return MethodText(name, named[0] if named else None, settings)


def parse_method(
    text: str, retain: float = 0.7, settings: Mapping[str, Any] | None = None, **shared: Any
) -> Method:
    """The method that a text names, at a retain ratio.

    `settings` are set beside those of the text, and must be the method's own. `shared` are
    defaults: each counts if it is not None, the method has it, and nothing else sets it.

    >>> method = parse_method("rap:paper:align=4", 0.5)
    >>> method.retain, method.keys, method.align
    (0.5, 'pairs', 4)

    Raises RapError for what does not exist, is set twice, or cannot be.
    """
    named = read_method(text)
    given = dict(settings or {})
    _check_names(named.name, given)
    for name in given:
        if name in named.settings:
            raise RapError(f"{name} is set by {text!r} and a second time; set it once")
    method = METHODS[named.name]
    make: Any = getattr(method, named.recipe) if named.recipe else method
    known = {field.name for field in fields(method)}
    common = {key: value for key, value in shared.items() if key in known and value is not None}
    made: Method = make(retain=retain, **(common | dict(named.settings) | given))
    return made


def recipes(method: type[Method]) -> list[str]:
    """Names of a method's ready-made settings: its public class methods."""
    return [
        name
        for name in dir(method)
        if not name.startswith("_")
        and isinstance(inspect.getattr_static(method, name), classmethod)
    ]


def _check_names(name: str, settings: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(METHODS[name])} - {"retain"}
    for key in settings:
        if key not in known:
            raise RapError(
                f"method {name!r} has no setting {key!r}; it has: {', '.join(sorted(known))}"
            )
