"""transformers' quantized cache on layers of any width, keys and values apart.

transformers takes one group size for all layers, keys and values alike. Its backends want the group
to divide the numbers they get, and hqq, which packs 2 or 4 rows into one of bytes, an even number
of rows or a multiple of 4. Pruned layers have widths of their own, so here every tensor is cut into
the largest groups, up to the wanted size, that divide its width: a scale never spans two tokens or
two heads, and rows are filled up to what hqq packs.

Shapes: N rows of one group each, W values of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, HQQQuantizedLayer, QuantoQuantizedLayer

from ...checkpoint.provenance import installed_version
from ...model.errors import RapError

GROUP = 64  # values that share a scale, fewer where that does not divide the width
RESIDUAL = 128  # tokens after the prefix that are kept as they are, until there are so many


class _WholeGroups:
    """Quantizes rows of one group each; the group follows the width of what it is given."""

    nbits: int
    q_group_size: int

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Any, torch.Size]:
        # Both backends read it from here for each tensor.
        self.q_group_size = group_size(tensor.shape[-1])
        rows_NW = tensor.reshape(-1, self.q_group_size)
        spare = -len(rows_NW) % (8 // self.nbits)
        if spare:
            rows_NW = torch.cat([rows_NW, rows_NW[-1:].expand(spare, -1)])
        backend: Any = super()
        return backend._quantize(rows_NW, axis=axis), tensor.shape

    def _dequantize(self, held: tuple[Any, torch.Size]) -> Tensor:
        packed, shape = held
        backend: Any = super()
        rows_NW: Tensor = backend._dequantize(packed)
        return rows_NW.flatten()[: shape.numel()].view(shape)


class _HqqLayer(_WholeGroups, HQQQuantizedLayer):
    pass


class _QuantoLayer(_WholeGroups, QuantoQuantizedLayer):
    pass


@dataclass(frozen=True)
class _Backend:
    """A backend's layer, package, bits, and the axis that makes its groups rows."""

    name: str
    layer: Any
    package: str
    bits: tuple[int, ...]
    axis: int


_BACKENDS = (
    _Backend("hqq", _HqqLayer, "hqq", (8, 4, 3, 2), 1),
    _Backend("quanto", _QuantoLayer, "optimum-quanto", (4, 2), 0),
)
CACHE_KINDS = {f"{one.name}{bits}": (one, bits) for one in _BACKENDS for bits in one.bits}


def check_cache_kind(kind: str) -> None:
    """Raise RapError for an unknown kind of cache, or one whose package is missing."""
    if kind not in CACHE_KINDS:
        raise RapError(f"unknown cache {kind!r}: use one of {', '.join(CACHE_KINDS)}")
    package = CACHE_KINDS[kind][0].package
    if installed_version(package) is None:
        raise RapError(
            f"a cache in {kind} needs {package}, which is not installed: pip install {package}"
        )


def quantized_cache(model: PreTrainedModel, kind: str) -> Cache:
    """An empty cache of quantized layers for a dense or pruned causal LM, by a key of CACHE_KINDS.

    What is read first is quantized at once; later tokens stay as they are until there are RESIDUAL
    of them, then the whole cache is quantized again, as transformers does it. Every step makes
    full keys and values of all of it: this saves memory, not time.

    Raises RapError for what `check_cache_kind` refuses, or layers without full attention.
    """
    check_cache_kind(kind)
    backend, bits = CACHE_KINDS[kind]
    layers = DynamicCache(config=model.config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd:
        raise RapError(
            f"transformers quantizes caches of full attention only, and this model has"
            f" {', '.join(odd)}: leave its cache as it is"
        )
    settings = {"axis_key": backend.axis, "axis_value": backend.axis, "residual_length": RESIDUAL}
    return Cache(layers=[backend.layer(nbits=bits, **settings) for _ in layers])


def group_size(width: int) -> int:
    """The largest divisor of a width that is at most GROUP."""
    return next(size for size in range(min(width, GROUP), 0, -1) if width % size == 0)
