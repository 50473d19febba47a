"""Random plans, and the dense model a plan describes with what it drops zeroed by hand.

The zeroing knows nothing of the package: loops over heads, pairs and rows of stock modules, so that
a mistake in the package's own index arithmetic cannot appear on both sides of a comparison.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from rap.model.fingerprint import fingerprint_model
from rap.model.layers import attention_layers, base_model_type
from rap.planning.plan import PairPlan, Plan

Widths = tuple[int, int] | None


def random_plan(model: Any, widths: Sequence[Widths], *, seed: int = 0) -> Plan:
    """A plain plan keeping (pairs, value channels) of every layer, None to leave one dense.

    Every KV head keeps pairs and channels of its own; all non-rotating key channels are kept. A
    layer that reads the keys and values of another keeps what that one does.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[PairPlan | None] = []
    shapes = [layer.shape for layer in attention_layers(model)]
    for shape, kept in zip(shapes, widths, strict=True):
        if shape.source is not None:
            layers.append(layers[shape.source])
            continue
        if kept is None:
            layers.append(None)
            continue
        heads, geometry = range(shape.num_kv_heads), shape.geometry
        layers.append(
            PairPlan.of_indices(
                pairs=[_choose(geometry.num_pairs, kept[0], generator) for _ in heads],
                channels=[_choose(geometry.head_dim, kept[1], generator) for _ in heads],
                free=[list(range(geometry.num_free)) for _ in heads],
            )
        )
    return plan_of(model, layers)


def plan_of(model: Any, layers: Sequence[PairPlan | None]) -> Plan:
    """A plan of those layers for this very model."""
    return Plan(
        layers=tuple(layers),
        shapes=tuple(layer.shape for layer in attention_layers(model)),
        model_type=base_model_type(model.config),
        retain=0.5,
        dense_fingerprint=fingerprint_model(model),
        method={"name": "random"},
    )


@torch.no_grad()
def zeroed(model: Any, plan: Plan, *, interleaved: bool = False) -> Any:
    """A copy of a dense model whose dropped pairs of q and k and channels of v are zero."""
    model = copy.deepcopy(model)
    rotary_dim = 2 * model.model.rotary_emb.inv_freq.numel()
    for layer, planned in zip(model.model.layers, plan.layers, strict=True):
        if planned is None:
            continue
        attention = layer.self_attn
        dim, queries_per_kv = attention.head_dim, attention.num_key_value_groups
        for head in range(attention.k_proj.out_features // dim):
            for pair in set(range(rotary_dim // 2)) - set(planned.frequency_GM[head].tolist()):
                members = (
                    (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
                )
                for channel in members:
                    _zero_row(attention.k_proj, head * dim + channel)
                    for query in range(head * queries_per_kv, (head + 1) * queries_per_kv):
                        _zero_row(attention.q_proj, query * dim + channel)
            for channel in set(range(dim)) - set(planned.channels_GC[head].tolist()):
                _zero_row(attention.v_proj, head * dim + channel)
    return model


def _zero_row(linear: torch.nn.Linear, row: int) -> None:
    linear.weight[row] = 0
    if linear.bias is not None:
        linear.bias[row] = 0


def _choose(size: int, count: int, generator: torch.Generator) -> list[int]:
    return sorted(torch.randperm(size, generator=generator)[:count].tolist())
