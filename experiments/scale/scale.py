"""What a cut is worth on models that are larger than any machine here, counted and computed.

    python experiments/scale/scale.py

Published sizes are built on the meta device: no weights, nothing downloaded. Bytes of cache,
parameters and products are counted there, on the real classes; everything else follows from them by
arithmetic that is written down below. The cost of the fit is computed from one layer that
`benchmarks/fit.py` measured. Writes scale.json (what serving gains) and scale-fit.json (what the
fit takes) beside this file.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "cost"))

from formulas import PUBLISHED

from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.evaluation.cost.footprint import Footprint, footprint
from rap.evaluation.cost.random_models import uniform_config
from rap.studies.report.report import markdown_table

HERE = Path(__file__).parent
FIT = HERE.parents[1] / "benchmarks" / "results" / "fit-cpu.json"
MEASURED = "Llama-3-8B"  # the layer that the fit was measured on
RETAINS = (1.0, 0.7, 0.5)
CONTEXT, BATCH = 8192, 32
MEMORY = (16, 24, 80, 160)  # GiB of a device, or of two
USED = 0.9  # of it, for weights and cache together, as engines do by default
CALIBRATED = 32 * 1024  # tokens, forwards and backwards
GIB = 2**30

_LARGE = PUBLISHED["Llama-3-8B"][1]
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
# Model type and sizes as published.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B": PUBLISHED["Llama-3-8B"],
    "Qwen3-8B": (
        "qwen3",
        _LARGE
        | {"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
        | {"rope_parameters": _ROPE},
    ),
    "Mistral-7B": PUBLISHED["Mistral-7B"],
    "Llama-3-70B": (
        "llama",
        _LARGE
        | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"intermediate_size": 28672, "vocab_size": 128256},
    ),
}


@dataclass(frozen=True)
class Scaled:
    """A model at a retain ratio: what was counted of it, and its vocabulary's and layers' share.

    `embedding` are parameters of the table of tokens, which no product reads; `layers` decoder
    layers share the others but for the head.
    """

    counted: Footprint
    embedding: int
    layers: int

    @property
    def weight_bytes(self) -> int:
        """Of bfloat16 weights."""
        return 2 * self.counted.total_parameters

    @property
    def layer_parameters(self) -> float:
        """Of one decoder layer; the head is as large as the table, for none of these ties them."""
        return (self.counted.total_parameters - 2 * self.embedding) / self.layers

    def capacity(self, gib: float) -> int:
        """Tokens of cache that fit beside the weights; 0 if these do not fit."""
        return max(0, int((USED * gib * GIB - self.weight_bytes) // self.kv_bytes))

    @property
    def kv_bytes(self) -> int:
        """A token's cache in bfloat16."""
        return self.counted.kv_bytes_per_token

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read by one decode step: all weights once, and every request's cache."""
        read = self.weight_bytes - 2 * self.embedding
        return read + batch * context * self.kv_bytes

    def prefill_flops(self, tokens: int) -> int:
        """Of a prompt: two a weight and token, and attention of every token to those before it."""
        products = 2 * (self.counted.total_parameters - self.embedding) * tokens
        return products + self.counted.mixing_flops * tokens * (tokens + 1) // 2


