"""Models in another precision than they are stored in."""

import copy
from typing import Any

import torch

from ..checkpoint.stored import LOW, kept_in_float32
from ..model.errors import RapError
from .memory import free_memory


def for_calibration(model: Any) -> Any:
    """A float32 copy of a low-precision model on a CPU, if it takes at most half of what is free.

    Any other model is returned as it is. Most CPUs convert such numbers one by one: SmolLM2 in
    bfloat16 reads 37 tokens in the second in which it reads 231 in float32.
    """
    parameters = list(model.parameters())
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    if not on_cpu or model.dtype not in LOW or getattr(model, "is_quantized", False):
        return model
    num_bytes = sum(parameter.numel() * torch.float32.itemsize for parameter in parameters)
    if num_bytes > free_memory(torch.device("cpu")) / 2:
        return model
    return in_precision(model, torch.float32)


def in_precision(model: Any, dtype: torch.dtype | None) -> Any:
    """The model itself where it has that dtype or None is asked for, else a copy in it.

    Raises RapError for a quantized model, which cannot be cast.
    """
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    if dtype is None or all(found == dtype for found in floating):
        return model
    if getattr(model, "is_quantized", False):
        raise RapError("a quantized model cannot be cast: evaluate it as it is with dtype=None")
    return _cast(copy.deepcopy(model), dtype)


@torch.no_grad()
def _cast(model: Any, dtype: torch.dtype) -> Any:
    """The model in place as `from_pretrained(dtype=...)` would have loaded it.

    What is stored is cast, less what the family keeps in float32. Frequencies of RoPE are in no
    checkpoint, and stay as they were computed: rounding them turns far pairs by other angles.
    """
    kept = kept_in_float32(model, dtype)
    stored = model.state_dict(keep_vars=True)
    exact = {
        name: tensor.data.float()
        for name, tensor in stored.items()
        if tensor.is_floating_point() and any(pattern.search(name) for pattern in kept)
    }
    # After a forward pass longrope has one tensor under two names.
    buffers = model.named_buffers(remove_duplicate=False)
    computed = {name: x for name, x in buffers if name not in stored}
    model.to(dtype)  # modules that keep a tensor in float32 themselves (KeptNorm) do so here
    stored = model.state_dict(keep_vars=True)  # buffers are other tensors now
    for name, tensor in exact.items():
        stored[name].data = tensor
    for name, buffer in computed.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, buffer)
    return model
