"""Checkpoints and plans of earlier releases load, and mean what they meant."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rap
from rap.planning.plan import FILE, REPLACEMENT, Plan
from rap.surgery.write import apply_streamed

RELEASES = Path(__file__).parents[1] / "released"
MADE = sorted(path.parent for path in RELEASES.glob("*/*/plan.rap"))
each = pytest.mark.parametrize("folder", MADE, ids=lambda folder: folder.name)


def test_both_forms_of_plan_files_are_there() -> None:
    plans = [folder / "plan.rap" for folder in MADE]
    assert any(FILE.wrote(path) for path in plans)
    assert any(REPLACEMENT.wrote(path) for path in plans)


@each
def test_a_checkpoint_loads_and_computes_the_same(folder: Path) -> None:
    kept = load_file(folder.parent / "logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # Products are of a few numbers; their order may differ between processors.
        torch.testing.assert_close(model(kept["ids"]).logits, kept[folder.name], rtol=0, atol=1e-4)


@each
def test_a_plan_makes_the_same_checkpoint(folder: Path, tmp_path: Path) -> None:
    plan = Plan.load(folder / "plan.rap")
    stored = load_file(folder / "model.safetensors")
    dense = AutoModelForCausalLM.from_pretrained(folder.parent / "dense")
    made = rap.apply(dense, plan).state_dict()
    apply_streamed(folder.parent / "dense", plan, tmp_path / "streamed")
    streamed = load_file(tmp_path / "streamed" / "model.safetensors")
    assert stored.keys() == streamed.keys()
    for name, tensor in stored.items():
        assert torch.equal(made[name], tensor), name
        assert torch.equal(streamed[name], tensor), name


@each
def test_a_plan_written_anew_is_the_same(folder: Path, tmp_path: Path) -> None:
    plan = Plan.load(folder)
    plan.save(tmp_path / "plan.rap")
    assert FILE.wrote(tmp_path / "plan.rap")
    assert Plan.load(tmp_path / "plan.rap") == plan
