"""Where decoder layers come from, one at a time: a model in memory, or weights that are not.

Layers work in float32, whatever they are stored in, and every one is a copy that its caller may
change, and frees.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..checkpoint.reading import reading
from ..checkpoint.stored import Weights
from ..model.errors import RapError
from ..model.fingerprint import fingerprint_model
from ..model.layers import attention_spec, decoder_layers, text_decoder

REMOVE = "remove it and repeat the command"  # what to do about a damaged layer of a run before


class LayerSource(Protocol):
    """A model whose decoder layers are handed out one at a time.

    Of `model` the configuration and the modules count: its weights may be on the meta device, where
    they are not `in_memory`. `fingerprint` stands for the weights.
    """

    in_memory: ClassVar[bool]

    @property
    def model(self) -> Any: ...
    @property
    def fingerprint(self) -> str: ...

    def working(self, index: int) -> nn.Module:
        """A float32 copy of a layer, in evaluation mode and without gradients."""
        ...

    def attention(self, index: int) -> nn.Module | None:
        """The attention of a layer, if it has one, with its weights as they are stored."""
        ...

    def outside(self, *, head: bool = True, exact: bool = False) -> Any:
        """The model with all weights that work outside the layers, those of the head if asked.

        In the types that are stored if `exact`, else maybe in float32.
        """
        ...

    def whole(self, what: str) -> Any:
        """The model with all its weights; RapError, saying `what` needs it, if there is none."""
        ...

    def copy(self) -> "LayerSource":
        """The same layers, which may be kept otherwise than these."""
        ...

    def keep(self, index: int, layer: nn.Module, trained: Path | None = None) -> None:
        """Take over a working copy, which is rounded to what is stored.

        `trained` is the file of those of its tensors that changed.
        """
        ...


class LoadedLayers:
    """The layers of a model in memory: used on its devices, and kept in it."""

    in_memory: ClassVar[bool] = True

    def __init__(self, model: Any):
        self.model = model

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights as they are when it is first asked for."""
        return fingerprint_model(self.model)

    def working(self, index: int) -> nn.Module:
        """A float32 copy of a layer, in evaluation mode and without gradients."""
        layer: nn.Module = copy.deepcopy(text_decoder(self.model).layers[index]).float().eval()
        return layer.requires_grad_(False)

    def attention(self, index: int) -> nn.Module | None:
        """The model's own module."""
        spec = attention_spec(self.model.config)
        return getattr(text_decoder(self.model).layers[index], spec.attention, None)

    def outside(self, *, head: bool = True, exact: bool = False) -> Any:
        """The model itself."""
        return self.model

    def whole(self, what: str) -> Any:
        """The model itself."""
        return self.model

    def copy(self) -> "LoadedLayers":
        """Of a copy of the model."""
        return LoadedLayers(copy.deepcopy(self.model))

    @torch.no_grad()
    def keep(self, index: int, layer: nn.Module, trained: Path | None = None) -> None:
        """Write the parameters into the model; the copy continues with the values of its dtype."""
        mine = text_decoder(self.model).layers[index]
        for parameter, fitted in zip(mine.parameters(), layer.parameters(), strict=True):
            parameter.copy_(fitted)
            fitted.copy_(parameter)


