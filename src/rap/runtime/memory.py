"""Memory that is free, and estimates of memory as a line for people."""

import sys
from pathlib import Path

import psutil
import torch

CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")


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
    return max(0, limit - used)


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
