"""What methods ask of one layer: its values' moments and subspace, and what widths would lose."""

from dataclasses import replace

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
    value_subspace,
    width_errors,
)
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
    """A layer's plan with as many directions of the values as it had channels: `value_subspace`."""
    factors = value_subspace(values, layer.value_width, shrinkage)
    return replace(
        layer,
        channels_GC=None,
        value_down_GCD=factors.down.contiguous(),
        value_up_GDC=factors.up.contiguous(),
    )
