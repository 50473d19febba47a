"""The command of a result file, with what it left to the defaults of its time.

Commands leave most settings to defaults, and defaults change. What a result records of them, or its
time tells, is given by flags: sizes, calibration data, whether heads are merged, and settings of a
recovery.
"""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rap.data.protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from rap.methods.naming import result_today
from rap.pipeline.defaults import UNASKED
from rap.recovery.config import PRESETS
from rap.recovery.layer_fit import FitConfig

# Before `rap compress` compared foldings up to 1,024 tokens, they ended at the root of the context.
ROOTS = {"smollm2": 90, "gemma3": 181}
# Settings of recoveries that did not always exist: since when, and what was done before.
ADDED = {
    "fit.products": ("2026-11-26T03:28:29Z", "float32"),
    "products": ("2026-11-26T10:45:24Z", "float32"),
    "fit.rate_choices": ("2026-11-26T23:16:08Z", 1),
}


def complete(result: dict[str, Any], folder: Path) -> str:
    """The command of a result that lies in a folder, with what it left to defaults."""
    # As it was called when the results were written.
    command = str(result_today(result)["command"])
    command = command.replace("rap evaluate ruler ", "rap evaluate retrieval ")
    settings = (result.get("provenance") or {}).get("settings") or {}
    words = shlex.split(command)
    if words[:2] == ["rap", "compress"]:
        more = _compressed_then(result, words)
        return shlex.join([*words[:3], *more, *words[3:]]) if more else command
    if words[:2] not in (["rap", "compare"], ["rap", "analyze"]) or "window" not in settings:
        return command
    flags = {"--windows": settings.get("num_windows", settings.get("windows"))}
    flags["--window"] = settings["window"]
    if words[1] == "analyze":
        flags |= {"--evaluate": settings["evaluate"], "--max-windows": settings["max_windows"]}
        flags["--evaluate-window"] = settings.get("evaluate_window", settings["window"])
    more = [w for flag, x in flags.items() if flag not in words for w in (flag, str(x))]
    for name, value in (settings.get("measures") or {}).items():
        given = any(word.startswith(f"{name}=") for word in words)
        if name in ("text", "window", "num_windows") and not given:
            more += ["--measure", f"{name}={'null' if value is None else value}"]
    if words[1] == "compare":
        more += _set_flags(recovery_then(result, folder), words)
    return shlex.join([*words, *more]) if more else command


def _compressed_then(result: dict[str, Any], words: list[str]) -> list[str]:
    """Flags of `rap compress` for what its report records, and today's defaults are not."""
    settings = (result.get("provenance") or {}).get("settings") or {}
    near = f"rap:reach={ROOTS[words[2]]}" if _folded_near(result, words) else None
    flags = {
        "--method": (near, None),
        "--calibration": (settings.get("calibration"), ",".join(UNASKED)),
        "--windows": (settings.get("num_windows"), CALIBRATION_WINDOWS),
        "--window": (settings.get("window"), CALIBRATION_WINDOW),
    }
    more = [
        word
        for flag, (then, today) in flags.items()
        if then not in (None, today) and flag not in words
        for word in (flag, str(then))
    ]
    fit = (result.get("recovery") or {}).get("fit") or {}
    return more + _set_flags(_fit_then(fit.get("config")), words)


def _set_flags(settings: dict[str, Any], words: list[str]) -> list[str]:
    """`--set NAME=VALUE` for settings that a command does not give."""
    return [
        word
        for name, value in settings.items()
        if not any(given.startswith(f"{name}=") for given in words)
        for word in ("--set", f"{name}={'null' if value is None else value}")
    ]


def _folded_near(result: dict[str, Any], words: list[str]) -> bool:
    """Whether a report of `rap compress` is of a pretrained model, by no reach that it records."""
    method = result.get("method") or {}
    near = method.get("name") == "rap" and method.get("keys") == "fold" and "reach" not in method
    return near and words[2] in ROOTS and "--method" not in words


def recovery_then(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the recovery of a comparison was set to, where that is no default now.

    Its cells record all settings. Where they are not kept, the time of the result tells which
    settings did not exist; the others are as today, or unknown.
    """
    found: dict[str, Any] = {}
    files = sorted(folder.glob("cells/*/config.json"))
    for file in files:
        config: dict[str, Any] = json.loads(file.read_text())
        found |= _fit_then(config.get("fit"))
        if preset := PRESETS.get(config.get("recover", "").rpartition("+")[2]):
            then = {"products": ADDED["products"][1]} | (config.get("recovery") or {})
            found |= _changed(then, asdict(preset))
    if not files:
        parts, measured = recovers(result), (result.get("provenance") or {}).get("time") or ""
        for name, (added, before) in ADDED.items():
            of_part = "fit" in parts if name.startswith("fit.") else bool(parts & PRESETS.keys())
            if of_part and "" < measured < added:
                found[name] = before
    return dict(sorted(found.items()))


def _fit_then(config: dict[str, Any] | None) -> dict[str, Any]:
    """What layer-wise distillation was set to, where that is no default now, after `fit.`."""
    if not config:
        return {}
    before = {name: x for name, (_, x) in ADDED.items() if name.startswith("fit.")}
    then = before | {f"fit.{name}": x for name, x in config.items()}
    return _changed(then, {f"fit.{name}": x for name, x in asdict(FitConfig()).items()})


def _changed(then: dict[str, Any], today: dict[str, Any]) -> dict[str, Any]:
    """Settings of `then` that have another value today; seeds aside, which commands give."""
    names = sorted(then.keys() & today.keys() - {"seed", "fit.seed"})
    return {name: then[name] for name in names if then[name] != today[name]}


def recovers(result: dict[str, Any]) -> set[str]:
    """The parts of all recoveries of a comparison, such as `fit` and `full`."""
    settings = (result.get("provenance") or {}).get("settings") or {}
    return {part for name in settings.get("recoveries", ()) for part in name.split("+")} - {"none"}
