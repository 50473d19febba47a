"""A model walked through layer by layer: what every decoder layer reads, for all windows at once.

One layer works at a time, on all windows, before the next one does, so that a layer can be changed
in between and those after it see what it gives now, and so that no other needs to be in memory.

Shapes: N windows, B windows of a batch, T tokens of a window, E model dim.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..checkpoint.files import no_room
from ..model.errors import RapError
from ..model.layers import attention_spec, text_decoder
from .memory import free_memory
from .progress import track
from .sources import LayerSource
from .state import evaluating

FLOAT = 4
HOST_SHARE = 1 / 8  # of the free memory of the host that one stream may take before it is mapped


class _Reached(Exception):
    """Ends a forward pass once the first layer is reached."""


def stand_alone(config: PreTrainedConfig) -> bool:
    """Whether each layer of a family works on what the one before gives, and on nothing else."""
    return attention_spec(config).value_norm is None


def check_layers(config: PreTrainedConfig) -> None:
    """Raise RapError for a family whose layers cannot be worked on one by one."""
    if not stand_alone(config):
        raise RapError(
            f"models of type {config.model_type} hand keys and values, or inputs of each layer, "
            "past it: their layers cannot be worked on one by one, by --stream, layer-wise "
            "distillation or a refit; recover end to end, by full, or by none"
        )


class LayerwiseRunner:
    """The hidden states of a model's decoder, [N, T, E] in float32, at the input of one layer.

    `hidden` starts with what the first layer reads. Layers work in float32, whatever the model is
    stored in, where their source puts them; the stream itself is in host memory, or, where it is
    large there, in a file of `folder` (see `new_stream`). What works before the layers does so in
    the types that are stored if `exact`.
    """

    def __init__(
        self,
        source: LayerSource,
        windows: Tensor,
        batch_size: int = 4,
        folder: Path | None = None,
        *,
        exact: bool = False,
    ):
        self.source, self.batch_size = source, min(batch_size, len(windows))
        self.folder, self.windows = folder, windows
        self.tuples: bool | None = None  # whether layers give one; known once one has run
        self.num_layers = len(text_decoder(source.model).layers)
        check_layers(source.model.config)
        model = source.outside(head=False, exact=exact)
        with evaluating(model):
            self.arguments = _layer_arguments(model, windows[: self.batch_size])
            for place, ids in zip(self.batches(), windows.split(self.batch_size), strict=True):
                first = _first_input(model, ids)
                if place.start == 0:
                    self.hidden = new_stream((len(windows), *first.shape[1:]), folder)
                self.hidden[place] = first

    def run(self, layer: nn.Module, index: int, rows: Tensor) -> Tensor:
        """What a (working) layer `index` gives for some windows of its input, [B, T, E]."""
        device = next(layer.parameters()).device
        output = layer(rows.to(device), **self.keywords(index, len(rows), device))
        self.tuples = not isinstance(output, Tensor)
        return output if isinstance(output, Tensor) else output[0]

    @torch.no_grad()
    def advance(self, layer: nn.Module, index: int) -> None:
        """Replace `hidden` by what the working layer gives for it."""
        for rows in self.batches():
            self.step(layer, index, rows)

    def step(self, layer: nn.Module, index: int, rows: slice) -> None:
        """`advance` for some windows."""
        self.hidden[rows] = self.run(layer, index, self.hidden[rows]).cpu()

    def walk(self, what: str, *, progress: bool = False) -> None:
        """Advance through all layers; `what` names the work."""
        layers, tokens = range(self.num_layers), self.windows.numel()
        for index in track(layers, what, "layers", tokens=tokens, shown=progress):
            self.advance(self.source.working(index), index)

    def batches(self) -> Iterator[slice]:
        """The windows in batches."""
        for start in range(0, len(self.windows), self.batch_size):
            yield slice(start, start + self.batch_size)

    def keywords(self, index: int, count: int, device: torch.device) -> dict[str, Any]:
        """The arguments of a layer in addition to its input, for a batch of `count` windows."""
        return {
            name: _placed(value, self.batch_size, count, device)
            for name, value in self.arguments[index].items()
        }

    @contextmanager
    def finished(self) -> Iterator[Any]:
        """The model, whose layers together give what this stream, walked to its end, has become.

        For its windows in order, as many at a time as are asked for; nothing else can be asked.
        """
        model, place = self.source.outside(), 0
        layers = list(text_decoder(model).layers)
        if self.tuples is None:
            self.run(self.source.working(0), 0, self.hidden[:1])

        def answer(index: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal place
            given: Tensor = args[0] if args else kwargs["hidden_states"]
            if index == len(layers) - 1:
                rows = self.hidden[place : place + len(given)]
                place += len(given)
                given = rows.to(given)
            return (given,) if self.tuples else given

        with _answered(layers, answer):
            yield model


@contextmanager
def answering(
    source: LayerSource,
    windows: Tensor,
    what: str,
    *,
    folder: Path | None = None,
    progress: bool = False,
) -> Iterator[Any]:
    """A model to call with the windows [N, T], one at a time and in order, and with no others.

    One in memory is that itself. Of weights in files all layers have seen the windows already, one
    after another in float32, which is the work that `what` names.
    """
    if source.in_memory:
        yield source.model
        return
    stream = LayerwiseRunner(source, windows, 1, folder)
    stream.walk(what, progress=progress)
    with stream.finished() as model:
        yield model


def new_stream(shape: tuple[int, ...], folder: Path | None = None) -> Tensor:
    """A float32 tensor in host memory, or mapped from a file where that would be large.

    The file is in `folder`, has no name, and goes when the tensor does. Raises RapError where there
    is no room for it.
    """
    size = torch.Size(shape).numel()
    if folder is None or size * FLOAT <= HOST_SHARE * free_memory(torch.device("cpu")):
        return torch.empty(shape, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        _reserve(file.fileno(), size * FLOAT, folder)
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=torch.float32)
    return mapped.view(shape)


def _reserve(file: int, size: int, folder: Path) -> None:
    """Take the room for a mapped file now: a full disk later would kill the process with SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if not no_room(error):
            return  # a file system that cannot reserve
        free = shutil.disk_usage(folder).free
        raise RapError(
            f"no space left in {folder}: {size / 2**30:,.1f} GiB of activations are held there, "
            f"{free / 2**30:,.1f} GiB are free: make room, or take fewer windows"
        ) from error


