"""Checkpoints for the serving tests, each with its stock dense model zeroed by hand."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.models import VOCABULARY, tiny_model
from cases.plans import Widths, random_plan, zeroed
from rap.planning.plan import Plan
from rap.surgery.apply import apply

# An engine binds every core that it finds, and spins on them: each worker's has one of its own.
if _worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    _core = int(_worker) % (os.cpu_count() or 1)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_core))

# Six layers of the bundled model (D = 64): native sizes, sizes that the CPU backend does not take
# (44, 24 and 20 channels are padded), keys wider than values and the reverse, one layer left dense.
MIXED = [(32, 64), (16, 32), (22, 44), (12, 40), None, (20, 24)]
# Sizes that every backend takes as they are: rho = (3 * 64 + 3 * 32) / (6 * 64) = 0.75.
ALIGNED = [(32, 64), (16, 32)] * 3


@dataclass(frozen=True)
class Checkpoint:
    """A pruned checkpoint on disk, its plan, and the masked dense model it must agree with."""

    path: Path
    plan: Plan
    dense: Any
    reference: Any


Prune = Callable[[Any, Sequence[Widths]], Checkpoint]


@pytest.fixture(scope="session")
def prune(tmp_path_factory) -> Prune:
    """Cut a model with random indices of its own in every head, and save it."""

    def cut(model: Any, widths: Sequence[Widths], tokenizer: Any = None) -> Checkpoint:
        path = tmp_path_factory.mktemp("checkpoint")
        plan = random_plan(model, widths)
        apply(model, plan).save_pretrained(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        return Checkpoint(path, plan, model, zeroed(model, plan))

    return cut


@pytest.fixture(scope="session")
def mixed(prune, reference_model, tokenizer) -> Checkpoint:
    """The bundled model with MIXED widths."""
    return prune(copy.deepcopy(reference_model), MIXED, tokenizer)


@pytest.fixture(scope="session")
def aligned(prune, reference_model, tokenizer) -> Checkpoint:
    """The bundled model with ALIGNED widths."""
    return prune(copy.deepcopy(reference_model), ALIGNED, tokenizer)


@pytest.fixture(scope="session")
def prompts(test_tokens) -> list[list[int]]:
    """Prompts of the test text, shorter and longer than a chunk and than a block of the cache."""
    lengths = (2, 37, 63, 100, 150, 300)
    return [test_tokens[1000 * i : 1000 * i + length].tolist() for i, length in enumerate(lengths)]


@pytest.fixture(scope="session")
def tiny_prompts() -> list[list[int]]:
    """Random prompts of the tiny models."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        for length in (3, 40, 140)
    ]


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Random models small enough to start fast, with heads wide enough to be pruned for a CPU."""

    def make(family: str, **fields: Any) -> Any:
        return tiny_model(family, head_dim=64, hidden=64, layers=4, **fields)

    return make


@pytest.fixture(scope="session")
def damaged(tmp_path_factory) -> Callable[..., Path]:
    """A copy of a checkpoint with its tensors or the `rap` section of its config changed."""

    def copy_and_edit(
        source: Path,
        tensors: Callable[[dict[str, torch.Tensor]], None] | None = None,
        section: Callable[[dict[str, Any]], None] | None = None,
    ) -> Path:
        path = tmp_path_factory.mktemp("damaged")
        shutil.copytree(source, path, dirs_exist_ok=True)
        if tensors is not None:
            loaded = load_file(path / "model.safetensors")
            tensors(loaded)
            save_file(loaded, path / "model.safetensors", metadata={"format": "pt"})
        if section is not None:
            config = json.loads((path / "config.json").read_text("utf-8"))
            section(config["rap"])
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return path

    return copy_and_edit
