"""Gradients of the loss by keys and by what o_proj reads: what calibration's backward pass watches.

Shapes: B batch, T tokens, H query heads, G KV heads, D head dim, P pairs, F channels that never
rotate.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..model.errors import CalibrationError
from ..model.layers import split_heads
from .observers import (
    COMPLEX,
    FLOAT,
    CalibrationStep,
    GradientStatistic,
    ObservedLayer,
    by_kv_head,
    by_query_head,
    complex_pairs,
    free_channels,
)


class GradientMoment(GradientStatistic):
    """Second moments of the loss gradient by keys and by what o_proj reads: what a change costs.

    Keys as complex pairs before rotation, E[g g^H], and their channels that never rotate, in the
    frame of PairMoment's keys; what o_proj reads by query head, as in ValueMoment.
    """

    need = "gradients"
    names = ("key_gradient", "free_gradient", "value_gradient")
    projections = ("k", "o")

    def __init__(self, layer: ObservedLayer):
        self.shape, geometry = layer.shape, layer.shape.geometry
        heads, width = layer.shape.num_kv_heads, layer.shape.head_dim
        self.pairs = layer.zeros("k", heads, geometry.num_pairs, geometry.num_pairs)
        self.pairs = self.pairs.to(torch.complex64)
        self.free = layer.zeros("k", heads, geometry.num_free, geometry.num_free)
        self.values = layer.zeros("o", layer.shape.num_heads, width, width)

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        geometry, width = layer.shape.geometry, layer.shape.head_dim
        keys = COMPLEX * geometry.num_pairs**2 + FLOAT * geometry.num_free**2
        values = layer.shape.num_heads * FLOAT * width**2
        return layer.shape.num_kv_heads * keys + values

    def update(self, role: str, gradient: Tensor) -> None:
        states_BTHD = split_heads(gradient, self.shape.head_dim)
        if role == "o":
            heads_HND = by_query_head(states_BTHD)
            self.values += heads_HND.mT @ heads_HND
            return
        heads_GND = by_kv_head(states_BTHD, self.shape)
        pairs_GNP = complex_pairs(heads_GND, self.shape)
        self.pairs += pairs_GNP.mT @ pairs_GNP.conj()
        free_GNF = free_channels(heads_GND, self.shape)
        self.free += free_GNF.mT @ free_GNF

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {
            "key_gradient": torch.view_as_real(self.pairs / num_tokens),
            "free_gradient": self.free / num_tokens,
            "value_gradient": self.values / num_tokens,
        }


def watch_gradients(
    moments: list[tuple[ObservedLayer, GradientStatistic]], step: CalibrationStep, tokens: int
) -> list[RemovableHandle]:
    """Hooks that hand the gradients of k's outputs and o's inputs to their statistics.

    One hook for each layer and each of its statistic's `projections`: of k the gradient by what the
    projection gives, of o by what it reads, [B, T, ...], float32, in nats (the loss is a mean over
    `tokens` - 1 predictions, the statistic sees the gradient of their sum). `step` says which
    windows are being read; a statistic says whether another module than the projection is watched.

    Returns the handles, for the caller to remove. A gradient that is not finite raises
    CalibrationError out of the backward pass, naming layer and window (`check_gradient`).
    """

    def attach(
        layer: ObservedLayer,
        statistic: GradientStatistic,
        role: str,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        outputs: Tensor,
    ) -> None:
        if not torch.is_grad_enabled():  # attention is run again (AveragedValues)
            return
        watched = inputs[0] if role == "o" else outputs
        watched.register_hook(partial(arrive, layer, statistic, role))

    def arrive(
        layer: ObservedLayer, statistic: GradientStatistic, role: str, gradient: Tensor
    ) -> None:
        taken = statistic.taken(layer, role, gradient)
        check_gradient(layer, role, taken, step.windows.start)
        # The loss is a mean over the window; moments are of the gradient of the sum.
        statistic.update(role, taken.float() * (tokens - 1))

    return [
        watched.register_forward_hook(partial(attach, layer, statistic, role))
        for layer, statistic in moments
        for role in statistic.projections
        if role in layer.linears
        if (watched := statistic.watched(layer, role)) is not None
    ]


def check_gradient(layer: ObservedLayer, role: str, gradient: Tensor, window: int) -> None:
    """Raise CalibrationError, naming layer and window, for a gradient that is not finite."""
    if not torch.isfinite(gradient).all():
        raise CalibrationError(
            f"layer {layer.index}, window {window}: the gradient of {role}_proj is not "
            "finite: calibrate in float32 or bfloat16, and check the weights"
        )
