"""What methods ask of one layer: its values' moments and subspace, and what widths would lose."""

from dataclasses import replace
from typing import Any

from ..planning.losses import (
    DIRECTIONS,
    Metric,
    Moments,
    Orders,
    apart,
    free_moments,
    key_moments,
    part_losses,
    value_moments,
    width_errors,
)
from ..planning.merging import merged_latent
from ..planning.plan import PairPlan
from .dense import PrunableLayer


def layer_values(layer: PrunableLayer, metric: Metric) -> Moments:
    """Second moments [G, R, D, D] of what o_proj of a layer reads, and of what that adds to."""
    return value_moments(layer.statistics, layer.weights["o"], layer.shape, metric)


def layer_losses(
    layer: PrunableLayer, context: int, orders: Orders = DIRECTIONS
) -> tuple[list[float], list[float]]:
    """Estimated loss increase of a layer's keys and values at every width: `part_losses`."""
    keys, free = key_moments(layer.statistics, "loss"), free_moments(layer.statistics, "loss")
    if layer.normalised and not layer.mixes_keys:
        keys, free = apart(keys), apart(free)
    values = layer_values(layer, "loss")
    return part_losses(keys, values, free, layer.shape, layer.frequencies, context, orders)


def layer_errors(layer: PrunableLayer, context: int, orders: Orders = DIRECTIONS) -> list[float]:
    """Relative squared error of a layer's output at every width: `width_errors`."""
    return width_errors(
        key_moments(layer.statistics, "output"),
        layer_values(layer, "output"),
        free_moments(layer.statistics, "output"),
        layer.shape,
        layer.frequencies,
        context,
        layer.logit_scales,
        orders,
    )


def in_subspace(layer: PairPlan, values: Moments, shrinkage: float = 0.0) -> PairPlan:
    """A layer's plan with as many directions of the values as it had channels."""
    latent: dict[str, Any] = merged_latent(values, layer.value_width, 1, shrinkage)
    return replace(layer, channels_GC=None, **latent)
