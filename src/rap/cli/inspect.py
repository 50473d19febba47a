"""`rap inspect`: what a model has to prune, layer by layer, or what a plan decided."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from ..checkpoint import PLAN_FILE, is_pruned, load_config
from ..errors import RapError
from ..families import AttentionLayer, attention_layers, attention_spec, rotary_module
from ..pipeline import resolve_source
from ..plan import Plan
from ..rope import read_frequencies
from . import options
from .options import print_json, print_table


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("inspect")(inspect_command)


def inspect_command(
    target: Annotated[str, typer.Argument(help="A model, or the word 'plan'.")],
    path: Annotated[Path | None, typer.Argument(help="Plan file, after the word 'plan'.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show a model's layers (RoPE, heads, eligible or why not, KV bytes), or a plan."""
    if target == "plan":
        if path is None:
            raise RapError("name the plan file: rap inspect plan FILE")
        report = describe_plan(Plan.load(path / PLAN_FILE if path.is_dir() else path))
    elif path is not None:
        raise RapError(f"one target at a time: what is {path}? (plans: rap inspect plan FILE)")
    else:
        report = describe_model(target)
    if as_json:
        print_json(report)
        return
    header = [name for name in report["layers"][0] if name != "reason"]
    rows = [_cells(layer, header) for layer in report["layers"]]
    print_table(report["title"], [name.replace("_", " ") for name in header], rows)


def describe_model(target: str) -> dict[str, Any]:
    """Every layer of a checkpoint, from its config alone: no weight is read."""
    config = load_config(resolve_source(target))
    attention_spec(config)
    # A config of a pruned model states widths; of a dense one, the same numbers follow from it.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    element = (config.dtype or torch.float32).itemsize
    rope = _rope(config)
    layers = [_describe_layer(layer, rope, element) for layer in attention_layers(model)]
    total = sum(layer["kv_bytes_per_token"] for layer in layers)
    dense = sum(layer["dense_kv_bytes_per_token"] for layer in layers)
    state = f"pruned to {total / dense:.1%}" if is_pruned(config) else "dense"
    return {
        "title": f"{target}: {config.model_type}, {state}, {total:,} KV bytes per token",
        "model_type": config.model_type,
        "rope": rope,
        "num_pairs": _num_pairs(model),
        "kv_bytes_per_token": total,
        "dense_kv_bytes_per_token": dense,
        "layers": layers,
    }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """What a plan keeps, layer by layer, with the kept pairs of every head as ranges."""
    rows = []
    for index, (layer, shape) in enumerate(zip(plan.layers, plan.shapes, strict=True)):
        if layer is None or shape is None:
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
        "layers": rows,
    }


def ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2 5"."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return " ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _describe_layer(layer: AttentionLayer, rope: str, element: int) -> dict[str, Any]:
    shape, module = layer.shape, layer.module
    if shape is None:
        blank = {"layer": layer.index, "rope": "-", "heads": "-", "head_dim": "-"}
        return {
            **blank,
            "rotates": "-",
            "eligible": f"no: {layer.reason}",
            "kv_bytes_per_token": 0,
            "dense_kv_bytes_per_token": 0,
        }
    key = getattr(module, "key_width", shape.head_dim)
    value = getattr(module, "value_width", shape.head_dim)
    return {
        "layer": layer.index,
        "rope": rope if shape.geometry.num_pairs else "none",
        "heads": f"{shape.num_heads}/{shape.num_kv_heads}",
        "head_dim": shape.head_dim if key == shape.head_dim else f"{key} of {shape.head_dim}",
        "rotates": f"{shape.geometry.rotary_dim} ({shape.geometry.pairing})",
        "eligible": "yes" if not hasattr(module, "key_width") else "pruned",
        "kv_bytes_per_token": shape.num_kv_heads * (key + value) * element,
        "dense_kv_bytes_per_token": 2 * shape.num_kv_heads * shape.head_dim * element,
    }


def _rope(config: Any) -> str:
    parameters = config.rope_parameters or {}
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    return f"{kind}, theta {theta:g}" if theta else str(kind)


def _num_pairs(model: Any) -> int:
    rotary: Any = rotary_module(model)
    frequencies = rotary.inv_freq if rotary.inv_freq.is_meta else read_frequencies(rotary)
    return int(frequencies.shape[-1])


def _cells(layer: dict[str, Any], header: list[str]) -> list[str]:
    return [f"{layer[n]:,}" if isinstance(layer[n], int) else str(layer[n]) for n in header]
