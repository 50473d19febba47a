"""What a result must carry to be repeated: versions, device, seed and the command."""

import importlib.metadata
import platform
import sys
import time
from typing import Any

import torch

from .version import __version__

PACKAGES = ("torch", "transformers", "safetensors", "peft", "accelerate", "datasets")


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    """The accelerator in use, or the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def provenance(**settings: Any) -> dict[str, Any]:
    """A JSON-able record of the environment, the command line and the resolved `settings`."""
    return {
        "rap": __version__,
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "device": device_name(),
        "command": " ".join(["rap", *sys.argv[1:]]) if sys.argv[0].endswith("rap") else None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "settings": settings,
    }
