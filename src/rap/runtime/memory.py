"""Memory that is free, estimates of it for people, and models in the precision it allows."""

import copy
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from ..checkpoint.stored import LOW, kept_in_float32
from ..model.errors import RapError

CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
CONTAINER_STATISTICS = "/sys/fs/cgroup/memory.stat"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; of a CPU those that a process can have without swapping."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(int(psutil.virtual_memory().available), _container_room())


def _container_room() -> int:
    """Bytes that the process's container may still take, which are fewer than the machine's."""
    try:
        limit, used = (int(Path(name).read_text()) for name in CONTAINER)
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return sys.maxsize
    return max(0, limit - used + _file_cache())


def _file_cache() -> int:
    """Bytes that were read from files: they count as used, and are given up for anything else."""
    try:
        lines = Path(CONTAINER_STATISTICS).read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def describe_memory(
    estimate: dict[str, int],
    what: str = "calibration needs about",
    beside: str = "in addition to the weights",
) -> str:
    """The estimate as one line for people."""
    parts = ", ".join(
        f"{name} {_mebibytes(size)}" for name, size in estimate.items() if name != "total"
    )
    return f"{what} {_mebibytes(estimate['total'])} {beside} ({parts})"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def in_fast_precision(model: Any) -> Any:
    """A float32 copy of a low-precision model on a CPU, if it takes at most half of what is free.

    Any other model is returned as it is. Most CPUs convert such numbers one by one: SmolLM2 in
    bfloat16 reads 37 tokens in the second in which it reads 231 in float32, and Gemma 3 270M writes
    15 instead of 120.
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
