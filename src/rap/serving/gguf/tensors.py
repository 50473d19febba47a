"""Weights as GGUF names, orders and stores them.

Shapes: H heads, m pairs, E inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ...checkpoint.gguf_header import FREQUENCY_FACTORS
from ...model.errors import RapError
from ...model.fingerprint import tied_names
from .plain import frequency_factors, head_width

# Name, how matrices are stored, and the number by which GGUF calls such a file.
TYPES: dict[str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


@dataclass(frozen=True)
class Stored:
    """One tensor of the file. `stored_as` is its type, `shape` counts values, not bytes."""

    name: str
    shape: tuple[int, ...]
    stored_as: gguf.GGMLQuantizationType
    weight: Tensor
    num_heads: int = 0  # of a tensor whose heads change from half-split to interleaved

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, without padding."""
        block, size = gguf.GGML_QUANT_SIZES[self.stored_as]
        return int(np.prod(self.shape)) // block * size

    def data(self) -> np.ndarray:
        """The bytes to write, as an array of what GGUF's writer takes for the type."""
        weight = self.weight.detach().float().cpu()
        if self.num_heads:
            weight = interleaved(weight, self.num_heads)
        return gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), self.stored_as)


def stored_tensors(model: Any, kind: str) -> Iterator[Stored]:
    """All tensors of a plain model in GGUF's names, matrices as `kind`, one of TYPES.

    Norms, biases and frequency factors stay float32, and so does llama.cpp's own arithmetic on
    them. The output projection is left out where it is the embedding. RapError for an unknown kind.
    """
    if kind not in TYPES:
        raise RapError(f"unknown type {kind!r}: use one of {', '.join(TYPES)}")
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    factors = frequency_factors(model)
    if factors is not None:
        listed = torch.tensor(factors)
        assert len(listed) == head_width(config) // 2
        yield Stored(FREQUENCY_FACTORS, tuple(listed.shape), TYPES["f32"][0], listed)
    tied = tied_names(model)
    for name, weight in model.state_dict().items():
        if name in tied:
            continue
        if name.endswith("o_proj.bias") and not weight.any():
            continue  # a Qwen2 as a Llama has a zero bias that no file needs
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise RapError(f"{name} has no name in llama.cpp's Llama: export another model")
        role = name.split(".")[-2]
        stored_as = _type_of(weight, TYPES[kind][0])
        yield Stored(known, tuple(weight.shape), stored_as, weight, heads.get(role, 0))


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of every head [2m, ...] from [first halves | second halves] to pairs side by side.

    Transformers rotates channel i with i + m, llama.cpp's Llama channel 2i with 2i + 1.
    """
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def _type_of(weight: Tensor, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if weight.dim() == 1:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    # Rows that are no whole number of blocks, such as W_o's for 9 heads of 48, stay unquantized.
    return wanted if weight.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
