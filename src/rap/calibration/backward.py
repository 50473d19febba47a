"""Gradients of the loss by keys and by what o_proj reads: what calibration's backward pass watches.

And the loss of a window with its gradient above the layers, the output layer in chunks of tokens.

Shapes: B batch, T tokens, C tokens of a chunk, E model dim, V vocabulary, H query heads, G KV
heads, D head dim, P pairs, F channels that never rotate.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle

from ..model.errors import CalibrationError
from ..model.layers import split_heads
from ..runtime.logits import Head, chunk_tokens
from .observers import (
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

    def update(self, projection: str, gradient: Tensor) -> None:
        states_BTHD = split_heads(gradient, self.shape.head_dim)
        if projection == "o":
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
        projection: str,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        outputs: Tensor,
    ) -> None:
        if not torch.is_grad_enabled():  # attention is run again (AveragedValues)
            return
        watched = inputs[0] if projection == "o" else outputs
        watched.register_hook(partial(arrive, layer, statistic, projection))

    def arrive(
        layer: ObservedLayer, statistic: GradientStatistic, projection: str, gradient: Tensor
    ) -> None:
        taken = statistic.taken(layer, projection, gradient)
        check_gradient(layer, projection, taken, step.windows.start)
        # The loss is a mean over the window; moments are of the gradient of the sum.
        statistic.update(projection, taken.float() * (tokens - 1))

    return [
        watched.register_forward_hook(partial(attach, layer, statistic, projection))
        for layer, statistic in moments
        for projection in statistic.projections
        if projection in layer.linears
        if (watched := statistic.watched(layer, projection)) is not None
    ]


def check_gradient(layer: ObservedLayer, projection: str, gradient: Tensor, window: int) -> None:
    """Raise CalibrationError, naming layer and window, for a gradient that is not finite."""
    if not torch.isfinite(gradient).all():
        raise CalibrationError(
            f"layer {layer.index}, window {window}: the gradient of {projection}_proj is not "
            "finite: calibrate in float32 or bfloat16, and check the weights"
        )


def next_token_loss(model: Any, ids_BT: Tensor) -> Tensor:
    """Mean next-token cross-entropy in float32."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    return cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten().to(logits_BTV.device))


@torch.enable_grad()
def output_gradient(model: Any, output: Any, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`next_token_loss`, and its gradient [B, T, E] by what the decoder gave.

    `output` is what the module below the head (`logits.decoder_of`) returned for the tokens; no
    layer is run or differentiated. Logits and their gradients are held for a chunk at a time.
    """
    hidden_BTE = output.last_hidden_state.detach().requires_grad_()
    hidden_NE, targets_N = hidden_BTE[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
    step, loss = chunk_tokens(model), torch.zeros(())
    chunks = Head(model).chunks(output, hidden_NE, step)
    for logits_CV, targets_C in zip(chunks, targets_N.split(step), strict=True):
        logits_CV = logits_CV.float()
        total = cross_entropy(logits_CV, targets_C.to(logits_CV.device), reduction="sum")
        part = total / len(targets_N)
        part.backward()
        loss = loss.to(part.device) + part.detach()
    assert hidden_BTE.grad is not None
    return loss, hidden_BTE.grad
