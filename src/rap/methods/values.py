"""Values in their best subspace instead of single channels: what Rap and A3 share."""

from dataclasses import replace

from ..plan import LayerPlan
from ..sensitivity import Metric, Moments, value_moments
from ..statistics import Statistics
from ..subspace import weighted_subspace
from .base import DenseLayers


def layer_values(index: int, statistics: Statistics, dense: DenseLayers, metric: Metric) -> Moments:
    """Second moments of what o_proj of a layer reads, and of what that adds to, [G, D, D] each."""
    shape, weights = dense.shapes[index], dense.weights[index]
    assert shape is not None
    assert weights is not None
    return value_moments(statistics.layers[index] or {}, weights["o"], shape, metric)


def in_subspace(layer: LayerPlan, values: Moments) -> LayerPlan:
    """A layer's plan with as many directions of the values as it had channels."""
    factors = weighted_subspace(*values, layer.value_width)
    return replace(
        layer,
        channels_GC=None,
        value_down_GCD=factors.down.contiguous(),
        value_up_GDC=factors.up.contiguous(),
    )
