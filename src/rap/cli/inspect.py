"""`rap inspect`: what a model has to prune, layer by layer, or what a plan decided."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedConfig

from ..calibration.kv_sharing import joined_shapes
from ..checkpoint.load import is_pruned, load_config, without_tensors
from ..evaluation.cost.footprint import cached_channels
from ..methods import Rap
from ..methods.base import aligned
from ..methods.dense import key_mixing_limit, merge_limit, value_mixing_limit
from ..methods.merged import merged_budget, most_merged
from ..model.errors import RapError
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    attention_window,
    check_dense,
    text_config,
    windowed_layers,
)
from ..model.rope import AttentionShape
from ..planning.budgets import kv_budgets
from ..planning.plan import PairPlan, Plan, ranges
from ..planning.scores import equal_scores
from . import options
from .options import print_json, print_table

NOTES = ("merging", "key_limit", "value_limit")


def inspect_command(
    target: Annotated[str, typer.Argument(help="A model, or the word 'plan'.")],
    path: Annotated[Path | None, typer.Argument(help="Plan file, after the word 'plan'.")] = None,
    retain: Annotated[
        float | None,
        typer.Option(
            help="Also show the cache of a model at this ratio, with equal head dimensions.",
            show_default="0.7",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show a model's layers (RoPE, heads, eligible or why not, KV bytes), or a plan.

    Layers that are alike share a row; --json has one entry a layer.
    """
    if target == "plan":
        if path is None:
            raise RapError("name the plan file: rap inspect plan FILE")
        if retain is not None:
            raise RapError("a plan has its own ratio: leave out --retain")
        report = describe_plan(Plan.load(path))
    elif path is not None:
        raise RapError(f"one target at a time: what is {path}? (plans: rap inspect plan FILE)")
    else:
        report = describe_model(target) if retain is None else describe_model(target, retain)
    if as_json:
        print_json(report)
        return
    header = [name for name in report["layers"][0] if name not in NOTES]
    rows = alike(report["layers"])
    each = " each" if len(rows) < len(report["layers"]) else ""
    names = [name.replace("_", " ") + (each if "bytes" in name else "") for name in header]
    print_table(report["title"], names, [_cells(row, header) for row in rows])
    for line in report.get("attention", ()):
        typer.echo(line)
    for note in _notes(report["layers"]):
        typer.echo(note)
    if target != "plan":
        size = f"{report['kv_bytes_per_token_at_retain']:,} KV bytes per token"
        typer.echo(f"at retain {report['retain']:g}, with equal widths in all layers: {size}")
        if report["windowed_layers"]:
            typer.echo(_windows(report))


def _windows(report: dict[str, Any]) -> str:
    """What the bytes per token leave out, and how it can be pruned as well."""
    held = f"{report['window']:,} tokens, {report['windowed_kv_bytes']:,} bytes in all"
    said = f"layers {ranges(report['windowed_layers'])} cache a sliding window of {held}"
    dense = report["kv_bytes_per_token"] == report["dense_kv_bytes_per_token"]
    return f"{said}; they stay dense without --layers all" if dense else said


def describe_model(target: str, retain: float = 0.7) -> dict[str, Any]:
    """Every layer of a checkpoint, from its config alone: no weight is read.

    Of a multimodal checkpoint, its text model. `retain` is the budget of the projected cache size,
    which has equal widths in all layers.
    """
    return describe_config(load_config(target), target, retain)


def describe_config(config: Any, target: str, retain: float = 0.7) -> dict[str, Any]:
    """As `describe_model`, of a config."""
    if not is_pruned(config):
        check_dense(config)
    attention_spec(config)
    text = text_config(config)
    # Read first: building a model writes the dtype it was built in.
    element = (config.dtype or text.dtype or torch.float32).itemsize
    # A config of a pruned model states widths; of a dense one, the same numbers follow from it.
    model = without_tensors(config)
    attentions = attention_layers(model)
    # Merged heads are fewer, and some attentions cache something else than keys and values.
    cached = cached_channels(model) if is_pruned(config) else None
    merging = _merging(attentions, config, retain)
    layers = [
        _describe_layer(layer, config, element, cached, *found)
        for layer, found in zip(attentions, merging, strict=True)
    ]
    every = [layer.shape for layer in attentions]
    joint = joined_shapes(every)
    shapes = [shape for shape in joint if shape is not None]
    windowed, window = windowed_layers(config), attention_window(config)
    growing = [index for index in range(len(layers)) if index not in windowed]
    total = sum(layers[index]["kv_bytes_per_token"] for index in growing)
    dense = sum(layers[index]["dense_kv_bytes_per_token"] for index in growing)
    counted = [(x, merging[index][0]) for index in growing if (x := joint[index]) is not None]
    state = f"pruned to {total / dense:.1%}" if is_pruned(config) else "dense"
    rotating = [shape for shape in shapes if shape.geometry.num_pairs]
    rotated = sorted({f"{s.geometry.rotary_dim}/{s.head_dim}" for s in rotating})
    return {
        "title": f"{target}: {config.model_type}, {state}, {total:,} KV bytes per token",
        "model_type": config.model_type,
        "rope": ", ".join(dict.fromkeys(_rope(text, layer) for layer in attentions if layer.shape)),
        "num_pairs": max((shape.geometry.num_pairs for shape in shapes), default=0),
        "num_layers": len(layers),
        "attention_layers": sum(shape is not None for shape in every),
        "rope_layers": sum(shape is not None and shape.geometry.num_pairs > 0 for shape in every),
        "rotated_dims_per_head": ", ".join(rotated),
        "kv_bytes_per_token": total,
        "dense_kv_bytes_per_token": dense,
        "retain": retain,
        "kv_bytes_per_token_at_retain": _projected_bytes(counted, retain, element),
        "window": window,
        "windowed_layers": sorted(windowed),
        "windowed_kv_bytes": (window or 0)
        * sum(layers[index]["kv_bytes_per_token"] for index in windowed),
        "layers": layers,
    }


