"""Tensors of every layer in one safetensors file, everything else as JSON in its header: no pickle.

How plans, replacements and statistics are kept.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..model.errors import RapError
from .files import whole_file

Layers = Sequence[Mapping[str, Tensor] | None]
Decoded = TypeVar("Decoded")
_DIGEST = "sha256"


@dataclass(frozen=True)
class TensorFile:
    """One kind of such files.

    `key` is its name in the file, `what` in a sentence; files up to `version` can be read. `error`
    is raised for any other file, and names the `remedy`.
    """

    key: str
    version: int
    what: str
    error: type[RapError]
    remedy: str

    def save(self, path: str | Path, layers: Layers, about: Mapping[str, Any]) -> None:
        """Write the tensors of every layer (None: none) and JSON-able `about` atomically.

        Raises CheckpointError where the file cannot be made.
        """
        tensors = {
            # Copies: the format refuses one tensor under two names.
            f"layers.{index}.{name}": tensor.clone(memory_format=torch.contiguous_format)
            for index, layer in enumerate(layers)
            for name, tensor in (layer or {}).items()
        }
        header = json.dumps({"version": self.version, **about})
        metadata = {"format": self._format, self.key: header, _DIGEST: _digest(header, tensors)}
        with whole_file(path) as partial:
            save_file(tensors, partial, metadata=metadata)

    def load(
        self,
        path: str | Path,
        make: Callable[[dict[str, Any], Callable[[int], dict[str, Tensor]]], Decoded],
    ) -> Decoded:
        """What `make` gives for `about` and a function from a layer's index to its tensors.

        Raises `error` if the file is of another kind, of a newer version, or damaged.
        """
        header, tensors = self._read(path)
        if header.get("format") != self._format:
            raise self.error(f"{path} does not hold {self.what}: {self.remedy}")
        # Files of releases before the digest have none.
        if _DIGEST in header and header[_DIGEST] != _digest(header.get(self.key, ""), tensors):
            raise self.error(f"{path} is damaged (not what was written): {self.remedy}")
        try:
            about = json.loads(header[self.key])
            if about["version"] <= self.version:
                return make(about, lambda index: _of_layer(tensors, index))
        except (AttributeError, KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise self.error(f"{path} is damaged ({error}): {self.remedy}") from error
        raise self.error(
            f"{path} has {self.key} version {about['version']}, this release reads up to "
            f"{self.version}: upgrade the package"
        )

    def wrote(self, path: str | Path) -> bool:
        """Whether a file is of this kind; `error` if it cannot be read at all."""
        return self._read(path, tensors=False)[0].get("format") == self._format

    @property
    def _format(self) -> str:
        return f"rap-{self.key}"

    def _read(
        self, path: str | Path, *, tensors: bool = True
    ) -> tuple[dict[str, str], dict[str, Tensor]]:
        try:
            with safe_open(path, "pt") as file:
                names = file.keys() if tensors else ()
                return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            why = _why(Path(path), error)
            raise self.error(f"cannot read {self.what} from {path}: {why} {self.remedy}") from error


def _why(path: Path, error: Exception) -> str:
    """Why a file cannot be read: safetensors itself speaks of devices and headers."""
    if path.is_dir():
        return "it is a directory, name the file, or"
    if not path.exists():
        return "there is no such file, check the path, or"
    if isinstance(error, SafetensorError):
        return "it is of another kind, or damaged:"
    return f"{error}:"


def _of_layer(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    start = f"layers.{index}."
    return {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all that a file says: a changed bit would be another cut, and nobody would see it."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
