"""How a table was measured, for its caption: data, samples, BOS, and where times were taken."""

import re
from typing import Any

from ...data.bos import describe_bos
from ...data.protocol import (
    CALIBRATION_WINDOW,
    CALIBRATION_WINDOWS,
    EVALUATION_WINDOW,
    EVALUATION_WINDOWS,
)

DEFAULT = (
    f"Not the default protocol, which is {CALIBRATION_WINDOWS} x {CALIBRATION_WINDOW:,} tokens to "
    f"calibrate and {EVALUATION_WINDOWS} x {EVALUATION_WINDOW:,} to evaluate."
)
TIMED = ("decode", "prefill")  # columns of times
UNKNOWN = object()  # whether windows began with BOS, in results that do not record it
Sizes = tuple[int | None, int | None]


def caption(result: dict[str, Any], table: dict[str, Any]) -> str:
    """The protocol of a comparison, an analysis or an evaluation; nothing of other results."""
    settings = (result.get("provenance") or {}).get("settings") or {}
    if result.get("cells") and "measures" in settings:
        return f"{_comparison(result, settings)}{_timed(result['cells'], table)}"
    if "analysis" in result and "windows" in settings:
        return _analysis(settings, table)
    if {"text", "num_windows", "window", "value"} <= result.keys():
        sizes = result["num_windows"], result["window"]
        return f"Evaluated on {_read(sizes, result['text'], result.get('bos', UNKNOWN))}."
    return ""


def _comparison(result: dict[str, Any], settings: dict[str, Any]) -> str:
    scored = result["cells"][0]["evaluation"]
    calibrated = settings["num_windows"], settings["window"]
    evaluated = scored["num_windows"], scored["window"]
    read = _read(evaluated, settings["measures"]["text"], scored.get("bos", UNKNOWN))
    data = _samples(calibrated, settings["calibration"])
    return f"Calibrated on {data}; evaluated on {read}.{_other(calibrated, evaluated)}"


def _analysis(settings: dict[str, Any], table: dict[str, Any]) -> str:
    calibrated = settings["windows"], settings["window"]
    data = f"Calibrated on {_samples(calibrated, settings['calibration'])}"
    if "erplexity" not in f"{table['title']} {table.get('note')} {table['header']}":
        return f"{data}.{_other(calibrated, (EVALUATION_WINDOWS, EVALUATION_WINDOW))}"
    # Before there was a setting of it, evaluation windows were as long as those of calibration.
    evaluated = settings["max_windows"], settings.get("evaluate_window") or settings["window"]
    read = f"at most {_samples(evaluated, settings['evaluate'], 'windows')}"
    return f"{data}; evaluated on {read}.{_other(calibrated, evaluated)}"


def _samples(sizes: Sizes, data: str, what: str = "samples") -> str:
    count, length = sizes
    return f"{count} {what} of {length:,} tokens of {data}"


def _read(sizes: Sizes, data: str, bos: Any) -> str:
    begins = "BOS not recorded" if bos is UNKNOWN else describe_bos(bos)
    return f"{_samples(sizes, data, 'windows')}, {begins}"


def _other(calibrated: Sizes, evaluated: Sizes) -> str:
    """That it is not the protocol of today."""
    default = (CALIBRATION_WINDOWS, CALIBRATION_WINDOW), (EVALUATION_WINDOWS, EVALUATION_WINDOW)
    return "" if (calibrated, evaluated) == default else f" {DEFAULT}"


def _timed(cells: list[dict[str, Any]], table: dict[str, Any]) -> str:
    """Where the times of a table were taken, of the retain ratio that its title names."""
    if not any(column.split(",")[0] in TIMED for column in table["header"]):
        return ""
    ratio = re.match(r"At retain ([\d.]+),", table["title"])
    retains = {cell["retain"] for cell in cells if ratio and cell["retain"] == float(ratio[1])}
    timed = [
        cell["provenance"]["device"]
        for cell in cells
        if "decode_seconds" in cell and (not retains or cell["retain"] in retains)
    ]
    return f" Timed on {' and on '.join(dict.fromkeys(timed))}." if timed else ""