def _projected_bytes(layers: list[tuple[AttentionShape, int]], retain: float, element: int) -> int:
    """KV bytes per token of equal budgets in every layer, in the default alignment.

    A layer is its shape, and how many of its KV heads are merged into one.
    """
    shapes = [shape for shape, _ in layers]
    align = Rap(retain=retain).alignment(shapes)
    budgets = kv_budgets(list(map(equal_scores, shapes)), retain, budget="uniform", align=align)
    total = 0
    for (shape, merge), alone in zip(layers, budgets, strict=True):
        kept = merged_budget(retain, merge, shape, max(1, align // 2)) if merge > 1 else alone
        if kept is not None:
            width = 2 * kept.pairs + kept.free + kept.values
            total += shape.num_kv_heads // merge * width
    return total * element


def describe_plan(plan: Plan) -> dict[str, Any]:
    """What a plan keeps, layer by layer, with the kept pairs of every head as ranges."""
    return {
        "title": (
            f"Plan for {plan.model_type} ({plan.dense_fingerprint[:12]}): asked {plan.retain}, "
            f"keeps {plan.kept_fraction:.4f}; {plan.method}"
        ),
        "model_type": plan.model_type,
        "dense_fingerprint": plan.dense_fingerprint,
        "retain": plan.retain,
        "kept_fraction": plan.kept_fraction,
        "method": plan.method,
        "attention": plan.about(),
        "layers": _kept_rows(plan) if _is_of_pairs(plan) else _sizes_by_layer(plan),
    }


def _is_of_pairs(plan: Plan) -> bool:
    return all(layer is None or isinstance(layer, PairPlan) for layer in plan.layers)


def _sizes_by_layer(plan: Plan) -> list[dict[str, Any]]:
    """The sizes of every layer's new attention, and what its cache holds of a token."""
    rows = []
    for index, (layer, cache) in enumerate(zip(plan.layers, plan.caches, strict=True)):
        fields = {} if layer is None else layer.entry(plan.qk_norm).fields()
        kind = fields.pop("kind", "dense" if layer is None else "narrow heads")
        shown = ", ".join(f"{k} {v}" for k, v in fields.items() if k != "frequencies")
        cached = "-" if layer is None or cache is None else cache.elements
        rows.append({"layer": index, "attention": kind, "sizes": shown, "cached_elements": cached})
    return rows


def _kept_rows(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for index, (layer, shape) in enumerate(zip(plan.layers, plan.shapes, strict=True)):
        if not isinstance(layer, PairPlan) or shape is None:
            rows.append({"layer": index, "keys": "dense", "values": "dense", "kept_pairs": ""})
            continue
        heads = [ranges(head) for head in layer.frequency_GM.tolist()]
        rows.append(
            {
                "layer": index,
                "keys": f"{layer.key_width}/{shape.head_dim}",
                "values": f"{layer.value_width}/{shape.head_dim}",
                "kept_pairs": "\n".join(f"head {g}: {text}" for g, text in enumerate(heads)),
            }
        )
    return rows


def alike(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all layers that differ in their number alone, or in which pairs they keep.

    Rows are in the order of their first layers. What is printed as a note tells no rows apart.
    """
    apart = ("layer", "kept_pairs", *NOTES)
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for layer in layers:
        key = tuple(f"{name}={value}" for name, value in layer.items() if name not in apart)
        groups.setdefault(key, []).append(layer)
    rows = []
    for group in groups.values():
        row = {**group[0], "layer": ranges([layer["layer"] for layer in group])}
        if "kept_pairs" in row:
            row["kept_pairs"] = _pairs_of_all([layer["kept_pairs"] for layer in group])
        rows.append(row)
    return rows


def _pairs_of_all(texts: list[str]) -> str:
    """The kept pairs of one layer as they are; of several, what all and only some heads keep."""
    if len(set(texts)) == 1:
        return texts[0]
    heads = [_indices(line.partition(": ")[2]) for text in texts for line in text.splitlines()]
    shared = set.intersection(*heads)
    others = sorted(set.union(*heads) - shared)
    return f"every head: {ranges(sorted(shared)) or '-'}\nsome heads: {ranges(others) or '-'}"


def _indices(text: str) -> set[int]:
    """What `ranges` wrote, as a set."""
    spans = [[int(end) for end in part.split("-")] for part in text.split()]
    return {index for span in spans for index in range(span[0], span[-1] + 1)}


def _merging(
    layers: list[AttentionLayer], config: PreTrainedConfig, retain: float
) -> list[tuple[int, str]]:
    """How many KV heads of every layer method `rap` makes one, and what to say of it."""
    found = []
    for layer in layers:
        shape, limit = layer.shape, merge_limit(layer, layers, config, mapped=True)
        if shape is None or layer.pruned:
            found.append((1, ""))
            continue
        heads = shape.num_kv_heads
        unit = max(1, aligned(None, [shape]) // 2)
        merged = 1 if limit else most_merged(heads, shape.head_dim, retain, unit=unit)
        alone = limit and f"heads are not merged: {limit}"
        become = f"{heads} KV heads become {heads // merged} at retain {retain:g}"
        found.append((merged, alone if merged == 1 else become))
    return found


def _describe_layer(
    layer: AttentionLayer,
    config: PreTrainedConfig,
    element: int,
    cached: list[int] | None,
    merged: int,
    merging: str,
) -> dict[str, Any]:
    shape, module = layer.shape, layer.module
    if shape is None:
        blank = dict.fromkeys(("rope", "heads", "head_dim", "rotates", "qk_norm"), "-")
        return {
            "layer": layer.index,
            **blank,
            "eligible": f"no: {layer.reason}",
            "kv_bytes_per_token": 0,
            "dense_kv_bytes_per_token": 0,
        }
    mapped = merged > 1  # then maps stand behind norms and before gates
    keys = key_mixing_limit(layer, config, mapped=mapped)
    values = value_mixing_limit(config, mapped=mapped)
    rope = _rope(text_config(config), layer)
    eligible = "yes" if shape.source is None else f"with layer {shape.source}"
    key = getattr(module, "key_width", shape.head_dim)
    value = getattr(module, "value_width", shape.head_dim)
    return {
        "layer": layer.index,
        "rope": rope if shape.geometry.num_pairs else "none",
        "heads": f"{shape.num_heads}/{shape.num_kv_heads}",
        "head_dim": shape.head_dim if key == shape.head_dim else f"{key} of {shape.head_dim}",
        "rotates": f"{shape.geometry.rotary_dim} ({shape.geometry.pairing})",
        "qk_norm": _norm(layer),
        "merging": merging,
        "key_limit": keys and f"keys keep plain pairs and channels: {keys}",
        "value_limit": values and f"values keep plain channels: {values}",
        "eligible": "pruned" if layer.pruned else eligible,
        "kv_bytes_per_token": element
        * (cached[layer.index] if cached else shape.num_cached_heads * (key + value)),
        "dense_kv_bytes_per_token": 2 * shape.num_cached_heads * shape.head_dim * element,
    }


def _norm(layer: AttentionLayer) -> str:
    if layer.norm is None:
        return "-"
    over = "head" if layer.norm.over == "head" else "all heads"
    module: Any = layer.module
    exact = getattr(module, "exact_norm", None)
    if exact is None:
        return f"over {over}"
    rows = module.norm_rows
    return f"over {over}, {'exact' if exact else f'{rows} rows' if rows else 'constant'}"


def _rope(config: PreTrainedConfig, layer: AttentionLayer) -> str:
    parameters = config.rope_parameters or {}
    kind = getattr(config, "layer_types", None) or []
    if kind and isinstance(parameters.get(kind[layer.index]), dict):
        parameters = parameters[kind[layer.index]]
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    return f"{kind}, theta {theta:g}" if theta else str(kind)


def _notes(layers: list[dict[str, Any]]) -> list[str]:
    """What the table has no column for: each note once, after the layers it is about."""
    places: dict[str, list[int]] = {}
    for layer in layers:
        for text in filter(None, (layer.get(name) for name in NOTES)):
            places.setdefault(text, []).append(layer["layer"])
    return [f"layers {ranges(where)}: {text}" for text, where in places.items()]


def _cells(layer: dict[str, Any], header: list[str]) -> list[str]:
    return [f"{layer[n]:,}" if isinstance(layer[n], int) else str(layer[n]) for n in header]
