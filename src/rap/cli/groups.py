"""Options that commands share as one parameter: a dataclass, spelled out an option a field."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calibration.dense_context import CalibrationText
from ..checkpoint.device import AUTO
from ..checkpoint.load import load_config
from ..data.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from ..methods import Method, parse_method
from ..methods.naming import read_method
from ..pipeline import DEFAULT
from ..runtime.settings import read_value
from ..serving.targets import check_pruned, settings_for
from . import options


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every parameter that is a dataclass replaced by that one's fields.

    Flags, `--config` and help see the fields alone; the command gets the dataclass, made of them.
    Defaults are the fields' own, or those of the instance that the parameter has as its default.
    """
    written = inspect.signature(command).parameters
    groups = {
        name: [one.name for one in fields(parameter.annotation)]
        for name, parameter in written.items()
        if is_dataclass(parameter.annotation)
    }
    spelled = [part for one in written.values() for part in _spelled(one)]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, members in groups.items():
            given[name] = written[name].annotation(**{one: given.pop(one) for one in members})
        command(**given)

    flat: Any = run
    flat.__signature__ = inspect.Signature(spelled)
    flat.__annotations__ = {one.name: one.annotation for one in spelled}
    return run


def _spelled(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The parameter, or the fields of the dataclass that it is."""
    if not is_dataclass(parameter.annotation):
        return [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    chosen = parameter.default
    return [
        inspect.Parameter(
            one.name,
            parameter.KEYWORD_ONLY,
            annotation=one.type,
            default=one.default if chosen is parameter.empty else getattr(chosen, one.name),
        )
        for one in fields(parameter.annotation)
    ]


@dataclass(frozen=True, kw_only=True)
class PruningOptions:
    """How much is pruned and by what: a method's text, and shorthands for common settings."""

    retain: options.Retain = 0.7
    method: options.MethodName = "rap"
    score: options.Score = None
    budget: options.Budget = None
    metric: options.Metric = None
    keys: options.Keys = None
    values: options.Values = None
    key_share: options.KeyShare = None
    align: options.Align = None
    context: options.Context = None
    layers: options.Layers = None
    profile: options.Profile = None
    target: options.Target = None

    def build(self, source: str, seed: int, **defaults: str) -> Method:
        """The method for a checkpoint; RapError for an unknown setting, or one that is set twice.

        `defaults` count where the method has such a setting and nothing else sets it.
        """
        others = ("retain", "method", "target")
        given = {
            name: read_value(value) if isinstance(value, str) else value
            for name, value in vars(self).items()
            if name not in others and value is not None
        }
        shared: dict[str, Any] = {"seed": seed, **defaults}
        method = parse_method(self.method, self.retain, given, **shared)
        if self.target is None:
            return method
        config = load_config(source)
        every = dict(read_method(self.method).settings) | given
        given |= settings_for(self.target, config, method, every)
        method = parse_method(self.method, self.retain, given, **shared)
        check_pruned(self.target, config, method)
        return method


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """The text that a model is calibrated on."""

    calibration: options.Calibration = "bundled"
    windows: options.NumWindows = CALIBRATION_WINDOWS
    window: options.Window = CALIBRATION_WINDOW


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """How a model is loaded, and how whatever it reads begins and is drawn."""

    dtype: options.Dtype = "auto"
    device: options.Device = AUTO
    device_map: options.DeviceMap = None
    bos: options.Bos = "auto"
    seed: options.Seed = 0


# A dataclass has the fields of its last base first: windows, then what loads the model.
@dataclass(frozen=True, kw_only=True)
class ReadingOptions(LoadingOptions, WindowOptions):
    """How a model is loaded, and the text that it is calibrated on."""

    @property
    def text(self) -> CalibrationText:
        """What is read to calibrate."""
        return CalibrationText(self.calibration, self.windows, self.window, self.seed, self.bos)


@dataclass(frozen=True, kw_only=True)
class CompletedOptions(ReadingOptions):
    """The same, with sources that are completed for general use (`pipeline.defaults`)."""

    calibration: options.Completed = DEFAULT


@dataclass(frozen=True, kw_only=True)
class StreamingOptions:
    """How a checkpoint is compressed that does not fit into memory."""

    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Process layer by layer from the files, without loading the model."
        ),
    ] = False
    statistics: Annotated[
        Path | None,
        typer.Option(
            "--statistics",
            help="With --stream: file of rap.calibrate(...).save, for methods that need "
            "gradients of the loss.",
        ),
    ] = None