@contextmanager
def _answered(layers: list[nn.Module], answer: Callable[..., Any]) -> Iterator[None]:
    """`answer`, which gets a layer's index first, called in place of every layer's forward."""
    own = [vars(layer).get("forward") for layer in layers]
    try:
        for index, layer in enumerate(layers):
            vars(layer)["forward"] = partial(answer, index)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


@torch.no_grad()
def _layer_arguments(model: Any, ids_BT: Tensor) -> list[dict[str, Any]]:
    """The keyword arguments that the model gives each of its decoder layers for a batch."""
    layers = list(text_decoder(model).layers)
    dropped = ("hidden_states", "past_key_values", "past_key_value", "layer_past")
    seen: list[dict[str, Any]] = []

    def see(index: int, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1:
            raise RapError(
                f"{type(layers[index]).__name__} takes more than its input by position: its layers "
                "cannot be run one at a time"
            )
        seen.append({name: value for name, value in kwargs.items() if name not in dropped})
        read: Tensor = args[0] if args else kwargs["hidden_states"]
        return read

    with _answered(layers, see):
        _forward(model, ids_BT)
    return seen


@torch.no_grad()
def _first_input(model: Any, ids_BT: Tensor) -> Tensor:
    """What the first decoder layer reads, [B, T, E] float32 in host memory."""
    seen: list[Tensor] = []

    def see(index: int, *args: Any, **kwargs: Any) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    with _answered(list(text_decoder(model).layers), see), suppress(_Reached):
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
