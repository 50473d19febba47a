"""Closed-form recovery: refit every layer's output projection to the dense model's attention.

Layer by layer, with the layers before already refitted, W_o' minimises
    sum over tokens ||Z W' - Y||^2 + RIDGE ||W' - W_o||^2
where Z is what the pruned layer hands to o_proj and Y what the dense layer's attention adds to the
residual stream. One linear solve per layer, no gradient, nothing added at run time.

Shapes: N tokens, K = H C inputs of o_proj, E model dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.errors import RapError
from ..model.layers import (
    AttentionLayer,
    attention_layers,
    attention_spec,
    projections,
    text_decoder,
)
from ..runtime.layerwise import LayerwiseRunner
from ..runtime.progress import track
from ..runtime.sources import LoadedLayers
from ..runtime.state import removed
from .streams import is_cut

RIDGE = 1e-3  # of the mean diagonal of Z^T Z: enough for directions that no token has
HELD_OUT_SHARE = 0.25  # of the windows, the last ones: they judge what the others fit
BATCH = 8  # windows that a layer works on at a time


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
    progress: bool = False,
) -> list[LayerRefit]:
    """Refit W_o of every pruned layer of `small` in place; the better of old and new is kept.

    `windows` [num, T] are split: the last HELD_OUT_SHARE judges, the rest fits. Layers work in
    float32, and sums are in float64. Memory is two streams of all tokens, a layer of each model,
    and two matrices of K x K and two of K x E in float64; time is three forward passes. Raises
    RapError for too few windows or a layer whose statistics are not finite.
    """
    num_fit = min(round(len(windows) * (1 - HELD_OUT_SHARE)), len(windows) - 1)
    if num_fit < 1:
        raise RapError(
            f"{len(windows)} windows cannot be split into training and held-out; use at least 2"
        )
    mine, theirs = (
        LayerwiseRunner(LoadedLayers(model), windows, BATCH) for model in (small, dense)
    )
    layers, dense_layers = attention_layers(small), attention_layers(dense)
    results = []
    for layer in track(layers, "refitting outputs", "layers", shown=progress):
        original = dense_layers[layer.index]
        ours, other = (stream.source.working(layer.index) for stream in (mine, theirs))
        if is_cut(layer, original):
            pair = _Pair(mine, theirs, ours, other, layer, original)
            results.append(_refit(pair, num_fit))
        else:
            theirs.advance(other, layer.index)
        mine.advance(ours, layer.index)
    return results


class _Pair:
    """One working layer of both models on their streams, and what their o_proj see and give."""

    def __init__(
        self,
        small: LayerwiseRunner,
        dense: LayerwiseRunner,
        layer: nn.Module,
        dense_layer: nn.Module,
        cut: AttentionLayer,
        original: AttentionLayer,
    ):
        self.small, self.dense, self.layer, self.dense_layer = small, dense, layer, dense_layer
        self.index = cut.index
        self.kept = _output_of(small, cut)
        self.linear = _same_place(self.kept, small, layer, cut.index)
        self.target = _same_place(_output_of(dense, original), dense, dense_layer, cut.index)

    def batches(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First window, Z [B, T, K] of the pruned layer, and Y - Z W_o - b [B, T, E], in float64.

        The dense stream goes on to the next layer.
        """
        for rows in self.small.batches():
            with _seen_by(self.linear) as seen, _seen_by(self.target) as wanted:
                self.small.run(self.layer, self.index, self.small.hidden[rows])
                self.dense.step(self.dense_layer, self.index, rows)
            (inputs, output), (_, target) = seen.pop(), wanted.pop()
            yield rows.start, inputs.double(), target.double().to(output.device) - output.double()

    def change(self, change: Tensor) -> None:
        """Add to the output projection, in the type the model has it in."""
        self.kept.weight += change.to(self.kept.weight)
        self.linear.weight.copy_(self.kept.weight)


class _Sums:
    """Z^T Z and Z^T R of residuals R, their squared size, and that of what is wanted."""

    def __init__(self, weight_EK: Tensor):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=weight_EK.device)

        self.weight = weight_EK.double()
        self.gram = zeros(weight_EK.shape[1], weight_EK.shape[1])
        self.cross = zeros(weight_EK.shape[1], weight_EK.shape[0])
        self.residual = self.wanted = 0.0

    def add(self, inputs_BTK: Tensor, residual_BTE: Tensor) -> None:
        """More tokens."""
        inputs, residual = inputs_BTK.flatten(0, -2), residual_BTE.flatten(0, -2)
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ residual
        self.residual += float(residual.square().sum())
        self.wanted += float((residual + inputs @ self.weight.T).square().sum())

    def after(self, change_EK: Tensor) -> float:
        """Squared residual once the weight has changed: |R - Z C^T|^2, multiplied out."""
        quadratic = (self.gram @ change_EK.T * change_EK.T).sum()
        return self.residual - float(2 * (self.cross * change_EK.T).sum() - quadratic)


def _refit(pair: _Pair, num_fit: int) -> LayerRefit:
    weight = pair.linear.weight
    fit, judge = _Sums(weight), _Sums(weight)
    for first, inputs, residual in pair.batches():
        count = min(max(num_fit - first, 0), len(inputs))
        fit.add(inputs[:count], residual[:count])
        judge.add(inputs[count:], residual[count:])
    gram = fit.gram
    if not (torch.isfinite(gram).all() and torch.isfinite(fit.cross).all()):
        raise RapError(f"layer {pair.index}: activations are not finite, refit in float32")
    gram.diagonal().add_(RIDGE * gram.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
    change = torch.linalg.solve(gram, fit.cross).T.to(pair.kept.weight.dtype).double()
    before, after = judge.residual, judge.after(change)
    if after < before:
        pair.change(change)
    wanted = judge.wanted or 1.0  # a layer that adds nothing has no size to compare with
    return LayerRefit(pair.index, before / wanted, after / wanted)


def _output_of(stream: LayerwiseRunner, layer: AttentionLayer) -> nn.Linear:
    """The output projection of a layer of the stream's model."""
    found: nn.Linear = projections(layer, attention_spec(stream.source.model.config))["o"]
    return found


def _same_place(wanted: nn.Module, stream: LayerwiseRunner, working: nn.Module, index: int) -> Any:
    """The module of a working layer that stands where `wanted` does in the model."""
    layer = text_decoder(stream.source.model).layers[index]
    name = next(name for name, module in layer.named_modules() if module is wanted)
    return working.get_submodule(name)


@contextmanager
def _seen_by(linear: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """A list that receives input and output of every call of a projection inside."""
    seen: list[tuple[Tensor, Tensor]] = []

    def take(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0], output))

    with removed([linear.register_forward_hook(take)]):
        yield seen
