"""What methods ask of keys: folded slots, one list of them for all heads, free channels.

And which layers keep queries dense with maps of every head, and the plan of such a layer.

Shapes: E model dim, D dense head dim, W key width, C value width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..calibration.moments import behind_norm
from ..calibration.statistics import Statistics
from ..model.kinds.factored import FactoredPlan
from ..model.rope import AttentionShape
from ..planning.folding import fold_head
from ..planning.losses import Metric, free_moments, key_moments
from ..planning.merging import merged_channels, merged_slots
from ..planning.plan import PairPlan
from ..planning.scores import LayerScores
from ..planning.shared import shared_frequencies, shared_pairs, shared_slots
from .dense import DenseLayers, PrunableLayer


def folded_apart(
    plain: PairPlan,
    layer: PrunableLayer,
    context: int,
    metric: Metric,
    reach: float | None = None,
) -> dict[str, Tensor]:
    """What replaces the plainly chosen pairs of a layer, as PairPlan fields.

    The slots are every head's own, with the best subspace of channels that never rotate.
    """
    fields: dict[str, Tensor] = {}
    if plain.num_pairs:
        turned = metric == "loss"  # gradients of keys
        own, width = layer.frequencies, plain.num_pairs
        heads = [
            fold_head(read, key, own, width, context, reach=reach, turned=turned)
            for key, read in zip(*key_moments(layer.statistics, metric), strict=True)
        ]
        fields |= merged_slots(heads, 1)
    if plain.num_free:
        fields |= merged_channels(free_moments(layer.statistics, metric), plain.num_free, 1)
    return fields


def folded_alike(
    plain: Sequence[PairPlan | None],
    dense: DenseLayers,
    context: int,
    metric: Metric,
    reach: float | None = None,
) -> list[dict[str, Tensor]]:
    """One list of slots for all heads, as `folded_apart` has one for each."""
    widths = [0 if layer is None else layer.num_pairs for layer in plain]
    folded = [layer for layer in dense.present if layer.mixes_keys and widths[layer.index]]
    moments = [key_moments(layer.statistics, metric) for layer in folded]
    frequencies = shared_frequencies(dense.frequencies)
    slots = shared_slots(moments, frequencies, max(widths), context, metric, reach=reach)
    fields: list[dict[str, Tensor]] = [{} for _ in plain]
    for layer, heads in zip(folded, slots, strict=True):
        fields[layer.index] = merged_slots(heads, 1)
    return fields


def shared_dense(
    plain: Sequence[PairPlan | None], scores: Sequence[LayerScores | None]
) -> list[dict[str, Tensor]]:
    """One set of dense pairs for all heads and layers, of the width that was planned."""
    voted = [layer.pairs_GP for layer in scores if layer is not None]
    width = next(layer.num_pairs for layer in plain if layer is not None)
    pairs = torch.tensor(shared_pairs(voted, width), dtype=torch.int32)
    return [
        {"frequency_GM": pairs.expand(layer.frequency_GM.shape[0], -1).contiguous()}
        if layer is not None
        else {}
        for layer in plain
    ]


# `absorbed` in W_q and W_o, which change their size; `factored` into the dense ones and a map of
# every head; `auto` whichever is smaller, and factored where nothing else is exact.
Queries = Literal["auto", "absorbed", "factored"]


def opened(layer: PrunableLayer, *, always: bool) -> PrunableLayer:
    """The same, free to be mixed and merged where maps make that exact.

    Unless `always`, only if its heads can then be merged.
    """
    if layer.mapped_limit and not always:
        return replace(layer, maps_keys=False, maps_values=False)
    return replace(
        layer,
        mixes_keys=layer.mixes_keys or layer.maps_keys,
        mixes_values=layer.mixes_values or layer.maps_values,
        merge_limit=layer.mapped_limit,
    )


def behind_norms(statistics: Statistics, dense: DenseLayers) -> Statistics:
    """Statistics of queries and keys behind their norm, of layers that combine them there."""
    layers = list(statistics.layers)
    for layer in dense.present:
        if layer.maps_keys and (found := layers[layer.index]) is not None:
            layers[layer.index] = behind_norm(found)
    return replace(statistics, layers=tuple(layers))


def maps_are_smaller(shape: AttentionShape, width: int) -> bool:
    """Whether a head of `width` channels takes fewer products with maps than absorbed.

    Only a merged one may: it is then wider than a dense head.
    """
    # Products of one query head: W E absorbed, D E and D W factored. Parameters follow, for the
    # query heads of a KV head share its map.
    size, dim = shape.hidden_size, shape.head_dim
    return width * size > dim * (size + width)


def factored(plan: PairPlan, layer: PrunableLayer, queries: Queries) -> PairPlan:
    """The plan of a layer with maps where it needs them, or `queries` requires them."""

    def mapped(needed: bool, width: int) -> bool:
        smaller = queries == "auto" and maps_are_smaller(layer.shape, width)
        return needed or queries == "factored" or smaller

    of_queries = plan.mixes_keys and mapped(layer.maps_keys, plan.key_width)
    if layer.normalised and not of_queries:
        return plan  # whole pairs and a norm that is cut
    turned = plan.value_up_GDC is not None
    of_outputs = turned and mapped(layer.maps_values, plan.value_width)
    if not (of_queries or of_outputs):
        return plan
    return FactoredPlan.of(plan, queries=of_queries, outputs=of_outputs)
