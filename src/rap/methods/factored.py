"""Where queries stay dense: which layers get maps of every head, and the plan of such a layer.

Shapes: E model dim, D dense head dim, W key width, C value width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ..calibration.normed import behind_norm
from ..calibration.statistics import Statistics
from ..model.kinds.factored import FactoredPlan
from ..planning.plan import PairPlan
from .dense import DenseLayers

# `absorbed` in W_q and W_o, which change their size; `factored` into the dense ones and a map of
# every head; `auto` whichever is smaller, and factored where nothing else is exact.
Queries = Literal["auto", "absorbed", "factored"]


def opened(dense: DenseLayers, wanted: Sequence[bool]) -> DenseLayers:
    """The same, with `wanted` layers free to be mixed and merged wherever maps make that exact."""
    keys = [may and want for may, want in zip(dense.maps_keys, wanted, strict=True)]
    values = [may and want for may, want in zip(dense.maps_values, wanted, strict=True)]
    limits = zip(dense.merge_limits, dense.mapped_limits, wanted, strict=True)
    return replace(
        dense,
        mixes_keys=[a or b for a, b in zip(dense.mixes_keys, keys, strict=True)],
        mixes_values=[a or b for a, b in zip(dense.mixes_values, values, strict=True)],
        merge_limits=[mapped if want else plain for plain, mapped, want in limits],
        maps_keys=keys,
        maps_values=values,
    )


def behind_norms(statistics: Statistics, dense: DenseLayers) -> Statistics:
    """Statistics of queries and keys behind their norm, of layers that combine them there."""
    layers = [
        behind_norm(found) if found is not None and own else found
        for found, own in zip(statistics.layers, dense.maps_keys, strict=True)
    ]
    return replace(statistics, layers=tuple(layers))


def factored(plan: PairPlan, index: int, dense: DenseLayers, queries: Queries) -> PairPlan:
    """The plan of a layer with maps where it needs them, or `queries` wants them."""
    shape = dense.shapes[index]
    assert shape is not None
    size, dim = shape.hidden_size, shape.head_dim

    def mapped(needed: bool, width: int) -> bool:
        # Products of one query head: W E absorbed, D E and D W factored. Parameters follow, for
        # the query heads of a KV head share its map.
        grows = plan.merge > 1 and width * size > dim * (size + width)
        return needed or queries == "factored" or (queries == "auto" and grows)

    of_queries = plan.mixes_keys and mapped(dense.maps_keys[index], plan.key_width)
    if dense.normalises_keys(index) and not of_queries:
        return plan  # whole pairs and a norm that is cut
    turned = plan.value_up_GDC is not None
    of_outputs = turned and mapped(dense.maps_values[index], plan.value_width)
    if not (of_queries or of_outputs):
        return plan
    return FactoredPlan.of(plan, queries=of_queries, outputs=of_outputs)
