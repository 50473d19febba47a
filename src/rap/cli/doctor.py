"""`rap doctor`: versions, device, and what is missing for which feature."""

import sys
from typing import Any

import torch

from ..checkpoint.provenance import PACKAGES, device_name, installed_version
from ..checkpoint.version import __version__
from . import options
from .options import print_json, print_table

_FEATURES = (
    ("zero-shot and long-context benchmarks", "lm_eval", "pip install lm-eval"),
    ("serving with vLLM", "vllm", "pip install vllm"),
    ("llama.cpp, to verify GGUF files", "xllamacpp", "pip install xllamacpp"),
    ("Triton kernels", "triton", "pip install triton, on a CUDA machine"),
    ("weight quantization", "torchao", "pip install torchao bitsandbytes"),
)


def doctor_command(as_json: options.Json = False) -> None:
    """Show versions and device, and what is missing for which feature."""
    report = diagnosis()
    if as_json:
        print_json(report)
        return
    rows = [("rap", __version__), ("python", report["python"]), ("device", report["device"])]
    rows += [(name, version or "missing") for name, version in report["packages"].items()]
    print_table("Environment", ["", "version"], rows)
    rows = [
        (feature["feature"], "ready" if feature["version"] else f"missing: {feature['remedy']}")
        for feature in report["features"]
    ]
    print_table("Features", ["feature", "state"], rows)


def diagnosis() -> dict[str, Any]:
    """What `rap doctor` prints, as JSON-able data."""
    return {
        "rap": __version__,
        "python": sys.version.split()[0],
        "device": device_name(),
        "cuda": torch.cuda.is_available(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "features": [
            {"feature": feature, "version": _version(package), "remedy": remedy}
            for feature, package, remedy in _FEATURES
        ],
    }


def _version(package: str) -> str | None:
    # vLLM's CPU build is a distribution of its own name.
    return installed_version(package) or installed_version(f"{package}-cpu")
