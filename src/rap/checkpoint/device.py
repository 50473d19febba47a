"""Where models work: one meaning of a device's name, in every command and function."""

from typing import Any

import torch
from rich.console import Console

from ..model.errors import CheckpointError
from .provenance import device_name

AUTO = "auto"


def working_device(device: str | torch.device = AUTO) -> torch.device:
    """The device of a name such as `cpu` or `cuda:1`; of `auto`, the GPU if there is one, else cpu.

    A GPU with a number becomes the current one of this process: a trainer works there.

    Raises CheckpointError for an unknown device, or one that this machine lacks.
    """
    if device == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(
            f"no device {device!r} on this machine; use auto, cpu or cuda"
        ) from error
    if found.type == "cuda" and found.index is not None:
        torch.cuda.set_device(found)
    return found


def placement(device: str | torch.device = AUTO, device_map: str | None = None) -> dict[str, Any]:
    """Where a model is loaded, as arguments of `from_pretrained`; none for the CPU.

    `device_map` spreads a model that is larger than one device. Raises CheckpointError as
    `working_device`, and for both a device and a map.
    """
    if device_map is not None:
        if device != AUTO:
            raise CheckpointError(
                f"--device {device} and --device-map {device_map} exclude each other; use "
                "--device-map only for a model larger than one device"
            )
        return {"device_map": device_map}
    found = working_device(device)
    return {} if found.type == "cpu" else {"device_map": str(found)}


def say_device(where: Any) -> None:
    """Print on standard error where a model runs, or that a device is the one that is used."""
    placed = getattr(where, "hf_device_map", None) or {}
    names = sorted({str(device) for device in placed.values()})
    if len(names) > 1:
        shown = f"spread over {', '.join(names)}"
    else:
        shown = describe_device(torch.device(getattr(where, "device", where)))
    console = Console(stderr=True, markup=False, soft_wrap=True)
    console.print(f"device: {shown}", highlight=False)


def describe_device(device: torch.device) -> str:
    """A device with the name of its hardware, such as `cuda:0 (NVIDIA H100)`."""
    name = device_name(device.type) if device.type in ("cpu", "cuda") else ""
    if device.type == "cuda" and device.index:
        name = torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return name
    return f"{device} ({name})" if name else str(device)
