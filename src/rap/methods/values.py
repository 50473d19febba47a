"""What methods ask of one layer: its values' moments and subspace, and what widths would lose."""

from dataclasses import replace

from ..calibration.statistics import Statistics
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
from .dense import DenseLayers


def layer_values(index: int, statistics: Statistics, dense: DenseLayers, metric: Metric) -> Moments:
    """Second moments [G, R, D, D] of what o_proj of a layer reads, and of what that adds to."""
    shape, weights = dense.shapes[index], dense.weights[index]
    assert shape is not None
    assert weights is not None
    return value_moments(statistics.layers[index] or {}, weights["o"], shape, metric)


def layer_losses(
    index: int,
    statistics: Statistics,
    dense: DenseLayers,
    context: int,
    orders: Orders = DIRECTIONS,
) -> tuple[list[float], list[float]]:
    """Estimated loss increase of a layer's keys and values at every width: `part_losses`."""
    shape, frequencies = dense.shapes[index], dense.frequencies[index]
    assert shape is not None
    assert frequencies is not None
    layer_statistics = statistics.layers[index] or {}
    keys, free = key_moments(layer_statistics, "loss"), free_moments(layer_statistics, "loss")
    if dense.normalises_keys(index) and not dense.mixes_keys[index]:
        keys, free = apart(keys), apart(free)
    values = layer_values(index, statistics, dense, "loss")
    return part_losses(keys, values, free, shape, frequencies, context, orders)


def layer_errors(
    index: int,
    statistics: Statistics,
    dense: DenseLayers,
    context: int,
    orders: Orders = DIRECTIONS,
) -> list[float]:
    """Relative squared error of a layer's output at every width: `width_errors`."""
    shape, frequencies = dense.shapes[index], dense.frequencies[index]
    assert shape is not None
    assert frequencies is not None
    layer_statistics = statistics.layers[index] or {}
    return width_errors(
        key_moments(layer_statistics, "output"),
        layer_values(index, statistics, dense, "output"),
        free_moments(layer_statistics, "output"),
        shape,
        frequencies,
        context,
        dense.logit_scales[index],
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