def scaled(name: str, retain: float) -> Scaled:
    """A model of published sizes with every layer at `retain`, on the meta device."""
    family, fields = MODELS[name]
    config = AutoConfig.for_model(family, **fields)
    if retain < 1:
        config = uniform_config(config, retain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    embedding = model.get_input_embeddings().weight.numel()
    return Scaled(footprint(model), embedding, config.num_hidden_layers)


def serving_rows() -> list[dict[str, Any]]:
    """A row a model and ratio; ratios are of the dense model's over the cut one's."""
    rows = []
    for name in MODELS:
        dense = scaled(name, 1.0)
        for retain in RETAINS:
            model = scaled(name, retain)
            rows.append(
                {
                    "model": name,
                    "retain": retain,
                    "kv_bytes_per_token": model.kv_bytes,
                    "parameters": model.counted.total_parameters,
                    "attention_parameters": model.counted.attention_parameters,
                    "attention_flops": model.counted.attention_flops(CONTEXT),
                    "capacity": {str(gib): model.capacity(gib) for gib in MEMORY},
                    "decode": {
                        str(batch): dense.decode_bytes(batch, CONTEXT)
                        / model.decode_bytes(batch, CONTEXT)
                        for batch in (1, BATCH)
                    },
                    "prefill": dense.prefill_flops(CONTEXT) / model.prefill_flops(CONTEXT),
                }
            )
    return rows


def serving_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As `rap report` reads it; computed figures in brackets."""
    printed = []
    for row in rows:
        held = (f"({tokens:,})" if tokens else "" for tokens in row["capacity"].values())
        ratios = (*row["decode"].values(), row["prefill"])
        printed.append(
            [
                row["model"],
                "dense" if row["retain"] == 1 else f"{row['retain']:g}",
                f"{row['kv_bytes_per_token'] / 1024:.1f}",
                f"{row['parameters'] / 1e9:.2f}",
                f"{row['attention_flops'] / 1e9:.2f}",
                *held,
                *(f"({ratio:.2f})" for ratio in ratios),
            ]
        )
    return {
        "title": "What pruning is worth on larger models",
        "note": (
            "Without brackets: counted on the real classes on the meta device (bfloat16; all "
            "layers at the ratio, in multiples of 8 channels; GFLOPs of attention in a decode "
            f"step at {CONTEXT:,} tokens). In brackets: computed, and nothing here has run on a "
            "GPU. Tokens of cache beside the "
            f"weights in {USED:.0%} of a device's memory; empty where the weights do not fit. "
            "Decode, x: bytes that a step reads (weights and caches), dense over cut, the bound of "
            f"a device that does nothing but read, {CONTEXT:,} tokens a request. Prefill, x: FLOPs "
            f"of a prompt of {CONTEXT:,} tokens, dense over cut."
        ),
        "header": [
            "model",
            "retain",
            "KiB/token",
            "parameters, 1e9",
            "GFLOPs",
            *(f"tokens in {gib} GiB" for gib in MEMORY),
            "decode, x, 1 request",
            f"decode, x, {BATCH} requests",
            "prefill, x",
        ],
        "rows": printed,
    }


def fit_rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds and bytes of the fit by the measured layer's, in proportion to layers' parameters."""
    layer = next(row for row in measured["rows"] if row["shape"] == MEASURED)
    settings = measured["settings"]
    seconds = layer["rest"] + settings["steps"] * layer["step"]
    seconds += settings["num_windows"] * layer["window"]
    base, rows = scaled(MEASURED, 1.0), []
    for name in MODELS:
        model = scaled(name, 1.0)
        share = model.layer_parameters / base.layer_parameters
        products = model.counted.total_parameters - model.embedding
        rows.append(
            {
                "model": name,
                "layer_seconds": seconds * share,
                "layer_bytes": layer["peak"] * share,
                "core_hours": seconds * share * model.layers / 3600,
                "calibration_pflop": 3 * 2 * products * CALIBRATED / 1e15,
            }
        )
    return rows


def fit_table(rows: list[dict[str, Any]], measured: dict[str, Any]) -> dict[str, Any]:
    """As `rap report` reads it; computed figures in brackets."""
    steps, windows = (measured["settings"][name] for name in ("steps", "num_windows"))
    return {
        "title": "What calibration and layer-wise distillation take on larger models",
        "note": (
            f"Computed, all of it, from one layer of {MEASURED}'s shape that `benchmarks/fit.py` "
            f"measured on one core in float32 (its memory without brackets), {steps} steps and "
            f"{windows} windows, in proportion to the parameters of a layer. Calibration: two "
            f"FLOPs a weight and token forwards, four backwards, {CALIBRATED:,} tokens. No GPU has "
            "been tried."
        ),
        "header": [
            "model",
            "s a layer, one core",
            "GiB a layer",
            "hours, one core",
            "calibration, PFLOP",
        ],
        "rows": [
            [
                row["model"],
                f"({row['layer_seconds']:,.0f})",
                f"{row['layer_bytes'] / GIB:.1f}"
                if row["model"] == MEASURED
                else f"({row['layer_bytes'] / GIB:.1f})",
                f"({row['core_hours']:.0f})",
                f"({row['calibration_pflop']:.1f})",
            ]
            for row in rows
        ],
    }


def main() -> None:
    """Count, compute, print both tables, write both result files."""
    measured = json.loads(FIT.read_text(encoding="utf-8"))
    serving, fitting = serving_rows(), fit_rows(measured)
    tables = {
        "scale.json": (serving, serving_table(serving)),
        "scale-fit.json": (fitting, fit_table(fitting, measured)),
    }
    about = provenance()
    for name, (rows, table) in tables.items():
        result = {"rows": rows, "table": table, "provenance": about, "command": about["command"]}
        write_json(HERE / name, result)
        print(markdown_table(table))


if __name__ == "__main__":
    main()
