"""QK-norm: importance of normalised keys, and norm rows that stand for what was dropped."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, HEAD_DIM, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from rap.calibration.run import calibrate
from rap.checkpoint.load import load
from rap.methods import Rap
from rap.methods.base import dense_layers
from rap.model.errors import RapError
from rap.model.layers import attention_layers
from rap.planning.norms import with_denominators
from rap.planning.plan import Plan
from rap.planning.scores import score_layers
from rap.surgery.apply import apply

TOKENS = random_tokens(2, 11)
# One norm per head, over all heads, LayerNorm, after the rotation, fused, shared by q and k.
NAMES = ["qwen3", "qwen3_next", "olmo2", "phi:norm", "persimmon:norm", "hunyuan_v1_dense"]
NAMES += ["olmoe", "cohere:norm", "llama4_text", "nanochat", "gemma3_text"]


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _with_rows(model: Any, plan: Plan, num_rows: int) -> Plan:
    found = calibrate(model, random_tokens(4, 32), {"energy", "norms"}).layers
    layers = [
        planned and with_denominators(planned, layer.shape, statistics, num_rows)
        for planned, layer, statistics in zip(
            plan.layers, attention_layers(model), found, strict=True
        )
    ]
    return dataclasses.replace(
        plan, layers=tuple(layers), qk_norm="rows" if num_rows else "constant"
    )


def _error(small: Any, dense: Any) -> float:
    found, expected = small(TOKENS).logits, dense(TOKENS).logits
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_row_for_every_dropped_channel_is_exact(name: str):
    case = _case(name)
    model = case.model()
    plan = random_case_plan(model, case)
    dense = masked_by_hooks(model, plan, case)
    # Energies and rows are float32: their ratio is one up to its rounding.
    full = _error(apply(model, _with_rows(model, plan, HEAD_DIM)), dense)
    assert full < 1e-5
    few = _error(apply(model, _with_rows(model, plan, 3)), dense)
    constant = _error(apply(model, _with_rows(model, plan, 0)), dense)
    assert 3 * full < few < constant


@torch.no_grad()
def test_rows_of_another_head_are_seen():
    case = _case("qwen3")
    model = case.model()
    plan = random_case_plan(model, case)
    dense = masked_by_hooks(model, plan, case)
    full = _with_rows(model, plan, HEAD_DIM)
    layers = [
        item and dataclasses.replace(item, query_sketch_HSD=item.query_sketch_HSD.flip(0))
        for item in full.layers
    ]
    assert _error(apply(model, dataclasses.replace(full, layers=tuple(layers))), dense) > 1e-2


def test_rows_are_projected_but_not_cached(tmp_path):
    model = _case("qwen3").model(dtype=torch.float32)
    method = Rap(retain=0.5, qk_norm="rows", norm_rows=2)
    statistics = calibrate(model, random_tokens(4, 16), method.needs_for(model))
    plan = method.plan(model, statistics)
    plan.save(tmp_path / "plan.rap")
    assert Plan.load(tmp_path / "plan.rap") == plan
    apply(model, plan).save_pretrained(tmp_path / "small")
    small = load(tmp_path / "small")
    attention = small.model.layers[1].self_attn
    assert attention.k_proj.out_features == 2 * (attention.key_width + 2)
    assert attention.q_proj.out_features == 6 * (attention.key_width + 2)
    with torch.no_grad():
        cache = small(TOKENS, use_cache=True).past_key_values
        assert torch.equal(small(TOKENS).logits, apply(model, plan)(TOKENS).logits)
    assert cache.layers[1].keys.shape[-1] == attention.key_width


def test_needs_follow_the_mode():
    normed, plain = (_case(name).model(dtype=torch.float32) for name in ("qwen3", "llama"))
    assert "norms" in Rap(qk_norm="rows").needs_for(normed)
    assert "norms" not in Rap(qk_norm="rows").needs_for(plain)
    assert "norms" not in Rap(qk_norm="constant").needs_for(normed)
    with pytest.raises(RapError, match="norm_rows 0 keeps nothing"):
        Rap(qk_norm="rows", norm_rows=0)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "olmo2", "phi:norm", "stablelm:norm"])
@torch.no_grad()
def test_importance_is_that_of_normalised_keys(name: str):
    """Energies against the outputs of the family's own norms, their biases taken away."""
    case = _case(name)
    model = case.model(dtype=torch.float32)
    windows = random_tokens(3, 16)
    seen: dict[str, Tensor] = {}
    attention = model.model.layers[1].self_attn
    for role, norm in zip("qk", case.norms, strict=True):
        for part, bias in getattr(attention, norm).named_parameters():
            if part.endswith("bias"):
                bias.zero_()
        getattr(attention, norm).register_forward_hook(
            lambda module, inputs, output, role=role: seen.__setitem__(role, output)
        )
    found = calibrate(model, windows, {"energy"}).layers[1]
    model(windows)
    order = attention_layers(model)[1].shape.geometry.canonical_order()
    for role, states in seen.items():
        if case.normed == "BHTD":
            states = states.transpose(1, 2)
        expected = states.reshape(3 * 16, -1, HEAD_DIM).square().mean(0)[:, order]
        torch.testing.assert_close(found[f"energy_{role}"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "phi:norm"])
@torch.no_grad()
def test_magnitude_is_that_of_normalised_keys(name: str):
    """Whatever a key's row is multiplied by before the norm, its weight after it decides."""
    model = _case(name).model(dtype=torch.float32)
    attention = model.model.layers[1].self_attn
    norm = getattr(attention, _case(name).norms[1])

    def score() -> Tensor:
        dense = dense_layers(model)
        return score_layers("magnitude", [None] * 3, dense.weights, dense.shapes)[1].pairs_GP

    before = score()
    attention.k_proj.weight.mul_(3.0)
    torch.testing.assert_close(score(), before)
    # Pair 2: half of the 16 channels rotate in phi, so that it is (2, 6) there.
    second = 6 if name == "phi:norm" else 10
    norm.weight.view(-1, HEAD_DIM)[:, [2, second]] = 0
    expected = before.clone()
    expected[:, 2] = 0
    torch.testing.assert_close(score(), expected)
