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
from ..planning.folding import FoldedHead, fold_head
from ..planning.losses import Metric, Moments, free_moments, key_moments
from ..planning.plan import PairPlan
from ..planning.scores import LayerScores, Named
from ..planning.shared import shared_frequencies, shared_pairs, shared_slots
from ..planning.subspace import weighted_subspace
from .dense import DenseLayers


def folded_keys(
    plain: Sequence[PairPlan | None],
    statistics: Sequence[Named],
    dense: DenseLayers,
    context: int,
    metric: Metric,
    reach: float | None = None,
    *,
    alike: bool = False,
) -> list[dict[str, Tensor]]:
    """What replaces the plainly chosen pairs of layers that may be folded, as PairPlan fields.

    The slots are every head's own, with the best subspace of channels that never rotate, or
    `alike` for all heads and layers.
    """
    mixed = [x is not None and m for x, m in zip(plain, dense.mixes_keys, strict=True)]
    pairs = [layer.num_pairs if layer is not None else 0 for layer in plain]
    moments = [
        key_moments(found, metric) if mixes and width else None
        for found, mixes, width in zip(statistics, mixed, pairs, strict=True)
    ]
    if alike:
        return folded_alike(moments, pairs, dense, context, metric, reach)
    folded = folded_apart(moments, pairs, dense, context, metric, reach)
    for index, layer in enumerate(plain):
        if layer is not None and layer.num_free and mixed[index]:
            free = free_moments(statistics[index], metric)
            folded[index] |= free_subspace(free, layer.num_free)
    return folded


def folded_apart(
    moments: Sequence[Moments | None],
    widths: Sequence[int],
    dense: DenseLayers,
    context: int,
    metric: Metric,
    reach: float | None = None,
) -> list[dict[str, Tensor]]:
    """Every head's own slots, as fields of a PairPlan; none of a layer without moments."""
    turned = metric == "loss"  # gradients of keys
    folded: list[dict[str, Tensor]] = []
    for layer, width, own in zip(moments, widths, dense.frequencies, strict=True):
        if layer is None or own is None:
            folded.append({})
            continue
        heads = [
            fold_head(read, key, own, width, context, reach=reach, turned=turned)
            for key, read in zip(*layer, strict=True)
        ]
        folded.append(_folded(heads))
    return folded


def free_subspace(moments: Moments, width: int) -> dict[str, Tensor]:
    """Channels that never rotate, for which any real map is free: the best subspace of them.

    All of them stay plain, so that full width is exact.
    """
    heads, dim = moments[0].shape[:2]
    if not 0 < width < dim:
        return {}
    factors = weighted_subspace(*moments, width)
    return {
        "free_GN": torch.arange(width, dtype=torch.int32).expand(heads, -1).contiguous(),
        "key_free_mix_GNF": factors.down.contiguous(),
        "query_free_mix_GNF": factors.up.mT.contiguous(),
    }


def folded_alike(
    moments: Sequence[Moments | None],
    widths: Sequence[int],
    dense: DenseLayers,
    context: int,
    metric: Metric,
    reach: float | None = None,
) -> list[dict[str, Tensor]]:
    """One list of slots: heads' losses compare as they are, their errors only as shares."""
    present = [(read, key) for key, read in (layer for layer in moments if layer is not None)]
    frequencies = shared_frequencies(dense.frequencies)
    loss = metric == "loss"  # gradients of keys
    width = max(widths)
    slots = shared_slots(
        present, frequencies, width, context, reach=reach, relative=not loss, turned=loss
    )
    heads = iter(slots)
    return [_folded(next(heads)) if layer is not None else {} for layer in moments]


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


def _folded(heads: Sequence[FoldedHead]) -> dict[str, Tensor]:
    mixes = {
        "key_mix_GMP2": torch.stack([head.key_mix for head in heads]),
        "query_mix_GMP2": torch.stack([head.query_mix for head in heads]),
    }
    return {
        "frequency_GM": torch.stack([head.frequency for head in heads]).to(torch.int32),
        **{name: torch.view_as_real(mix).contiguous() for name, mix in mixes.items()},
    }


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


def maps_are_smaller(shape: AttentionShape, width: int) -> bool:
    """Whether a merged head of `width` channels takes fewer products with maps than absorbed."""
    # Products of one query head: W E absorbed, D E and D W factored. Parameters follow, for the
    # query heads of a KV head share its map.
    size, dim = shape.hidden_size, shape.head_dim
    return width * size > dim * (size + width)


def factored(plan: PairPlan, index: int, dense: DenseLayers, queries: Queries) -> PairPlan:
    """The plan of a layer with maps where it needs them, or `queries` requires them."""
    shape = dense.shapes[index]
    assert shape is not None

    def mapped(needed: bool, width: int) -> bool:
        smaller = plan.merge > 1 and maps_are_smaller(shape, width)
        return needed or queries == "factored" or (queries == "auto" and smaller)

    of_queries = plan.mixes_keys and mapped(dense.maps_keys[index], plan.key_width)
    if dense.normalises_keys(index) and not of_queries:
        return plan  # whole pairs and a norm that is cut
    turned = plan.value_up_GDC is not None
    of_outputs = turned and mapped(dense.maps_values[index], plan.value_width)
    if not (of_queries or of_outputs):
        return plan
    return FactoredPlan.of(plan, queries=of_queries, outputs=of_outputs)
