"""Quantized weights, dense or pruned: the paper's plain rounding, and formats of libraries.

Every nn.Linear below the language-model head is quantized; embeddings, the head, norms and experts
stored as one tensor stay as they are.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.errors import RapError

GROUP = 32  # values that share a scale in `int4`, fewer where a pruned width is no multiple
NF4_BLOCK = 64  # weights that share a scale in `nf4`


def quantize_weights(model: PreTrainedModel, kind: str) -> Any:
    """Quantize the weights of a causal LM in place, and return it.

    rtn4-tensor: the paper's quantizer, round to nearest, 4 bits, symmetric, one scale a tensor. A
        simulation: values are rounded and kept in the model's dtype, so it saves no memory.
    int8: torchao, one scale a row; a byte a weight.
    int4: torchao, symmetric, one scale per 32 values of a row; in torchao's portable layout, which
        also holds a byte a weight.
    nf4: bitsandbytes, the 16 quantiles of a normal distribution, one float32 scale per 64
        weights of a matrix; two weights a byte.

    Take the fingerprint before: quantized weights are no plain tensors. Raises RapError for an
    unknown kind, a model that is quantized already, or a missing library.
    """
    if kind not in KINDS:
        raise RapError(f"unknown quantization {kind!r}: use one of {', '.join(KINDS)}")
    if getattr(model, "is_quantized", False) or any(_is_packed(one) for _, one in _linears(model)):
        raise RapError("this model is quantized already: start from the unquantized weights")
    KINDS[kind](model)
    return model


def round_to_nearest(weight: Tensor, bits: int) -> Tensor:
    """`weight` rounded to 2^bits - 1 levels, symmetric about zero, with one scale for all of it."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax() / largest
    if not scale > 0:
        return weight.clone()
    return (weight / scale).round().clamp(-largest, largest) * scale


@torch.no_grad()
def _rtn4_tensor(model: PreTrainedModel) -> None:
    for _, linear in _linears(model):
        linear.weight.copy_(round_to_nearest(linear.weight.float(), 4))


def _int8(model: PreTrainedModel) -> None:
    torchao = _torchao()
    _convert(model, torchao.Int8WeightOnlyConfig(), {name for name, _ in _linears(model)})


def _int4(model: PreTrainedModel) -> None:
    torchao = _torchao()
    granularity = importlib.import_module("torchao.quantization.granularity")
    by_group: dict[int, set[str]] = {}
    for name, linear in _linears(model):
        by_group.setdefault(_group(linear.in_features), set()).add(name)
    for group, names in by_group.items():
        shared = granularity.PerGroup(group)
        four_bits = getattr(torch, "int4")  # noqa: B009 - not in the type stubs
        config = torchao.IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=shared)
        _convert(model, config, names)


def _nf4(model: PreTrainedModel) -> None:
    library = _library("bitsandbytes", "bitsandbytes", "nf4")
    for name, linear in list(_linears(model)):
        model.set_submodule(name, _Nf4Linear(linear, library.functional))


KINDS: dict[str, Callable[[Any], None]] = {
    "rtn4-tensor": _rtn4_tensor,
    "int8": _int8,
    "int4": _int4,
    "nf4": _nf4,
}


class _Nf4Linear(nn.Linear):
    """A linear whose weights are packed as one long row, and unpacked for every product.

    Not bitsandbytes's own layer: on CPUs that (0.50) reads rows whose width is no multiple of the
    block with the scales of other blocks, and pruned projections have such widths.
    """

    def __init__(self, linear: nn.Linear, functional: Any):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        row = linear.weight.data.reshape(1, -1)
        settings = {"blocksize": NF4_BLOCK, "compress_statistics": False, "quant_type": "nf4"}
        packed, self.state = functional.quantize_4bit(row, **settings)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.unpack = functional.dequantize_4bit

    def forward(self, input: Tensor) -> Tensor:
        """The product with the weights as they are packed, in the input's dtype."""
        weight = self.unpack(self.weight, self.state).view(self.out_features, self.in_features)
        return nn.functional.linear(input, weight.to(input.dtype), self.bias)


def _convert(model: PreTrainedModel, config: Any, names: set[str]) -> None:
    """torchao's own conversion of the linears of these names."""
    _torchao().quantize_(model, config, filter_fn=lambda module, name: name in names)


def _torchao() -> Any:
    return _library("torchao.quantization", "torchao", "int8 and int4")


def _library(module: str, package: str, kinds: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RapError(f"quantization in {kinds} needs {package}: pip install {package}") from error


def _group(width: int) -> int:
    """The largest power of two up to GROUP that divides a width."""
    group = GROUP
    while width % group:
        group //= 2
    return group


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def _is_packed(linear: nn.Linear) -> bool:
    weight = linear.weight.data
    return type(weight) is not Tensor or not weight.is_floating_point()
