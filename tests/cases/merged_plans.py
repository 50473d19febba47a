"""Random plans of merged heads, for models of any family."""

from typing import Any

import torch
from torch import Tensor

from cases.family_cases import CASES, Case
from cases.plans import plan_of
from rap.methods.dense import dense_layers
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan

MERGE = 2


def _can_merge(case: Case) -> bool:
    limits = dense_layers(case.model()).merge_limits
    return any(not limit for limit in limits)


MERGED = [case for case in CASES if not case.around and _can_merge(case)]


def merged_plan(model: Any, case: Case, *, seed: int = 0) -> Plan:
    """Random slots, free channels and latents of pairs of heads; layer 0 stays dense."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[PairPlan | None] = []
    limits = dense_layers(model).merge_limits
    for index, layer in enumerate(attention_layers(model)):
        dense = limits[index] or (index == 0 and not case.absent)
        heads = layer.shape.num_kv_heads if layer.shape is not None else 0
        sizes = case.sizes(index)
        layers.append(None if dense else merged_layer(heads, *sizes, generator))
    return plan_of(model, layers)


def merged_layer(
    heads: int,
    size: int,
    rotated: int,
    generator: torch.Generator,
    *,
    merge: int = MERGE,
    slots: int | None = None,
    width: int | None = None,
) -> PairPlan:
    """A layer with `heads` of `size` channels, some of them `rotated`, `merge` of them in one.

    Without `slots` and `width` a merged head has more of both than a dense one, some frequencies
    twice, and more channels without rotation.
    """
    groups, pairs = heads // merge, rotated // 2
    if slots is None:
        slots = pairs + pairs // 4 if pairs else 0
    index = torch.stack(
        [
            torch.randperm(merge * pairs, generator=generator)[:slots].sort().values // merge
            for _ in range(groups)
        ]
    ).reshape(groups, slots)
    mixes = torch.zeros(2, heads, slots, pairs, 2, dtype=torch.float64)
    for head in range(heads):
        for slot in range(slots):
            both = torch.randn(2, 2, generator=generator, dtype=torch.float64)
            mixes[:, head, slot, index[head // merge, slot]] = 0.5 * both
    free = size - rotated
    kept, width = free + free // 2, size + 3 if width is None else width

    def drawn(*sizes: int) -> Tensor:
        return 0.4 * torch.randn(sizes, generator=generator, dtype=torch.float64)

    fields: dict[str, Tensor] = {}
    if pairs:
        fields |= {"key_mix_GMP2": mixes[0], "query_mix_GMP2": mixes[1]}
    if kept:
        fields |= {"key_free_mix_GNF": drawn(heads, kept, free)}
        fields |= {"query_free_mix_GNF": drawn(heads, kept, free)}
    return PairPlan(
        frequency_GM=index.to(torch.int32),
        free_GN=torch.arange(kept, dtype=torch.int32).expand(groups, -1).contiguous(),
        value_down_GCD=drawn(heads, width, size),
        value_up_GDC=drawn(heads, size, width),
        **fields,
    )
