"""A model walked through layer by layer: what every decoder layer reads, for all windows at once.

One layer works at a time, on all windows, before the next one does, so that a layer can be changed
in between and those after it see what it gives now.

Shapes: N windows, B windows of a batch, T tokens of a window, E model dim.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.state import removed
from ..model.errors import RapError
from ..model.layers import text_decoder
from .matching import last_outputs

PROPORTIONAL = 1e-2  # large streams leave few digits to what is added to them


class _Reached(Exception):
    """Ends a forward pass once the first layer is reached."""


class Stream:
    """The residual stream of a model's decoder, [N, T, E] in float32, at the input of one layer.

    `hidden` starts with what the first layer reads. Layers work in float32, whatever the model is
    stored in, on the device where their weights are; the stream itself is in host memory.
    """

    def __init__(self, model: Any, windows: Tensor, batch_size: int = 4):
        self.model, self.batch_size = model, min(batch_size, len(windows))
        self.layers: list[nn.Module] = list(text_decoder(model).layers)
        self.arguments = _layer_arguments(model, windows[: self.batch_size])
        embedded = [_first_input(model, ids) for ids in windows.split(self.batch_size)]
        self.hidden = torch.cat(embedded)

    def working(self, index: int) -> nn.Module:
        """A float32 copy of a layer, in evaluation mode and without gradients."""
        layer = copy.deepcopy(self.layers[index]).float().eval()
        return layer.requires_grad_(False)

    def run(self, layer: nn.Module, index: int, rows: Tensor) -> Tensor:
        """What a (working) layer `index` gives for some windows of its input, [B, T, E]."""
        device = next(layer.parameters()).device
        output = layer(rows.to(device), **self.keywords(index, len(rows), device))
        return output if isinstance(output, Tensor) else output[0]

    @torch.no_grad()
    def advance(self, layer: nn.Module, index: int) -> None:
        """Replace `hidden` by what the working layer gives for it."""
        for rows in self.batches():
            self.hidden[rows] = self.run(layer, index, self.hidden[rows]).cpu()

    def batches(self) -> Iterator[slice]:
        """The windows in batches."""
        for start in range(0, len(self.hidden), self.batch_size):
            yield slice(start, start + self.batch_size)

    def keywords(self, index: int, count: int, device: torch.device) -> dict[str, Any]:
        """What a layer is called with beside its input, for a batch of `count` windows."""
        return {
            name: _placed(value, self.batch_size, count, device)
            for name, value in self.arguments[index].items()
        }


@torch.no_grad()
def call_of(
    attention: nn.Module, stream: Stream, layer: nn.Module, index: int, rows: Tensor
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
    stream: Stream,
    layer: nn.Module,
    attention: nn.Module,
    index: int,
    before: Tensor,
    added: Tensor,
) -> float | None:
    """The factor by which a layer adds its attention's output to the residual stream.

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


@torch.no_grad()
def _layer_arguments(model: Any, ids_BT: Tensor) -> list[dict[str, Any]]:
    """The keyword arguments that the model gives each of its decoder layers for a batch."""
    layers = list(text_decoder(model).layers)
    seen: list[dict[str, Any]] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if len(args) > 1:
            raise RapError(
                f"{type(module).__name__} takes more than its input by position: fit cannot call "
                "it by itself"
            )
        dropped = ("hidden_states", "past_key_values", "past_key_value", "layer_past")
        seen.append({name: value for name, value in kwargs.items() if name not in dropped})

    handles = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers]
    with removed(handles):
        _forward(model, ids_BT)
    return seen


@torch.no_grad()
def _first_input(model: Any, ids_BT: Tensor) -> Tensor:
    """What the first decoder layer reads, [B, T, E] float32 in host memory."""
    seen: list[Tensor] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    first = text_decoder(model).layers[0]
    handle = first.register_forward_pre_hook(see, with_kwargs=True)
    with removed([handle]), suppress(_Reached):
        _forward(model, ids_BT)
    return seen[0].float().cpu()


def _forward(model: Any, ids_BT: Tensor) -> None:
    device = model.get_input_embeddings().weight.device
    model.base_model(input_ids=ids_BT.to(device), use_cache=False)


def _placed(value: Any, batch_size: int, count: int, device: torch.device) -> Any:
    """A keyword argument for `count` windows of a batch of `batch_size`, floats in float32."""
    if isinstance(value, Tensor):
        taken = value[:count] if value.ndim > 0 and len(value) == batch_size > 1 else value
        return taken.to(device, torch.float32 if value.is_floating_point() else value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)(_placed(item, batch_size, count, device) for item in value)
    return value
