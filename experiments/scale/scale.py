"""What pruning is worth on models that are larger than any machine here, counted and computed.

    python experiments/scale/scale.py

Published sizes are built on the meta device: no weights, nothing downloaded. Bytes of cache,
parameters and products are counted there, on the real classes, of separate and of merged heads.
What follows from them by arithmetic is written down below. The time of layer-wise distillation is
computed from one layer that `benchmarks/fit.py` measured on a GPU. Writes scale.json (tokens in a
device's memory), scale-decode.json (what a decode step reads and multiplies) and scale-fit.json
beside this file.
"""

import json
import math
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
FIT = HERE.parents[1] / "benchmarks" / "results" / "fit-whole-nvidia-h200.json"
MEASURED = "Llama-3-8B"  # the layer that the fit was measured on
CONTEXT, BATCH = 8192, 32
MEMORY = (16, 24, 80, 160)  # GiB of a device, or of two
USED = 0.9  # of it, for weights and cache together, as engines do by default
GIB = 2**30

_LARGE = PUBLISHED["Llama-3-8B"][1]
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
# Model type and sizes as published.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "llama",
        _LARGE
        | {"hidden_size": 2048, "num_hidden_layers": 16, "head_dim": 64, "intermediate_size": 8192}
        | {"tie_word_embeddings": True},
    ),
    "Mistral-7B": PUBLISHED["Mistral-7B"],
    "Qwen2.5-7B": (
        "qwen2",
        _LARGE
        | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}
        | {"rope_parameters": _ROPE},
    ),
    "Llama-3-8B": PUBLISHED["Llama-3-8B"],
    "Qwen3-8B": (
        "qwen3",
        _LARGE
        | {"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
        | {"rope_parameters": _ROPE},
    ),
    "Llama-3-70B": (
        "llama",
        _LARGE
        | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"intermediate_size": 28672},
    ),
}


@dataclass(frozen=True)
class Variant:
    """A way of pruning, as `uniform_config` takes it; none of it for the dense model."""

    name: str
    retain: float = 1.0
    settings: tuple[tuple[str, Any], ...] = ()


DENSE = Variant("dense")
VARIANTS = tuple(
    Variant(name, retain, settings)
    for retain in (0.7, 0.5)
    for name, settings in (
        ("separate heads", (("merge", 1),)),
        ("merged heads", (("merge", "auto"),)),
        ("merged heads, plain", (("merge", "auto"), ("queries", "absorbed"), ("align", 32))),
    )
)


@dataclass(frozen=True)
class Scaled:
    """A model at a retain ratio: what was counted of it, and its vocabulary's and layers' share.

    `embedding` are parameters of the table of tokens, which no product reads unless it is `tied` to
    the output layer; `layers` decoder layers share all but these two. `heads` are the cached heads.
    """

    counted: Footprint
    embedding: int
    tied: bool
    layers: int
    heads: int

    @property
    def weight_bytes(self) -> int:
        """Of bfloat16 weights."""
        return 2 * self.counted.total_parameters

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied by: all but a table that is only looked up."""
        return self.counted.total_parameters - (0 if self.tied else self.embedding)

    @property
    def layer_parameters(self) -> float:
        """Of one decoder layer."""
        return (self.multiplied - self.embedding) / self.layers

    def capacity(self, gib: float) -> int:
        """Tokens of cache that fit beside the weights; 0 if these do not fit."""
        return max(0, int((USED * gib * GIB - self.weight_bytes) // self.kv_bytes))

    @property
    def kv_bytes(self) -> int:
        """A token's cache in bfloat16."""
        return self.counted.kv_bytes_per_token

    def decode_bytes(self, batch: int, context: int) -> int:
        """Read by one decode step: all weights once, and every request's cache."""
        return 2 * self.multiplied + batch * context * self.kv_bytes

    def prefill_flops(self, tokens: int) -> int:
        """Of a prompt: two a weight and token, and attention of every token to those before it."""
        products = 2 * self.multiplied * tokens
        return products + self.counted.mixing_flops * tokens * (tokens + 1) // 2


def scaled(name: str, variant: Variant = DENSE) -> Scaled | None:
    """A model of published sizes with every layer pruned alike, on the meta device.

    None for merged heads where that cannot be in this form: they are separate heads.
    """
    family, fields = MODELS[name]
    config = AutoConfig.for_model(family, **fields)
    heads, settings = config.num_key_value_heads, dict(variant.settings)
    if variant.retain < 1:
        config = uniform_config(config, variant.retain, **settings)
        heads = config.rap["layers"][0].get("heads", heads)
        if settings["merge"] != 1 and heads == config.num_key_value_heads:
            return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    embedding, tied = model.get_input_embeddings().weight.numel(), config.tie_word_embeddings
    return Scaled(footprint(model), embedding, tied, config.num_hidden_layers, heads)


def break_even(small: Scaled, dense: Scaled) -> int:
    """Tokens of context from which a decode step of one request reads fewer bytes than dense."""
    more = 2 * (small.multiplied - dense.multiplied)
    return max(0, math.ceil(more / (dense.kv_bytes - small.kv_bytes)))


def serving_rows() -> list[dict[str, Any]]:
    """A row a model and variant; ratios are of the pruned model's figure over the dense one's."""
    rows = []
    for name in MODELS:
        dense = scaled(name)
        assert dense is not None
        rows.append(_row(name, DENSE, dense, dense) | {"break_even": None})
        for variant in VARIANTS:
            model = scaled(name, variant)
            if model is not None:
                found = _row(name, variant, model, dense)
                rows.append(found | {"break_even": break_even(model, dense)})
    return rows


