"""Pruning with other compression on top: weights or cache in fewer bits, tokens evicted; and ThinK.

    python experiments/composition/composition.py [--retain 0.9 0.7 0.5] [--recover 0.7 0.5]

The bundled model, cut by the default and by the paper's recipe, without training and after the
`fast` recovery. Axes whose package is missing (torchao, bitsandbytes, hqq, optimum-quanto, kvpress)
are left out, and the notes say so. Writes composition.json beside this file after every model;
repeated with the same settings, it measures only what that lacks.
"""

import argparse
import copy
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import composition_tables
import numpy as np
import torch

import rap
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import installed_version, provenance
from rap.evaluation.cache.compressed import (
    CacheCompression,
    compressed_perplexity,
    compressed_recall,
)
from rap.evaluation.cache.presses import PRESSES, Press
from rap.evaluation.cache.quantized_cache import CACHE_KINDS
from rap.evaluation.cost.footprint import footprint, reconstructs
from rap.evaluation.quantization import quantize_weights
from rap.recovery.config import PRESETS
from rap.recovery.distillation import distill
from rap.studies.report.report import markdown_table

RESULT = Path(__file__).with_suffix(".json")
WINDOW, PREFIX, CALIBRATION_WINDOWS = 512, 256, 16
DISTANCE, FACTS = 256, 4
RECIPES = {"default": rap.Rap(align=2, merge=1), "paper": rap.Rap.paper(align=2)}
WEIGHTS = {"rtn4-tensor": None, "int8": "torchao", "int4": "torchao", "nf4": "bitsandbytes"}
BITS = ("hqq4", "hqq2", "quanto4", "quanto2")
EVICT = 0.5
# ThinK prunes channels of keys alone: twice the share of them for the same share of the cache.
THINK = {retain: 2 * (1 - retain) for retain in (0.9, 0.8, 0.7, 0.6)}


def weight_kinds() -> list[str]:
    """The kinds of quantized weights that can be had here."""
    return [kind for kind, package in WEIGHTS.items() if not package or _has(package)]


def cache_axes() -> list[CacheCompression]:
    """What can be done to a cache here, nothing first."""
    bits = [kind for kind in BITS if _has(CACHE_KINDS[kind][0].package)]
    presses = [name for name in PRESSES if name != "think" and _has("kvpress")]
    return [
        CacheCompression(),
        *(CacheCompression(bits=kind) for kind in bits),
        *(CacheCompression(press=Press(name, EVICT)) for name in presses),
    ]


class Bench:
    """The dense model in its context, its text to judge on, and what its attention costs."""

    def __init__(self, num_windows: int, num_documents: int):
        reading = CalibrationText(num_windows=CALIBRATION_WINDOWS, window=WINDOW)
        self.dense = DenseContext.open("bundled", dtype=torch.float32, reading=reading)
        self.tokens = self.dense.held_out("bundled")
        self.num_windows, self.num_documents = num_windows, num_documents
        self.dense.statistics_for(RECIPES.values())  # one reading for what all cells need
        self.whole = footprint(self.dense.model)

    def build(self, recipe: str, retain: float, recover: str) -> Any:
        """The model of a cell."""
        if recipe == "dense":
            return self.dense.model
        method = replace(RECIPES[recipe], retain=retain)
        cut = method.apply(self.dense.model, self.dense.plan(method))
        if recover == "none":
            return cut
        config = PRESETS[recover]
        windows = rap.load_windows(
            "bundled",
            self.dense.tokenizer,
            num_windows=config.num_windows,
            window=config.window,
            seed=1,
        )
        return distill(cut, self.dense.model, windows, config).model

    def measure(self, model: Any) -> dict[str, Any]:
        """Every axis on one model, and what its attention costs."""
        cost, whole = footprint(model), self.whole
        return {
            "weights": {kind or "float32": self.weights(model, kind) for kind in self._kinds()},
            "cache": {str(axis): self.cache(model, axis) for axis in cache_axes()},
            "kv_share": cost.kv_bytes_per_token / whole.kv_bytes_per_token,
            "parameter_share": cost.attention_parameters / whole.attention_parameters,
            "flops_share": cost.attention_flops(WINDOW) / whole.attention_flops(WINDOW),
            "reconstructs": reconstructs(model),
        }

    def weights(self, model: Any, kind: str | None) -> float:
        """Perplexity with the weights in fewer bits."""
        if kind is not None:
            model = quantize_weights(copy.deepcopy(model), kind)
        return float(
            rap.perplexity(model, self.tokens, window=WINDOW, max_windows=self.num_windows)
        )

    def cache(self, model: Any, axis: CacheCompression) -> dict[str, Any]:
        """Continuation perplexity and recall in float32, bytes as the checkpoint's bfloat16."""
        sizes = {"window": WINDOW, "prefix": PREFIX}
        quality = compressed_perplexity(
            model, self.tokens, axis, **sizes, max_windows=self.num_windows
        )
        stored = compressed_perplexity(
            model, self.tokens, axis, **sizes, max_windows=1, dtype=torch.bfloat16
        )
        (recall,) = compressed_recall(
            model,
            self.dense.tokenizer,
            np.asarray(self.tokens),
            axis,
            distances=[DISTANCE],
            facts=[FACTS],
            num_documents=self.num_documents,
        )
        return {
            "perplexity": quality.perplexity,
            "recall": recall.accuracy,
            "token_recall": recall.token_accuracy,
            "prefix_bytes_per_token": stored.prefix_bytes_per_token,
            "kv_bytes_per_token": stored.kv_bytes_per_token,
        }

    def think(self) -> dict[str, Any]:
        """ThinK on the dense model, by the share of the cache that it would hold."""
        model = self.dense.model
        return {
            f"{retain:g}": self.cache(model, CacheCompression(press=Press("think", share)))
            for retain, share in THINK.items()
            if _has("kvpress")
        }

    @staticmethod
    def _kinds() -> list[str | None]:
        return [None, *weight_kinds()]


