"""Merged heads in a method: how many KV heads of a layer become one, and the plan of such a layer.

Shapes: G KV heads, g heads of a group, N = G/g groups, P pairs, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..calibration.kv_sharing import readers_of
from ..model.errors import RapError
from ..model.rope import AttentionShape
from ..planning.budgets import LayerBudget, layer_budget, nearest_width
from ..planning.folding import FoldedHead, fold_head, usual_reach
from ..planning.losses import Metric, Moments, one_width, part_losses, width_errors
from ..planning.merging import (
    WIDEST,
    check_merge,
    merged_channels,
    merged_free,
    merged_keys,
    merged_latent,
    merged_slots,
    merged_steps,
    merged_values,
    refine_slots,
)
from ..planning.plan import PairPlan, Plan
from ..planning.shared import shared_frequencies, shared_slots
from ..runtime.settings import Count
from .dense import DenseLayers, PrunableLayer

# auto: W_q and W_o grow by merge * retain. Three heads at 0.7 are worth it, and leave the attention
# with 98 % of its parameters where maps stand beside them (docs/log.md, 2026-11-25).
GROWTH = 2.25
# What grows itself is read at every step: of larger models a request would then read more bytes
# than it saves, up to tens of thousands of tokens (docs/measurements/larger-models.md).
ABSORBED_GROWTH = 1.5

Merge = Count | Literal["all", "auto"] | None


@dataclass(frozen=True)
class Merged:
    """How a method merges: the metric, and settings of folding and values."""

    metric: Metric
    context: int
    reach: float | None
    shrinkage: float

    def moments(self, layer: PrunableLayer) -> tuple[Moments, Moments, Moments]:
        """Of a layer's groups: keys, values, and key channels that never rotate."""
        found, shape, how = layer.statistics, layer.shape, (layer.merge, self.metric)
        return (
            merged_keys(found, shape, *how),
            merged_values(found, layer.weights["o"], shape, *how),
            merged_free(found, shape, *how),
        )

    def curve(self, layer: PrunableLayer) -> list[float]:
        """What a layer loses at every width that a cached head may have, in units of the metric."""
        about = (*self.moments(layer), layer.shape, layer.frequencies, self.context)
        if self.metric == "output":
            losses = width_errors(*about, layer.logit_scales)
        else:
            losses = one_width(*part_losses(*about))
        return losses[: merged_steps(layer.shape.head_dim, layer.merge) + 1]

    def layer(
        self,
        layer: PrunableLayer,
        budget: LayerBudget,
        slots: Sequence[FoldedHead] | None = None,
    ) -> PairPlan:
        """The plan of a layer whose heads are merged; `slots` are those of all layers alike."""
        keys, values, free = self.moments(layer)
        if slots is None:
            slots = self._slots(keys, layer.frequencies, budget.pairs)
        empty = torch.zeros(len(values[0]), 0, dtype=torch.int32)
        fields: dict[str, Any] = {"frequency_GM": empty, "free_GN": empty}
        fields |= merged_channels(free, budget.free, layer.merge)
        fields |= merged_latent(values, budget.values, layer.merge, self.shrinkage)
        if slots:
            fields |= merged_slots(slots, layer.merge)
        return PairPlan(**fields)

    def _slots(self, keys: Moments, frequencies: Tensor, num_slots: int) -> list[FoldedHead]:
        if not num_slots:
            return []
        turned = self.metric == "loss"  # gradients of keys
        folded = [
            fold_head(
                read, key, frequencies, num_slots, self.context, reach=self.reach, turned=turned
            )
            for key, read in zip(*keys, strict=True)
        ]
        return self._refined(folded, keys, frequencies)

    def _refined(
        self, slots: Sequence[FoldedHead], keys: Moments, frequencies: Tensor
    ) -> list[FoldedHead]:
        """The same slots of every group at the same frequencies, refined up to `reach`."""
        reach = usual_reach(self.context) if self.reach is None else self.reach
        turned = self.metric == "loss"
        groups = zip(slots, *keys, strict=True)
        return [
            refine_slots(head, read, key, frequencies, reach, turned=turned)
            for head, key, read in groups
        ]

    def shared(self, dense: DenseLayers, width: int) -> dict[int, list[FoldedHead]]:
        """One list of slots for all groups of all layers, as the plain layout needs it."""
        frequencies = shared_frequencies(dense.frequencies)
        keys = [self.moments(layer)[0] for layer in dense.present]
        about = (frequencies, width, self.context, self.metric)
        found = shared_slots(keys, *about, reach=self.reach)
        return {
            layer.index: self._refined(slots, own, frequencies)
            for layer, slots, own in zip(dense.present, found, keys, strict=True)
        }


