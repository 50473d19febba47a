"""Random plans of merged heads, and the dense model that they describe, projected by hooks.

Slots of one frequency mix the pairs of that frequency alone, so that the map from dense keys to
what their readers see commutes with the rotation: hooks in the dense model apply it. The maps are
made of a plan's numbers by loops that know nothing of the package's own products.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cases.family_cases import CASES, Case
from cases.models import random_tokens
from cases.plans import plan_of
from rap.methods.dense import dense_layers
from rap.model.cache_layout import CacheLayout
from rap.model.kinds.factored import FactoredPlan
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan
from rap.surgery.apply import apply

MERGE = 2
RECURRENT = ("granitemoehybrid", "falcon_h1")
ROUTED_IN_FLOAT32 = ("glm4_moe",)
ALIKE = {"rtol": 0, "atol": 1e-9}  # sums of a few hundred float64 products of size 10


def _mergeable(case: Case) -> tuple[bool, bool]:
    """Whether some layer can be merged, and whether one can with maps of every head."""
    layers = dense_layers(case.model()).present
    return (
        any(not layer.merge_limit for layer in layers),
        any(not layer.mapped_limit for layer in layers),
    )


# Every model is built once for both lists: they are collected by every worker.
_ABLE = [(case, *_mergeable(case)) for case in CASES if not case.around]
MERGED = [case for case, absorbed, _ in _ABLE if absorbed]
MAPPED = [case for case, _, mapped in _ABLE if mapped]


def merged_plan(model: Any, case: Case, *, seed: int = 0, mapped: bool = False) -> Plan:
    """Random slots, free channels and latents of pairs of heads; layer 0 stays dense.

    With `mapped` every head has maps, which some layers need.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[PairPlan | None] = []
    for index, layer in enumerate(dense_layers(model).layers):
        plan = None
        dense = layer is None or (index == 0 and not case.absent)
        if not (dense or (layer.mapped_limit if mapped else layer.merge_limit)):
            plan = merged_layer(layer.shape.num_kv_heads, *case.sizes(index), generator)
        if plan is not None and mapped:
            plan = FactoredPlan.of(plan, queries=True, outputs=True)
        layers.append(plan)
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


def projected_by_hooks(model: Any, plan: Plan, case: Case) -> Any:
    """A copy of a stock model in which hooks map the keys and values of all heads."""
    model = copy.deepcopy(model)
    layers = getattr(model.get_decoder(), "model", model.get_decoder()).layers
    for index, (layer, planned) in enumerate(zip(layers, plan.layers, strict=True)):
        if planned is None:
            continue
        size, rotated = case.sizes(index)
        maps = _key_map(planned, size, rotated, case), _value_map(planned, size)
        attention = getattr(layer, case.attention)
        if case.norms and hasattr(attention, case.norms[-1]):
            # Keys are mapped behind their norm, and values alone in their projection.
            norm = getattr(attention, case.norms[-1])
            norm.register_forward_hook(_mapped_heads(maps[0], size, case.normed))
            maps = torch.eye(len(maps[0]), dtype=torch.float64), maps[1]
        if not case.fused:
            attention.k_proj.register_forward_hook(_mapped(maps[0]))
            attention.v_proj.register_forward_hook(_mapped(maps[1]))
            continue
        heads = len(planned.value_down_GCD)
        queries = 6 * size
        if case.fused == "q, k, v":
            places = torch.arange(queries + 2 * heads * size)[queries:].chunk(2)
            attention.qkv_proj.register_forward_hook(_mapped_at(places, maps))
        else:
            rows = torch.arange(3 * queries).view(6, 3, size)
            places = rows[:, 1].flatten(), rows[:, 2].flatten()
            attention.query_key_value.register_forward_hook(_mapped_at(places, maps))
    return model


def _bound_by_step(case: Case, bound: dict[str, float]) -> dict[str, float]:
    """How much one token from the cache may differ from the same one among all."""
    if case.name in RECURRENT:  # its state beside attention is cached in float32
        return {"rtol": 0, "atol": 1e-4}
    if case.name in ROUTED_IN_FLOAT32:  # products of one row and of eleven are summed in two orders
        return {"rtol": 0, "atol": 1e-6}
    return bound


