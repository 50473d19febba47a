"""The tables of composition.py, from what it measured."""

import math
from typing import Any

from rap.evaluation.cache.presses import PRESSES
from rap.evaluation.cache.quantized_cache import CACHE_KINDS
from rap.evaluation.quantization import KINDS

Cell = dict[str, Any]
Table = dict[str, Any]


def tables(found: dict[str, Any], settings: dict[str, Any]) -> list[Table]:
    """All tables of the models measured so far."""
    if not found["measured"]:
        return []
    cells = sorted(found["measured"], key=_place)
    bits = [f"cache {kind}" for kind in CACHE_KINDS if f"cache {kind}" in cells[0]["cache"]]
    named = [f"{name}:0.5" for name in PRESSES]
    presses = [axis for axis in named if axis in cells[0]["cache"]]
    left_out = [name for name in settings if settings[name] is None]
    missing = f" Left out, not installed: {', '.join(left_out)}." if left_out else ""
    made = [_weights(cells, settings, missing), _penalty(cells)]
    if bits:
        made.append(_cache("Pruning with a quantized cache", cells, bits, _BITS, settings))
    if presses:
        made.append(_cache("Pruning with evicted tokens", cells, presses, _EVICTED, settings))
    if bits or presses:
        made.append(_bytes(cells, [*bits, *presses[:1]]))
    if found["think"]:
        made.append(_think(cells, found["think"]))
    return made


_BITS = (
    "Every number of the prefix in so many bits, a scale per 64 values, or per largest divisor of "
    "a width that is less. The newest 128 tokens stay as they are."
)
_EVICTED = "Half of the prefix's tokens leave every head's cache, chosen by kvpress's scores."


def _place(cell: Cell) -> tuple[bool, bool, str, float]:
    """Dense, then what was only cut, then what was recovered."""
    return cell["recipe"] != "dense", cell["recover"] != "none", cell["recipe"], -cell["retain"]


def _name(cell: Cell) -> str:
    if cell["recipe"] == "dense":
        return "dense"
    recovered = "" if cell["recover"] == "none" else f" + KD {cell['recover']}"
    return f"{cell['recipe']} {cell['retain']:g}{recovered}"


def _weights(cells: list[Cell], settings: dict[str, Any], missing: str) -> Table:
    kinds = _kinds(cells)
    return {
        "title": "Pruning with quantized weights",
        "note": (
            f"Bundled model, perplexity over {settings['windows']} windows of 512 tokens. "
            "rtn4-tensor is the paper's quantizer: round to nearest, 4 bits, one scale a tensor. "
            "int8 and int4 are torchao's, one scale a row and one per 32 values; nf4 is "
            f"bitsandbytes's, one scale per 64.{missing}"
        ),
        "header": ["model", *kinds],
        "rows": [
            [_name(cell), *(f"{cell['weights'][kind]:.2f}" for kind in kinds)] for cell in cells
        ],
    }


def _kinds(cells: list[Cell]) -> list[str]:
    """The kinds of weights that were measured; a file read back has lost their order."""
    return [kind for kind in ("float32", *KINDS) if kind in cells[0]["weights"]]


def _penalty(cells: list[Cell]) -> Table:
    kinds = _kinds(cells)[1:]
    return {
        "title": "What quantized weights add to the loss, before and after recovery",
        "note": (
            "Nats per token over the same model in float32. The costs stack if the figure of a cut "
            "model is the dense one, and composition depends on the recovery if it falls after it."
        ),
        "header": ["model", *kinds],
        "rows": [
            [
                _name(cell),
                *(
                    f"{math.log(cell['weights'][kind] / cell['weights']['float32']):.4f}"
                    for kind in kinds
                ),
            ]
            for cell in cells
        ],
    }


def _cache(
    title: str, cells: list[Cell], axes: list[str], what: str, settings: dict[str, Any]
) -> Table:
    return {
        "title": title,
        "note": (
            f"{what} Perplexity of tokens 258 to 512 of {settings['windows']} windows, read in "
            "pieces of 32 after the cache of the first 256 was compressed; behind it the recall of "
            f"one of 4 facts 256 tokens back, of {settings['documents']} questions asked after the "
            "compression."
        ),
        "header": ["model", "cache as it is", *(axis.removeprefix("cache ") for axis in axes)],
        "rows": [
            [_name(cell), *(_quality(cell["cache"][axis]) for axis in ("nothing", *axes))]
            for cell in cells
        ],
    }


def _quality(measured: Cell) -> str:
    return f"{measured['perplexity']:.2f} ({measured['recall']:.0%})"


def _bytes(cells: list[Cell], axes: list[str]) -> Table:
    return {
        "title": "Bytes of cache per token read, in bfloat16",
        "note": (
            "Counted on all tensors that the cache holds: after the prefix of 256 tokens, and at "
            "the end of the window of 512, whose newest tokens are neither quantized nor evicted. "
            "Every press at 0.5 leaves as much as the one shown."
        ),
        "header": ["model", "cache as it is", *(axis.removeprefix("cache ") for axis in axes)],
        "rows": [
            [_name(cell), *(_held(cell["cache"][axis]) for axis in ("nothing", *axes))]
            for cell in cells
            if cell["recover"] == "none"
        ],
    }


def _held(measured: Cell) -> str:
    return f"{measured['prefix_bytes_per_token']:,.0f} / {measured['kv_bytes_per_token']:,.0f}"


def _think(cells: list[Cell], think: dict[str, Cell]) -> Table:
    dense = cells[0]
    whole = dense["cache"]["nothing"]["kv_bytes_per_token"]
    rows = [["dense", "1", *_costs(dense, dense["cache"]["nothing"], whole)]]
    for retain, measured in sorted(think.items(), reverse=True):
        rows.append([f"ThinK {retain}", retain, *_costs(dense, measured, whole)])
        rows += [
            [_name(cell), retain, *_costs(cell, cell["cache"]["nothing"], whole)]
            for cell in cells
            if f"{cell['retain']:g}" == retain
        ]
    return {
        "title": "ThinK and pruned weights, at the same share of the cache",
        "note": (
            "ThinK ranks the channels of the keys in the prefix by the queries of its last 32 "
            "tokens. kvpress zeroes them, so nothing shrinks; the share is what a cache that left "
            "them out would hold of the prefix. Keys are half of the cache: at 0.5 none would be "
            "left. Perplexity and recall as with a compressed cache; parameters and FLOPs of "
            "attention at 512 tokens."
        ),
        "header": [
            "model",
            "share meant",
            "cache held",
            "parameters",
            "FLOPs",
            "reconstructs",
            "perplexity",
            "recall",
        ],
        "rows": rows,
    }


def _costs(model: Cell, measured: Cell, whole: float) -> list[str]:
    return [
        f"{measured['kv_bytes_per_token'] / whole:.3f}",
        f"{model['parameter_share']:.3f}",
        f"{model['flops_share']:.3f}",
        "yes" if model["reconstructs"] else "no",
        f"{measured['perplexity']:.2f}",
        f"{measured['recall']:.0%}",
    ]