def _row(name: str, variant: Variant, model: Scaled, dense: Scaled) -> dict[str, Any]:
    bytes_read = {
        str(batch): model.decode_bytes(batch, CONTEXT) / dense.decode_bytes(batch, CONTEXT)
        for batch in (1, BATCH)
    }
    flops = model.counted.attention_flops(CONTEXT) / dense.counted.attention_flops(CONTEXT)
    return {
        "model": name,
        "heads": variant.name,
        "retain": variant.retain,
        "cached_heads": model.heads,
        "kv_bytes_per_token": model.kv_bytes,
        "parameters": model.counted.total_parameters,
        "attention_parameters": model.counted.attention_parameters,
        "attention_flops": model.counted.attention_flops(CONTEXT),
        "attention_flops_of_dense": flops,
        "capacity": {str(gib): model.capacity(gib) for gib in MEMORY},
        "decode": bytes_read,
        "prefill": model.prefill_flops(CONTEXT) / dense.prefill_flops(CONTEXT),
    }


def _named(row: dict[str, Any]) -> list[str]:
    retain = "" if row["retain"] == 1 else f"{row['retain']:g}"
    return [row["model"], row["heads"], retain]


NAMES = ["model", "heads", "retain"]


def capacity_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens of cache in a device's memory, as `rap report` reads it."""
    return {
        "title": "How many tokens fit beside the weights of larger models",
        "note": (
            "Bytes of cache and parameters: counted on the real classes on the meta device, "
            "bfloat16, all layers alike, widths in multiples of 8 channels, or 32 of a plain "
            "checkpoint. Tokens: computed, for "
            f"weights and cache in {USED:.0%} of a device's memory; empty where the weights do not "
            "fit. Merged heads are those of method `rap`, plain ones those of `--target plain`."
        ),
        "header": [
            *NAMES,
            "KV heads",
            "cache, KiB/token",
            "parameters, 1e9",
            *(f"tokens in {gib} GiB" for gib in MEMORY),
        ],
        "rows": [
            [
                *_named(row),
                str(row["cached_heads"]),
                f"{row['kv_bytes_per_token'] / 1024:.1f}",
                f"{row['parameters'] / 1e9:.2f}",
                *(f"{tokens:,}" if tokens else "" for tokens in row["capacity"].values()),
            ]
            for row in rows
        ],
    }


def decode_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes and FLOPs of decode and prefill, as `rap report` reads it."""
    return {
        "title": "What a decode step of larger models reads and multiplies",
        "note": (
            f"Percent of dense, at {CONTEXT:,} tokens a request. Attention FLOPs of a decode step: "
            "counted. Bytes read: computed, weights and caches, which bound a device that does "
            "nothing but read. Break-even: the context from which a step of one request reads "
            f"fewer bytes than dense. Prefill: FLOPs of a prompt of {CONTEXT:,} tokens."
        ),
        "header": [
            *NAMES,
            "attention FLOPs",
            "bytes read, 1 request",
            f"bytes read, {BATCH} requests",
            "break-even, tokens",
            "prefill FLOPs",
        ],
        "rows": [
            [
                *_named(row),
                f"{row['attention_flops_of_dense']:.0%}",
                *(f"{share:.0%}" for share in row["decode"].values()),
                f"{row['break_even']:,}",
                f"{row['prefill']:.0%}",
            ]
            for row in rows
            if row["retain"] < 1
        ],
    }


def fit_rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Time and memory by the measured layer's, in proportion to layers' parameters."""
    layer = next(row for row in measured["rows"] if row["shape"] == MEASURED)
    base, rows = scaled(MEASURED), []
    for name in MODELS:
        model = scaled(name)
        assert model is not None
        assert base is not None
        share = model.layer_parameters / base.layer_parameters
        seconds = layer["seconds"] / layer["layers"] * share
        rows.append(
            {
                "model": name,
                "layers": model.layers,
                "layer_seconds": seconds,
                "layer_bytes": layer["peak"] * share,
                "minutes": seconds * model.layers / 60,
            }
        )
    return rows


def fit_table(rows: list[dict[str, Any]], measured: dict[str, Any]) -> dict[str, Any]:
    """Time of layer-wise distillation, as `rap report` reads it."""
    about = next(row for row in measured["rows"] if row["shape"] == MEASURED)["settings"]
    tokens = about["steps"] * about["batch"] * about["window"]
    return {
        "title": "What layer-wise distillation takes on larger models",
        "note": (
            f"One layer of {MEASURED}'s shape was measured on an {measured['provenance']['device']}"
            f" (`{measured['command']}`), {tokens:,} tokens in training. The others are computed "
            "in proportion to the parameters of a layer."
        ),
        "header": ["model", "layers", "seconds per layer", "GiB for a layer", "minutes"],
        "rows": [
            [
                row["model"],
                str(row["layers"]),
                f"{row['layer_seconds']:.1f}",
                f"{row['layer_bytes'] / GIB:.1f}",
                f"{row['minutes']:.1f}",
            ]
            for row in rows
        ],
    }


def main() -> None:
    """Count, compute, print all tables, write all result files."""
    measured = json.loads(FIT.read_text(encoding="utf-8"))
    serving, fitting = serving_rows(), fit_rows(measured)
    tables = {
        "scale.json": (serving, capacity_table(serving)),
        "scale-decode.json": (serving, decode_table(serving)),
        "scale-fit.json": (fitting, fit_table(fitting, measured)),
    }
    about = provenance()
    for name, (rows, table) in tables.items():
        result = {"rows": rows, "table": table, "provenance": about, "command": about["command"]}
        write_json(HERE / name, result)
        print(markdown_table(table))


if __name__ == "__main__":
    main()
