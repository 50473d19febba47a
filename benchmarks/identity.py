"""Hashes of what every method makes of tiny models of several families, to hold a refactor against.

    python benchmarks/identity.py -o before.json      # on one commit
    python benchmarks/identity.py --against before.json   # on another

A hash covers the plan (its file's tensors, its method and share), the pruned model's config section
and state dict, its logits, and the checkpoint that `save_pretrained` writes. What a method does not
support is recorded by the first line of its error. Random weights, CPU, seconds per family.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import rap
from cases.family_cases import CASES as FAMILIES
from cases.method_cases import CASES as METHODS
from cases.models import random_tokens
from rap.calibration.registry import STATISTICS, WINDOWS
from rap.model.errors import RapError

FAMILY_NAMES = ("llama", "qwen2", "mistral", "gemma2", "qwen3", "phi3", "glm", "cohere")
BESIDE = ({"name": "rap"}, {"name": "rap", "budget": "error", "align": 2})


def digest(*parts: Any) -> str:
    """Twelve characters of the SHA-256 of tensors and JSON-able data."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(json.dumps(part, sort_keys=True, default=str).encode())
    return found.hexdigest()[:12]


def tensors_of(path: Path) -> list[Any]:
    """Names and tensors of a safetensors file, in order of their names."""
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
        return [part for name in names for part in (name, file.get_tensor(name))]


def hashes(model: Any, method: Any, statistics: Any) -> dict[str, str]:
    """Of the plan, the model and the checkpoint that a method makes of a dense model."""
    plan = method.plan(model, statistics)
    small = method.apply(model, plan)
    with torch.no_grad():
        logits = small(random_tokens(2, 12, seed=5)).logits
    state = [part for name, x in sorted(small.state_dict().items()) for part in (name, x)]
    with tempfile.TemporaryDirectory() as folder:
        small.save_pretrained(folder)
        plan.save(Path(folder) / "plan")
        return {
            "plan": digest(plan.kept_fraction, plan.method, *tensors_of(Path(folder) / "plan")),
            "section": digest(getattr(small.config, "rap", None)),
            "state": digest(*state),
            "logits": digest(logits),
            "checkpoint": digest(*tensors_of(Path(folder) / "model.safetensors")),
        }


def every_hash() -> dict[str, dict[str, str]]:
    """By family and method."""
    found = {}
    cases = {case.name: case for case in reversed(FAMILIES)}
    methods = [(case.id, case.method(0.6)) for case in METHODS]
    for settings in BESIDE:
        named = dict(settings)
        methods.append((f"{settings}", rap.METHODS[named.pop("name")](retain=0.6, **named)))
    for family in FAMILY_NAMES:
        model = cases[family].model()
        statistics = rap.calibrate(model, random_tokens(4, 32), {*STATISTICS, WINDOWS})
        for name, method in methods:
            try:
                found[f"{family} {name}"] = hashes(model, method, statistics)
            except RapError as error:
                found[f"{family} {name}"] = {"refused": str(error).splitlines()[0]}
    return found


def main() -> int:
    """Print or compare; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    found = every_hash()
    if asked.output:
        asked.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if not asked.against:
        print(f"{len(found)} hashed")
        return 0
    before = json.loads(asked.against.read_text())
    differ = [name for name in sorted({*before, *found}) if before.get(name) != found.get(name)]
    for name in differ:
        print(f"{name}: {before.get(name)} -> {found.get(name)}")
    print(f"{len(found)} hashed, {len(differ)} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
