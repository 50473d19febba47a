"""A layer and its attention on a stream: what the one hands the other, and takes back.

Shapes: B windows of a batch, T tokens of a window, E model dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..model.layers import AttentionLayer
from ..runtime.layerwise import LayerwiseRunner
from ..runtime.state import removed
from .loss import last_outputs

PROPORTIONAL = 1e-2  # large streams leave few digits to what is added to them


def is_cut(layer: AttentionLayer, original: AttentionLayer) -> bool:
    """Whether a layer's attention is smaller than the dense model's.

    Whole heads can be cut into a stock model, whose attention is the family's own.
    """
    return layer.pruned or layer.shape != original.shape


class _Reached(Exception):
    """Ends a layer's pass once its attention is reached."""


@torch.no_grad()
def call_of(
    attention: nn.Module, stream: LayerwiseRunner, layer: nn.Module, index: int, rows: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a working layer calls its attention with for the windows `rows` of the stream."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Reached

    handle = attention.register_forward_pre_hook(see, with_kwargs=True)
    with removed([handle]), suppress(_Reached):
        stream.run(layer, index, stream.hidden[rows])
    return calls[0]


@contextmanager
def attention_outputs_of(attention: nn.Module) -> Iterator[list[Tensor]]:
    """A list that receives what an attention gives at every call inside; no gradients."""
    with last_outputs([attention]) as outputs, torch.no_grad():
        yield outputs


@torch.no_grad()
def residual_scale(
    stream: LayerwiseRunner,
    layer: nn.Module,
    attention: nn.Module,
    index: int,
    before: Tensor,
    added: Tensor,
) -> float | None:
    """The factor by which a layer adds its attention's output to the hidden states.

    `before` [B, T, E] is what the layer reads, and `added` what its attention then gives. None if
    it adds something else, such as a norm of the output. Found by looking: some module inside reads
    the sum, or, where the attention and the rest work side by side, the layer gives it.
    """
    seen: list[Tensor] = []

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].shape == before.shape:
            seen.append(args[0].cpu() - before)

    inside = set(attention.modules())
    others = [module for module in layer.modules() if module not in inside and module is not layer]
    with removed([module.register_forward_pre_hook(see) for module in others]):
        output = stream.run(layer, index, before).cpu()
    with removed([attention.register_forward_hook(_silenced)]):
        seen.append(output - stream.run(layer, index, before).cpu())
    scales = (_factor(change, added) for change in seen)
    return next((scale for scale in scales if scale is not None), None)


def _silenced(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return torch.zeros_like(output)
    return (torch.zeros_like(output[0]), *output[1:])


def _factor(change: Tensor, added: Tensor) -> float | None:
    """The s for which `change` is s times `added`, None if there is none but zero."""
    factor = float((change * added).sum() / added.square().sum())
    rest = (change - factor * added).norm()
    found = factor != 0 and rest <= PROPORTIONAL * abs(factor) * added.norm()
    return factor if found else None