class StoredLayers:
    """The layers of weights that are not in memory, read on a `device` when they are asked for.

    What works outside the layers is in float32 too, or if asked in the types that are stored, as in
    a model that was loaded. Of a layer that is kept, what was trained is read from its file.
    """

    in_memory: ClassVar[bool] = False

    def __init__(self, weights: Weights, device: str | torch.device = "cpu"):
        self.weights, self.device = weights, torch.device(device)
        self.changed = FiledTensors()

    @property
    def model(self) -> Any:
        """On the meta device."""
        return self.weights.model

    @property
    def fingerprint(self) -> str:
        """Of all weights."""
        return self.weights.fingerprint

    @cached_property
    def prefix(self) -> str:
        """The name of the list of layers in the model, with a dot behind."""
        first, _ = next(decoder_layers(self.model))
        return first.removesuffix("0")

    def working(self, index: int) -> nn.Module:
        """A float32 copy of a layer, in evaluation mode and without gradients."""
        layer: nn.Module = copy.deepcopy(text_decoder(self.model).layers[index])
        names = {name: f"{self.prefix}{index}.{name}" for name in layer.state_dict()}
        state = {name: self._read(full, torch.float32) for name, full in names.items()}
        layer.load_state_dict(state, assign=True)
        return layer.to(self.device).float().eval().requires_grad_(False)

    def attention(self, index: int) -> nn.Module | None:
        """The attention of a layer, if it has one, as it is stored, in host memory."""
        spec = attention_spec(self.model.config)
        module = getattr(text_decoder(self.model).layers[index], spec.attention, None)
        if module is None:
            return None
        module = copy.deepcopy(module)
        path = f"{self.prefix}{index}.{spec.attention}"
        state = {name: self._tensor(f"{path}.{name}") for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        return module.requires_grad_(False)

    def whole(self, what: str) -> Any:
        """Raise RapError: there is no such model."""
        raise RapError(f"{what} needs the whole model in memory; remove --stream")

    def outside(self, *, head: bool = True, exact: bool = False) -> Any:
        """A copy of the model with the weights of its decoder outside the layers, and the head."""
        model = copy.deepcopy(self.model)
        if not exact:
            model.float()
        parts = [text_decoder(model), *([model.get_output_embeddings()] if head else [])]
        named = model.state_dict(keep_vars=True)
        wanted = {id(x) for part in parts for x in part.state_dict(keep_vars=True).values()}
        read: dict[int, Tensor] = {}  # weights that are tied are read once
        state = {}
        for name, tensor in named.items():
            if id(tensor) in wanted and not name.startswith(self.prefix):
                if id(tensor) not in read:
                    read[id(tensor)] = self._read(name, None if exact else torch.float32)
                state[name] = read[id(tensor)]
        model.load_state_dict(state, assign=True, strict=False)
        for name, buffer in model.named_buffers():
            if not buffer.is_meta:
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, buffer.to(self.device))
        return model.requires_grad_(False)

    def copy(self) -> "StoredLayers":
        """Of the same weights, with what changed until now."""
        other = StoredLayers(self.weights, self.device)
        other.changed.places |= self.changed.places
        return other

    @torch.no_grad()
    def keep(self, index: int, layer: nn.Module, trained: Path | None = None) -> None:
        """Round the parameters to the types that are stored; read `trained` from now on."""
        assert trained is not None, "weights that are not in memory are kept in a file"
        if trained.is_file():
            self.changed.add(trained, f"{self.prefix}{index}.")
        for name, parameter in layer.named_parameters():
            parameter.copy_(parameter.to(self.weights.dtype(f"{self.prefix}{index}.{name}")))

    def _tensor(self, name: str) -> Tensor:
        if name in self.changed:
            return self.changed[name].to(self.weights.dtype(name))
        return self.weights.tensor(name)

    def _read(self, name: str, dtype: torch.dtype | None) -> Tensor:
        # A copy: what is read may be a view of the file.
        tensor = self._tensor(name)
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(self.device, wanted or tensor.dtype, copy=True)


class FiledTensors(Mapping[str, Tensor]):
    """Tensors of safetensors files, read when they are asked for; `places` are file and name."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[Path, str]] = {}

    def add(self, path: Path, prefix: str) -> None:
        """All tensors of a file, whose names get a prefix."""
        with _opened(path) as file:
            self.places |= {f"{prefix}{name}": (path, name) for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        path, stored = self.places[name]
        with _opened(path) as file:
            tensor: Tensor = file.get_tensor(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with reading(f"go on with {path}", REMOVE), safe_open(path, "pt") as file:
        yield file


def source_of(model: Any) -> LayerSource:
    """The layers of a model in memory, or what hands out layers already."""
    return model if isinstance(model, (LoadedLayers, StoredLayers)) else LoadedLayers(model)
