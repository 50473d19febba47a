"""Settings as a person writes them, `name=value`, and as fields of a dataclass.

One reader for all that is set so: of methods, of what a comparison measures, of recoveries.
"""

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from ..model.errors import RapError

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


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


Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]  # what NumPy and all of torch take
Share = Annotated[float, Field(gt=0, le=1)]


def check_fields(settings: object, owner: str = "") -> None:
    """Raise RapError, with what is possible, for a field that its annotation does not allow.

    True is no number, a whole number is a number, also one of NumPy's, and of a Literal only what
    it lists is right. `owner` says in messages what the settings are of.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        try:
            TypeAdapter(hints[field.name]).validate_python(_plain(value), strict=True)
        except ValidationError as error:
            name = f"{owner} {field.name}".strip()
            right = " or ".join(
                each["msg"].removeprefix("Input should be ") for each in error.errors()
            )
            raise RapError(f"{name} cannot be {value!r}: it should be {right}") from None


def _plain(value: Any) -> Any:
    """A number of another library as Python's own."""
    if isinstance(value, (bool, int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
