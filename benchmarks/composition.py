"""Pruning with quantized weights on top: retain ratio x kind, on the bundled model.

    python benchmarks/composition.py [--retain 0.9 0.7 0.5] [--windows 12]

Cut without training, by the default and by the paper's recipe, then quantized. Kinds of torchao are
left out where it is not installed. Writes results/composition.json.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

import rap
from rap import assets
from rap.analysis.report import markdown_table
from rap.checkpoint import write_json
from rap.pipeline import evaluation_tokens
from rap.provenance import installed_version, provenance
from rap.quantization import KINDS, quantize_weights

WINDOW, CALIBRATION_WINDOWS = 512, 16
RECIPES = {"default": rap.Rap(align=2), "paper": rap.Rap.paper(align=2)}


def kinds() -> list[str]:
    """The kinds of quantization that can be had here."""
    real = installed_version("torchao") is not None
    return [kind for kind in KINDS if real or kind == "rtn4-tensor"]


def measure(retains: list[float], num_windows: int) -> dict[str, Any]:
    """Perplexity of every cut with every kind of weights."""
    model, tokenizer = assets.reference_model(torch.float32), assets.reference_tokenizer()
    tokens = evaluation_tokens("bundled", tokenizer)
    windows = rap.load_windows("bundled", tokenizer, num_windows=CALIBRATION_WINDOWS, window=WINDOW)
    needs = frozenset().union(*(recipe.needs for recipe in RECIPES.values()))
    statistics = rap.calibrate(model, windows, needs)
    cells = []
    for recipe, retain in [("dense", 1.0), *((name, r) for name in RECIPES for r in retains)]:
        cut = model
        if recipe != "dense":
            method = rap.Rap(**{**_fields(RECIPES[recipe]), "retain": retain})
            cut = method.apply(model, method.plan(model, statistics))
        for kind in (None, *kinds()):
            weights = copy.deepcopy(cut)
            if kind is not None:
                quantize_weights(weights, kind)
            found = rap.perplexity(weights, tokens, window=WINDOW, max_windows=num_windows)
            cell = {"recipe": recipe, "retain": retain, "quantize": kind}
            cells.append(cell | {"perplexity": found.value})
            print(*cell.values(), f"{found.value:.2f}", flush=True)
    return {"fingerprint": rap.fingerprint_model(model), "cells": cells}


def table(found: list[dict[str, Any]], num_windows: int) -> dict[str, Any]:
    """A row a cut, a column a kind of weights."""
    shown = list(dict.fromkeys(cell["quantize"] for cell in found))
    rows: dict[tuple[str, float], list[str]] = {}
    for cell in found:
        row = rows.setdefault((cell["recipe"], cell["retain"]), [])
        row.append(f"{cell['perplexity']:.2f}")
    return {
        "title": "Pruning with quantized weights",
        "note": (
            f"Bundled model, perplexity over {num_windows} windows of {WINDOW} tokens, untrained. "
            "rtn4-tensor is the paper's quantizer: round to nearest, 4 bits, one scale a tensor. "
            "int8 and int4 are torchao's, one scale a row and one per 32 values."
        ),
        "header": ["cut", *(kind or "float32" for kind in shown)],
        "rows": [
            ["dense" if name == "dense" else f"{name} {retain:g}", *row]
            for (name, retain), row in rows.items()
        ],
    }


def _fields(recipe: rap.Rap) -> dict[str, Any]:
    return {key: value for key, value in recipe.describe().items() if key != "name"}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--retain", type=float, nargs="+", default=[0.9, 0.7, 0.5])
    parser.add_argument("--windows", type=int, default=12)
    arguments = parser.parse_args()
    found = measure(arguments.retain, arguments.windows)
    shown = table(found["cells"], arguments.windows)
    print(markdown_table(shown))
    result = {
        "table": shown,
        "command": "python benchmarks/composition.py",
        "fingerprint": found["fingerprint"],
        "torchao": installed_version("torchao"),
        "measured": found["cells"],  # not `cells`: those of a comparison have more fields
        "provenance": provenance(retain=arguments.retain, windows=arguments.windows),
    }
    write_json(Path("results") / "composition.json", result)


if __name__ == "__main__":
    main()