def models(retains: list[float], recovered: list[float]) -> list[tuple[str, float, str]]:
    """Recipe, retain and recovery of every model; ratios with a recovery first, they say most."""
    return [
        ("dense", 1.0, "none"),
        *(
            (name, retain, recover)
            for retain in sorted(retains, key=lambda retain: retain not in recovered)
            for name in RECIPES
            for recover in (("none", "fast") if retain in recovered else ("none",))
        ),
    ]


def stored(settings: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """What an earlier run with these settings, this model and these packages measured."""
    if not RESULT.is_file():
        return {"measured": [], "think": {}}
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    same = found["provenance"]["settings"] == settings and found["fingerprint"] == fingerprint
    return found if same else {"measured": [], "think": {}}


def write(settings: dict[str, Any], fingerprint: str, found: dict[str, Any]) -> dict[str, Any]:
    """The result file of what has been measured so far."""
    made = provenance(**settings)
    result = {
        "title": "Pruning with other compression on top",
        "tables": composition_tables.tables(found, settings),
        "command": made["command"],
        "fingerprint": fingerprint,
        "measured": found["measured"],  # not `cells`: those of a comparison have more fields
        "think": found["think"],
        "provenance": made,
    }
    write_json(RESULT, result)
    return result


def _has(package: str) -> bool:
    """kvpress patches transformers when imported, so packages are looked up, not imported."""
    if package == "kvpress":
        return importlib.util.find_spec(package) is not None
    return installed_version(package) is not None


def main() -> None:
    """Measure, write after every model, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--retain", type=float, nargs="+", default=[0.9, 0.7, 0.5])
    parser.add_argument("--recover", type=float, nargs="*", default=[0.7, 0.5])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--documents", type=int, default=12)
    arguments = parser.parse_args()
    packages = ("torchao", "bitsandbytes", "hqq", "optimum-quanto", "kvpress")
    settings = vars(arguments) | {name: installed_version(name) for name in packages}
    bench = Bench(arguments.windows, arguments.documents)
    fingerprint = bench.dense.fingerprint
    found = stored(settings, fingerprint)
    if not found["think"]:
        found["think"] = bench.think()
    for recipe, retain, recover in models(arguments.retain, arguments.recover):
        cell = {"recipe": recipe, "retain": retain, "recover": recover}
        if any(cell.items() <= one.items() for one in found["measured"]):
            continue
        found["measured"].append(cell | bench.measure(bench.build(recipe, retain, recover)))
        print(*cell.values(), json.dumps(found["measured"][-1]["weights"]), flush=True)
        write(settings, fingerprint, found)
    for table in write(settings, fingerprint, found)["tables"]:
        print(f"\n{table['title']}\n\n{markdown_table(table)}")


if __name__ == "__main__":
    main()
