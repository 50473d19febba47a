"""Which tensors the Triton kernels take."""

import importlib.util

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Asked before torch.compile looks, which cannot follow the question. Triton is not imported for it.
_INSTALLED = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _INSTALLED


def takes_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels run where this tensor lies, in its dtype."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and has_triton()


def reads_cache(tensor: Tensor) -> bool:
    """Whether the Triton kernels read a cache of this dtype where it lies.

    float8_e4m3fn needs compute capability 8.9 (Ada, Hopper), and is the only one of 8 bits.
    """
    if tensor.dtype == torch.float8_e4m3fn:
        return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= (8, 9)
    return tensor.dtype in _DTYPES
