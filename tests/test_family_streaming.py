"""Streamed surgery of families whose checkpoints name or share weights in their own ways."""

import dataclasses

import pytest
import torch

from family_cases import CASES, random_case_plan
from rap import load
from rap.construction import apply
from rap.streaming import apply_streamed

NAMES = ["phi3", "persimmon:norm", "gemma3_text", "olmo2", "smollm3", "qwen3_5_text"]


@pytest.mark.parametrize("mode", ["exact", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_streamed_checkpoint_is_the_one_made_in_memory(name, mode, tmp_path):
    case = next(case for case in CASES if case.name == name)
    if mode == "constant" and not case.norms:
        pytest.skip("the family has no QK-norm")
    model = case.model(dtype=torch.float32)
    plan = dataclasses.replace(random_case_plan(model, case), qk_norm=mode)
    model.save_pretrained(tmp_path / "dense")
    apply_streamed(tmp_path / "dense", plan, tmp_path / "streamed")
    streamed, expected = load(tmp_path / "streamed"), apply(model, plan).state_dict()
    found = streamed.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    assert streamed.config.rap["qk_norm"] == mode