def check_projected(model: Any, plan: Plan, case: Case, bound: dict[str, float]) -> None:
    """The pruned model is the projected one, whole and token by token, and caches as planned."""
    small, expected = apply(model, plan), projected_by_hooks(model, plan, case)
    ids = random_tokens(2, 11)
    by_step = _bound_by_step(case, bound)
    with torch.no_grad():
        found, wanted = small(ids).logits, expected(ids).logits
        torch.testing.assert_close(found, wanted, **bound)
        assert not torch.allclose(model(ids).logits, wanted, atol=1e-2)
        # Token by token from the cache, whose layout is the plan's.
        cache = small(ids[:, :6], use_cache=True).past_key_values
        dense = expected(ids[:, :6], use_cache=True).past_key_values
        for place in range(6, 11):
            token = ids[:, place : place + 1]
            step = small(token, past_key_values=cache, use_cache=True).logits[:, 0]
            wanted = expected(token, past_key_values=dense, use_cache=True).logits[:, 0]
            torch.testing.assert_close(step, wanted, **bound)
            torch.testing.assert_close(step, found[:, place], **by_step)
    for index, layout in enumerate(plan.caches):
        if plan.layers[index] is not None and hasattr(cache.layers[index], "keys"):
            keys, values = cache.layers[index].keys, cache.layers[index].values
            assert layout == CacheLayout(keys.shape[1], keys.shape[-1], values.shape[-1])
            assert keys.shape[1] == attention_layers(model)[index].shape.num_kv_heads // MERGE


def _key_map(planned: PairPlan, size: int, rotated: int, case: Case) -> Tensor:
    """[G D, G D] from dense keys to those that the merged logits are of, in the dense order."""
    heads, pairs = len(planned.value_down_GCD), rotated // 2
    whole = torch.zeros(heads * size, heads * size, dtype=torch.float64)
    slots = planned.frequency_GM.shape[1] if pairs else 0
    for to in range(heads):
        for back in range(to // MERGE * MERGE, (to // MERGE + 1) * MERGE):
            for p in range(pairs):
                factor = sum(
                    torch.view_as_complex(planned.query_mix_GMP2[to, s, p]).conj()
                    * torch.view_as_complex(planned.key_mix_GMP2[back, s, p])
                    for s in range(slots)
                )
                a, b = complex(factor).real, complex(factor).imag
                first, second = (2 * p, 2 * p + 1) if case.interleaved else (p, p + pairs)
                row, column = to * size, back * size
                whole[row + first, column + first] = a
                whole[row + first, column + second] = -b
                whole[row + second, column + first] = b
                whole[row + second, column + second] = a
            if size > rotated:
                mixed = planned.query_free_mix_GNF[to].mT @ planned.key_free_mix_GNF[back]
                rows = slice(to * size + rotated, (to + 1) * size)
                whole[rows, back * size + rotated : (back + 1) * size] = mixed
    return whole


def _value_map(planned: PairPlan, size: int) -> Tensor:
    heads = len(planned.value_down_GCD)
    whole = torch.zeros(heads * size, heads * size, dtype=torch.float64)
    for to in range(heads):
        for back in range(to // MERGE * MERGE, (to // MERGE + 1) * MERGE):
            block = planned.value_up_GDC[to] @ planned.value_down_GCD[back]
            whole[to * size : (to + 1) * size, back * size : (back + 1) * size] = block
    return whole


def _mapped(matrix: Tensor) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output @ matrix.mT


def _mapped_heads(matrix: Tensor, size: int, layout: str) -> Callable[..., Tensor]:
    """The map of all heads side by side, of states in a norm's layout."""

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if layout == "flat":
            return output @ matrix.mT
        heads = output.transpose(1, 2) if layout == "BHTD" else output
        mapped = (heads.flatten(-2) @ matrix.mT).unflatten(-1, (-1, size))
        return mapped.transpose(1, 2) if layout == "BHTD" else mapped

    return hook


def _mapped_at(places: Any, maps: Any) -> Callable[..., Tensor]:
    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        for where, matrix in zip(places, maps, strict=True):
            output[..., where] = output[..., where] @ matrix.mT
        return output

    return hook
