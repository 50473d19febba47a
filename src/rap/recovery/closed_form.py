"""Closed-form recovery: refit every layer's output projection to the dense model's attention.

Layer by layer, with the layers before already refitted, W_o' minimises
    sum over tokens ||Z W' - Y||^2 + ridge ||W' - W_o||^2
where Z is what the pruned layer hands to o_proj and Y what the dense layer's attention adds to the
residual stream. One linear solve per layer, no gradient, nothing added at run time.

Shapes: N tokens, K = H C inputs of o_proj, E model dim.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibration.progress import track
from ..calibration.state import evaluating, removed
from ..model.errors import RapError
from ..model.layers import AttentionLayer, attention_layers, attention_spec, projections

RIDGE = 1e-3
HELD_OUT = 0.25


class _Reached(Exception):
    """Ends a forward pass once the wanted layer has been seen."""


@dataclass(frozen=True)
class LayerRefit:
    """Relative squared error of one layer's attention output on held-out windows."""

    layer: int
    before: float
    after: float

    @property
    def kept(self) -> bool:
        """Whether the refitted projection was better and is in the model."""
        return self.after < self.before


@torch.no_grad()
def refit_outputs(
    small: PreTrainedModel,
    dense: PreTrainedModel,
    windows: Tensor,
    *,
    ridge: float = RIDGE,
    held_out: float = HELD_OUT,
    batch_size: int = 8,
    progress: bool = False,
) -> list[LayerRefit]:
    """Refit W_o of every pruned layer of `small` in place; the better of old and new is kept.

    `windows` [num, T] are split: the last `held_out` share judges, the rest fits. `ridge` is
    relative to the mean diagonal of Z^T Z. Memory per layer is K x K + K x E in float64, whatever
    the number of tokens; time is about (layers + 1) / 2 forward passes of both models. Raises
    RapError for too few windows or a layer whose statistics are not finite.
    """
    num_fit = round(len(windows) * (1 - held_out))
    if not 0 < num_fit < len(windows):
        raise RapError(f"{len(windows)} windows cannot be split to fit and judge: give at least 2")
    fit, judge = windows[:num_fit].split(batch_size), windows[num_fit:].split(batch_size)
    dense_layers = attention_layers(dense)
    results = []
    with evaluating(small), evaluating(dense):
        layers = attention_layers(small)
        for layer in track(layers, "refitting outputs", "layers", shown=progress):
            original = dense_layers[layer.index]
            # Whole heads can be cut into a stock model, whose attention is the family's own.
            if hasattr(layer.module, "dense_shape") or layer.shape != original.shape:
                results.append(_refit(_Pair(small, layer, dense, original), fit, judge, ridge))
    return results


class _Pair:
    """One layer of both models, and what their o_proj see and give on a batch."""

    def __init__(
        self,
        small: PreTrainedModel,
        layer: AttentionLayer,
        dense: PreTrainedModel,
        dense_layer: AttentionLayer,
    ):
        self.small, self.dense, self.index = small, dense, layer.index
        self.linear = projections(layer, attention_spec(small.config))["o"]
        self.target = projections(dense_layer, attention_spec(dense.config))["o"]

    def batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Z [N, K] of the pruned layer and the residual Y - Z W_o - b [N, E], in float64."""
        inputs, output = _seen(self.small, self.linear, ids)
        _, wanted = _seen(self.dense, self.target, ids)
        return inputs.double(), wanted.double().to(output.device) - output.double()


def _refit(
    pair: _Pair, fit: tuple[Tensor, ...], judge: tuple[Tensor, ...], ridge: float
) -> LayerRefit:
    weight = pair.linear.weight
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    cross = torch.zeros(weight.shape[1], weight.shape[0], dtype=torch.float64, device=weight.device)
    for ids in fit:
        inputs, residual = pair.batch(ids)
        gram += inputs.T @ inputs
        cross += inputs.T @ residual
    if not (torch.isfinite(gram).all() and torch.isfinite(cross).all()):
        raise RapError(f"layer {pair.index}: activations are not finite, refit in float32")
    gram.diagonal().add_(ridge * gram.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
    change = torch.linalg.solve(gram, cross).T.to(weight.dtype).double()
    before = after = total = 0.0
    for ids in judge:
        inputs, residual = pair.batch(ids)
        before += float(residual.square().sum())
        after += float((residual - inputs @ change.T).square().sum())
        total += float((residual + inputs @ weight.double().T).square().sum())
    if after < before:
        weight += change.to(weight.dtype)
    return LayerRefit(pair.index, before / total, after / total)


def _seen(model: Any, linear: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output [N, .] of one projection on a batch of ids; later layers do not run."""
    seen: list[Tensor] = []

    def take(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend((inputs[0].flatten(0, -2), output.flatten(0, -2)))
        raise _Reached

    with removed([linear.register_forward_hook(take)]), suppress(_Reached):
        model.base_model(
            input_ids=ids.to(model.get_input_embeddings().weight.device), use_cache=False
        )
    return seen[0], seen[1]
