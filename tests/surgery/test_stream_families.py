"""Streamed surgery of families whose checkpoints name, share or split weights in their own ways."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.family_cases import CASES, Case, random_case_plan
from rap.checkpoint.load import load
from rap.model.errors import CheckpointError, PlanError
from rap.planning.plan import Plan
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

# Fused linears, norms, shared weights, older names, experts stored one by one, multimodal models.
NAMES = ["phi3", "persimmon:norm", "gemma3_text", "olmo2", "smollm3", "qwen3_5_text"]
NAMES += ["gpt_neox", "mixtral", "qwen3_moe", "minimax_m2", "hy_v3", "qwen3_5_moe_text", "gpt_oss"]
NAMES += ["gemma3n_text", "gemma4_text", "gemma4_text:tied"]
NAMES += [case.name for case in CASES if case.around]


def _dense(name: str, folder: Path, *, shard: str = "1GB") -> tuple[Any, Case, Plan]:
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size=shard)
    return model, case, random_case_plan(model, case)


@pytest.mark.parametrize("name", NAMES)
def test_streamed_checkpoint_is_the_one_made_in_memory(name: str, tmp_path: Path):
    model, case, plan = _dense(name, tmp_path / "dense")
    for mode in ("exact", "constant") if case.norms else ("exact",):
        planned = dataclasses.replace(plan, qk_norm=mode)
        apply_streamed(tmp_path / "dense", planned, tmp_path / mode)
        apply(model, planned).save_pretrained(tmp_path / "memory")
        found, expected = (
            (folder / "model.safetensors").read_bytes()
            for folder in (tmp_path / mode, tmp_path / "memory")
        )
        assert found == expected
    # The fingerprint in the config is that of the loaded weights, joined experts and all.
    assert load(tmp_path / "exact").config.rap["qk_norm"] == "exact"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gemma3"])
def test_shards_may_cut_experts_apart(name: str, tmp_path: Path):
    model, _, plan = _dense(name, tmp_path / "dense", shard="10KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 5
    apply_streamed(tmp_path / "dense", plan, tmp_path / "streamed")
    state = load(tmp_path / "streamed").state_dict()
    expected = apply(model, plan).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_changed_or_missing_expert_is_seen(name: str, tmp_path: Path):
    _, _, plan = _dense(name, tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    expert = next(key for key in tensors if "layers.2" in key and "experts.1." in key)
    for change, error, message in (
        ({expert: tensors[expert] + 1}, PlanError, "made from other weights"),
        ({expert: None}, CheckpointError, "incomplete, download it again"),
    ):
        changed = {key: x for key, x in (tensors | change).items() if x is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(error, match=message):
            apply_streamed(tmp_path / "dense", plan, tmp_path / "streamed")
        assert not (tmp_path / "streamed").exists()