def shape_merge(
    merge: Merge, shape: AttentionShape, retain: float, *, absorbed: bool = False, unit: int = 1
) -> int:
    """KV heads of a cached head of a layer that can be merged.

    `absorbed` are maps that must be multiplied into W_q and W_o, and `unit` the steps of two
    channels that widths are multiples of, as in `most_merged`.
    Raises RapError for a number that does not divide the heads.
    """
    if isinstance(merge, int):
        check_merge(merge, shape.num_kv_heads)
        return merge
    if merge == "all":
        return shape.num_kv_heads
    heads, dim = shape.num_kv_heads, shape.head_dim
    return most_merged(heads, dim, retain, absorbed=absorbed, unit=unit)


def most_merged(
    num_kv_heads: int, head_dim: int, retain: float, *, absorbed: bool = False, unit: int = 1
) -> int:
    """The most KV heads in one cached head that keep W_q and W_o, and the head, within bounds.

    >>> most_merged(8, 128, 0.5), most_merged(3, 64, 0.5), most_merged(8, 64, 0.7)
    (4, 3, 2)
    >>> most_merged(3, 64, 0.7)
    3

    Where their maps can only be `absorbed`, W_q and W_o grow by less if any heads can then be
    merged, and else by as little as merging takes.

    >>> [most_merged(*of, absorbed=True) for of in ((8, 128, 0.5), (3, 64, 0.5), (3, 64, 0.7))]
    [2, 3, 3]

    Not so many that all of it would be kept, by widths of whole `unit`s of two channels: merging
    would only enlarge W_q and W_o.

    >>> most_merged(2, 64, 0.9), most_merged(2, 64, 0.9, unit=16)
    (2, 1)
    """
    sizes = (n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0)
    fits = [n for n in sizes if n * retain <= GROWTH and n * retain * head_dim <= WIDEST]
    steps = {n: n * head_dim // 2 for n in fits}
    fits = [n for n, whole in steps.items() if nearest_width(retain * whole, whole, unit) < whole]
    if not absorbed:
        return max(fits, default=1)
    light = max((n for n in fits if n * retain <= ABSORBED_GROWTH), default=1)
    return light if light > 1 else min((n for n in fits if n > 1), default=1)


def merged_budget(
    retain: float, merge: int, shape: Any, unit: int, steps: int | None = None
) -> LayerBudget:
    """What a merged head of a layer keeps at `retain`, or at so many steps of two channels.

    Raises RapError for more than a cached head may have.
    """
    size = merge * shape.head_dim // 2
    if steps is None:
        steps = nearest_width(retain * size, size, unit)
    most = merged_steps(shape.head_dim, merge)
    if steps > most:
        raise RapError(
            f"merged heads of {2 * steps} channels exceed {2 * most}; merge fewer heads or use a "
            "smaller retain"
        )
    if steps < 1:
        raise RapError(f"retain {retain} keeps nothing of a merged head; use a larger retain")
    return layer_budget(merge * shape.geometry.num_pairs, size, steps, steps)


def default_merge(method: Any) -> Merge:
    """`auto`, or 1 for a Rap with a setting that merged heads exclude or are not chosen with.

    The latter are profile `stock`, which `--target plain` alone merges; queries `factored`, which
    keep W_q and W_o from the growth that `auto` goes by; a `qk_norm` other than the default, which
    says how rows behind a norm are cut; and budget `search`, which plans a layer for every width
    that it tries.
    """
    separate = method.profile == "stock" or method.queries == "factored"
    separate = separate or method.qk_norm != "constant" or method.budget == "search"
    return 1 if separate or _excluded(method) else "auto"


def _excluded(method: Any) -> str:
    """What merged heads need that the settings of a Rap are not, or ""."""
    if method.keys != "fold" or method.values != "subspace":
        return "keys 'fold' and values 'subspace'"
    if method.budget == "adaptive" or method.key_share != 0.5:
        return "another budget than 'adaptive', and key_share 0.5"
    return ""


def check_merging(method: Any) -> None:
    """Raise RapError for settings of a Rap that cannot go with its `merge`."""
    merge = method.merge
    if merge == 1:
        return
    if needed := _excluded(method):
        raise RapError(f"merge={merge} needs {needed}")


def noted(plan: PairPlan, note: str) -> PairPlan:
    """The plan of a layer whose heads stayed apart, with the reason."""
    return replace(plan, note=f"heads not merged: {note}") if note else plan


def with_record(plan: Plan, method: dict[str, Any], dense: DenseLayers | None) -> Plan:
    """A plan as of the method with that record, and with what `dense` (if any) cannot merge."""
    layers, readers = list(plan.layers), readers_of(plan.shapes)
    for layer in dense.present if dense is not None else ():
        for index in (layer.index, *readers[layer.index]):
            if isinstance(kept := layers[index], PairPlan):
                layers[index] = noted(kept, layer.merge_limit)
    return replace(plan, layers=tuple(layers), method=method)
