"""The type in which matrices are multiplied in training, whatever type they are kept in."""

from typing import Literal

import torch
from torch import nn

Products = Literal["auto", "float32", "bfloat16"]


def multiplies_bfloat16(device: torch.device, products: Products) -> bool:
    """Whether products are in bfloat16: as asked for, or where a device of that kind has them."""
    if products != "auto":
        return products == "bfloat16"
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def multiplying(module: nn.Module, products: Products) -> torch.autocast:
    """A context in which `module`, if it is in float32, multiplies matrices by `products`."""
    first = next(module.parameters())
    half = first.dtype == torch.float32 and multiplies_bfloat16(first.device, products)
    return torch.autocast(first.device.type, torch.bfloat16, enabled=half)
