"""How a method is named everywhere: `name[:recipe][:setting=value]...`.

`rap`, `rap:paper`, `palu:group_size=1`, `rap:paper:budget=uniform:align=4`. A recipe is a class
method that makes one; settings are the method's own fields.

Results of earlier releases name a method as it was called then. `named_today` and what follows it
call it as this release does: heads were separate where a record has no `merge`.
"""

import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..model.errors import RapError
from ..runtime.settings import read_settings
from .base import Method
from .registry import METHODS

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


SEPARATE = "merge=1"  # what no record of an earlier release says: heads were not merged
LISTED = ("--method", "--methods")  # options of commands that name methods
_TEXT = r"rap(?::\w+(?:=[\w.-]+)?)*"
# What a table shows of a method: alone, before a recovery or a ratio, or in a line with its ratio.
_SHOWN = re.compile(rf"^{_TEXT}(?=\Z|, | at \d| \d\.)|(?<=[\s(]){_TEXT}(?= at \d| \d+% at \d)")


def named_today(text: str, recorded: Mapping[str, Any] | None = None) -> str:
    """How this release names the method of a result that was `recorded` with these settings.

    >>> named_today("rap"), named_today("rap", {"merge": "auto"}), named_today("rap:paper")
    ('rap:merge=1', 'rap', 'rap:paper')

    A text that names no method of this release stays.
    """
    if "merge" in (recorded or {}):
        return text
    try:
        merges = getattr(parse_method(text), "merge", 1) != 1
    except RapError:
        return text
    return f"{text}:{SEPARATE}" if merges and "merge" not in read_method(text).settings else text


def command_today(command: str, names: Mapping[str, str] | None = None) -> str:
    """A recorded command that does in this release what it did, by `names` where those are given.

    >>> command_today("rap compare --methods rap,palu --retain 0.5")
    'rap compare --methods rap:merge=1,palu --retain 0.5'
    >>> command_today("rap compress bundled --method=rap")
    'rap compress bundled --method=rap:merge=1'

    A comparison that listed none lists those it had, by `names`.
    """
    words = shlex.split(command)
    if words[:1] != ["rap"]:
        return command

    def today(listed: str) -> str:
        named = listed.split(",")
        return ",".join(named_today(n) if names is None else names.get(n, n) for n in named)

    found = False
    for place, word in enumerate(words):
        flag, is_joined, listed = word.partition("=")
        if flag in LISTED and is_joined:
            words[place], found = f"{flag}={today(listed)}", True
        elif place and words[place - 1] in LISTED:
            words[place], found = today(word), True
    known = names or {}
    if not found and words[1:2] == ["compare"] and any(old != new for old, new in known.items()):
        words += ["--methods", ",".join(new for new in known.values() if new != "dense")]
    return command if words == shlex.split(command) else shlex.join(words)


def result_today(result: dict[str, Any]) -> dict[str, Any]:
    """A result file with its methods named as of today: in its runs, tables and commands.

    A comparison records the settings of every run; of other results those count that lie anywhere
    in them.
    """
    changed, names = dict(result), None
    if result.get("cells"):
        cells = result["cells"]
        names = {one["method"]: named_today(one["method"], one.get("settings")) for one in cells}
        changed["cells"] = [_cell_today(one, names) for one in cells]
    elif any("merge" in one for one in _recorded(result)):
        return result
    if isinstance(result.get("command"), str):
        changed["command"] = command_today(result["command"], names)
    if "tables" in result:
        changed["tables"] = [_table_today(table, names) for table in result["tables"]]
    if "table" in result:
        changed["table"] = _table_today(result["table"], names)
    return changed


def shown_today(shown: str, names: Mapping[str, str] | None = None) -> str:
    """What a table shows, with the methods in it named as of today, or by `names`.

    >>> shown_today("rap at 0.7, fitted"), shown_today("rap:paper 0.7"), shown_today("best of rap")
    ('rap:merge=1 at 0.7, fitted', 'rap:paper 0.7', 'best of rap')
    """

    def name(found: re.Match[str]) -> str:
        return named_today(found[0]) if names is None else names.get(found[0], found[0])

    return _SHOWN.sub(name, shown)


def _cell_today(cell: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    command = {key: command_today(x, names) for key, x in cell.items() if key == "command"}
    return cell | {"method": names[cell["method"]]} | command


def _table_today(table: dict[str, Any], names: Mapping[str, str] | None) -> dict[str, Any]:
    def today(value: Any) -> Any:
        return shown_today(value, names) if isinstance(value, str) else value

    changed = table | {"header": [today(one) for one in table["header"]]}
    changed["rows"] = [[today(one) for one in row] for row in table["rows"]]
    return changed | {key: today(table[key]) for key in ("title", "note") if table.get(key)}


def _recorded(value: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of methods that lie anywhere in a result."""
    if isinstance(value, Mapping):
        if value.get("name") in METHODS and "retain" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _recorded(one)
