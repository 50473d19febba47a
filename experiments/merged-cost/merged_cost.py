"""What merging heads costs beside the cache: parameters, bytes and products, by formula and count.

    python experiments/merged-cost/merged_cost.py

For the attention of four published shapes, groups of g KV heads (1: per head), two retain ratios
and both forms of queries. Every formula is held against a layer built on the meta device, whose
parameters, cache and products are counted. Writes merged_cost.json beside this file.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cost"))

from formulas import Cost, Sizes, count, dense, merged

from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.model.cache_layout import FactoredEntry, PairEntry
from rap.model.modeling import CONFIG_VERSION, config_class, model_class
from rap.planning.merging import WIDEST

# Query heads, KV heads, head dim and model dim of one layer, and the number of layers.
SHAPES = {
    "SmolLM2-135M": (Sizes(9, 3, 64, 576), 30),
    "Llama-3.2-1B": (Sizes(32, 8, 64, 2048), 16),
    "Llama-3-8B": (Sizes(32, 8, 128, 4096), 32),
    "Qwen2.5-7B": (Sizes(28, 4, 128, 3584), 28),
}
RETAINS = (0.7, 0.5)
CONTEXTS = (512, 4096, 32768)
BYTES = 2  # bfloat16 weights and cache
ALIGN = 8
TOKENS = 16


def groups(heads: int) -> list[int]:
    """1, 2, 4 and all of the KV heads, where they divide them."""
    return sorted({g for g in (1, 2, 4, heads) if heads % g == 0})


def built(sizes: Sizes, merge: int, width: int, *, factored: bool) -> Any:
    """A Llama of one layer of these sizes on the meta device."""
    heads = sizes.num_kv_heads // merge if merge > 1 else None
    kind, maps = (FactoredEntry, {"outputs": True}) if factored else (PairEntry, {})
    entry: Any = kind(width // 2, 0, width, heads=heads, **maps)
    config = config_class("llama")(
        hidden_size=sizes.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=64,
        vocab_size=64,
        rap={"version": CONFIG_VERSION, "layers": [entry.fields()]},
        dtype="float16",
    )
    with torch.device("meta"):
        return model_class("llama")(config).to(torch.float16).eval()


def checked(cost: Cost, model: Any) -> None:
    """Raise AssertionError unless a formula gives what is counted."""
    found = count(model, tokens=TOKENS, context=CONTEXTS[0])
    assert found.cache == cost.cache, (found, cost)
    assert found.weights == cost.weights, (found, cost)
    assert found.forward_flops == cost.forward_flops(TOKENS), (found, cost)
    assert found.decode_flops == cost.decode_flops(CONTEXTS[0]), (found, cost)


def bytes_read(cost: Cost, context: int) -> int:
    """Bytes of weights and cache that one decode step of a layer reads, one sequence."""
    return BYTES * (cost.weights + cost.cache * context)


def crossing(cost: Cost, whole: Cost, quantity: str) -> float | None:
    """Tokens of context from which on a decode step costs less than dense; None for never."""
    if quantity == "bytes":
        more, saved = cost.weights - whole.weights, whole.cache - cost.cache
    else:
        more = cost.weights + cost.repeated - whole.weights
        saved = whole.mixing - cost.mixing
    if saved <= 0:
        return 0.0 if more < 0 and saved == 0 else None
    return max(0.0, more / saved)


def row(name: str, merge: int, retain: float, *, factored: bool) -> dict[str, Any] | None:
    """One line of the table; None for heads wider than kernels take."""
    sizes, layers = SHAPES[name]
    width = max(ALIGN, round(retain * merge * sizes.head_dim / ALIGN) * ALIGN)
    if width > max(WIDEST, sizes.head_dim):
        return None
    cost, whole = merged(sizes, merge, width, factored=factored), dense(sizes)
    checked(cost, built(sizes, merge, width, factored=factored))
    return {
        "shape": name,
        "merge": merge,
        "retain": retain,
        "queries": "factored" if factored else "absorbed",
        "cached heads": sizes.num_kv_heads // merge,
        "head width": width,
        "cache": cost.cache / whole.cache,
        "attention parameters": cost.weights / whole.weights,
        **{f"bytes at {s}": bytes_read(cost, s) / bytes_read(whole, s) for s in CONTEXTS},
        **{f"products at {s}": cost.decode_flops(s) / whole.decode_flops(s) for s in CONTEXTS},
        "fewer bytes from": crossing(cost, whole, "bytes"),
        "fewer products from": crossing(cost, whole, "products"),
        "layers": layers,
    }


def main() -> None:
    """Every row that is possible, to JSON."""
    rows = [
        found
        for name, (sizes, _) in SHAPES.items()
        for retain in RETAINS
        for merge in groups(sizes.num_kv_heads)
        for factored in ((False,) if merge == 1 else (False, True))
        if (found := row(name, merge, retain, factored=factored)) is not None
    ]
    shapes = {name: {**asdict(sizes), "layers": n} for name, (sizes, n) in SHAPES.items()}
    result = {
        "command": "python experiments/merged-cost/merged_cost.py",
        "shapes": shapes,
        "rows": rows,
        "provenance": provenance(),
    }
    write_json(Path(__file__).with_name("merged_cost.json"), result)
    for found in rows:
        print({k: round(x, 3) if isinstance(x, float) else x for k, x in found.items()})


if __name__ == "__main__":
    main()
