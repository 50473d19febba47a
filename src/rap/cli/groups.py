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
from ..methods import METHODS, Method, parse_method
from ..methods.merged import most_merged
from ..methods.naming import read_method
from ..model.errors import RapError
from ..model.layers import text_config
from ..pipeline import AUTO as DEFAULT
from ..planning.budgets import nearest_width
from ..planning.shared import STOCK_TARGETS, target_settings
from ..runtime.settings import read_value
from ..serving.gguf.plain import check_plain
from ..serving.layout import head_dim
from ..serving.plain_forms import check_stock, check_widely_read
from . import options

# What a method lacks that has no such setting of a target.
NEEDS = {
    "align": "widths to align (align)",
    "profile": "one width for all heads (profile)",
    "merge": "heads to merge (merge)",
}


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
        if self.target is not None:
            given |= self._for_target(source, dict(read_method(self.method).settings) | given)
        return parse_method(self.method, self.retain, given, seed=seed, **defaults)

    def _for_target(self, source: str, given: dict[str, Any]) -> dict[str, Any]:
        """What the target asks for; RapError if the method has not all, or it was given by hand."""
        target = str(self.target)
        whole = load_config(source)
        check_target(whole, target)
        config = text_config(whole)
        dim = head_dim(config)
        budget = given.get("budget") or ("uniform" if target in STOCK_TARGETS else "error")
        wanted = target_settings(target, dim, budget)
        name = read_method(self.method).name
        known = {one.name for one in fields(METHODS[name])}
        for setting in wanted:
            if setting not in known:
                raise RapError(
                    f"--target {target} needs a method with {NEEDS[setting]}, which {name!r} has "
                    "not: remove --target, or take another method"
                )
        if "merge" in wanted and "merge" in given:
            wanted["merge"] = given["merge"]
        for name in wanted:
            if name in given and name != "merge":
                raise RapError(f"--target {target} decides {name}: remove --{name}, or the target")
        if wanted.get("profile") == "stock" and self.retain < 1:
            if "merge" in wanted:
                heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
                unit = wanted["align"] // 2
                most = most_merged(heads, dim, self.retain, absorbed=True, unit=unit)
                named = {"auto": most, "all": heads}
                merged = named.get(wanted["merge"], wanted["merge"])
                dim *= merged if isinstance(merged, int) else 1  # what is no number, Rap refuses
            width = nearest_width(self.retain * dim, dim, wanted["align"])
            if width in (0, dim):
                align = wanted["align"]
                remedy = "choose another ratio, or remove --target"
                if dim <= align:
                    remedy = "there is none, so remove --target"
                raise RapError(
                    f"retain {self.retain} of heads of {dim} channels rounds to {width}, where "
                    f"nothing can be pruned; --target {target} supports multiples of {align} below "
                    f"{dim}: {remedy}"
                )
        return {name: value for name, value in wanted.items() if name not in given}


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


def check_target(config: Any, target: str) -> None:
    """Raise UnsupportedModelError for a dense config whose pruned form `target` cannot load.

    Read from the config alone, so that nobody pays for a profile that leads nowhere.
    """
    if target in STOCK_TARGETS:
        check_stock(config)
    if target == "mlx":
        check_widely_read(config, "mlx-lm")
    if target == "llamacpp":
        check_plain(config)
