"""Channels of keys that never rotate: any real map of them is free, and the best is a subspace."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, HEAD_DIM
from cases.models import random_tokens
from cases.plans import plan_of
from rap.calibration.run import calibrate
from rap.methods import Rap
from rap.model.errors import PlanError
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan, Plan
from rap.surgery.apply import apply

# A layer without positions; partial rotation: interleaved, fused head by head, with biases.
NAMES = ["smollm3", "glm", "gpt_neox", "phi", "llama4_text"]
LAYER = 1


def _model(name: str) -> Any:
    case = next(case for case in CASES if case.name == name)
    return case.model(use_qk_norm=False) if name == "llama4_text" else case.model()


def _rotating(model: Any, *, seed: int) -> PairPlan:
    """Everything kept, the free channels in another basis for keys and its dual for queries."""
    shape = attention_layers(model)[LAYER].shape
    heads, pairs, free = shape.num_kv_heads, shape.geometry.num_pairs, shape.geometry.num_free
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(heads, free, free, generator=generator, dtype=torch.float64)
    basis = basis + 3 * torch.eye(free)
    plain = PairPlan.of_indices(*([list(range(size))] * heads for size in (pairs, HEAD_DIM, free)))
    return dataclasses.replace(
        plain, key_free_mix_GNF=basis, query_free_mix_GNF=torch.linalg.inv(basis).mT
    )


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_another_basis_is_the_same_model(name: str):
    model = _model(name)
    layers: list[PairPlan | None] = [None] * 3
    layers[LAYER] = _rotating(model, seed=3)
    tokens = random_tokens(2, 11)
    expected = model(tokens).logits
    found = apply(model, plan_of(model, layers))(tokens).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    # The same basis on both sides is another model.
    wrong = dataclasses.replace(layers[LAYER], query_free_mix_GNF=layers[LAYER].key_free_mix_GNF)
    layers[LAYER] = wrong
    found = apply(model, plan_of(model, layers))(tokens).logits
    assert (found - expected).abs().max() > 1e-2 * expected.abs().max()


def _lost(layer: PairPlan, found: dict[str, Tensor]) -> float:
    """Expected squared error of free logits: tr(C_q (I - P) C_k (I - P)^T) over the heads."""
    key, query = (found[f"{side}_free_moment"].double() for side in ("key", "query"))
    whole = torch.eye(key.shape[-1], dtype=torch.float64)
    if layer.key_free_mix_GNF is not None:
        kept = layer.query_free_mix_GNF.double().mT @ layer.key_free_mix_GNF.double()
    else:
        kept = torch.stack([whole[index].sum(0).diag() for index in layer.free_GN.long()])
    lost = whole - kept
    return float(torch.einsum("gij,gjk,gkl,gil->", query, lost, key, lost))


@pytest.mark.parametrize("name", NAMES)
def test_fold_keeps_the_best_subspace(name: str):
    model = _model(name).float()
    common: dict[str, Any] = {"retain": 0.5, "budget": "uniform", "metric": "output", "merge": 1}
    folding, choosing = Rap(**common), Rap(keys="pairs", score="energy", **common)
    statistics = calibrate(model, random_tokens(4, 32), folding.needs | choosing.needs)
    best = folding.plan(model, statistics).layers[LAYER]
    plain = choosing.plan(model, statistics).layers[LAYER]
    found = statistics.layers[LAYER]
    assert best.num_free == plain.num_free
    assert _lost(best, found) < 0.8 * _lost(plain, found)
    # The optimum is the sum of the squared singular values that were left out.
    roots = [torch.linalg.eigh(found[f"{side}_free_moment"].double()) for side in ("query", "key")]
    halves = [v * w.clamp_min(0).sqrt()[:, None] @ v.mT for w, v in roots]
    singular = torch.linalg.svdvals(halves[0] @ halves[1])[:, best.num_free :]
    assert _lost(best, found) == pytest.approx(float(singular.square().sum()), rel=1e-4)


def test_full_width_stays_plain_and_exact():
    model = _model("glm").float()
    method = Rap(retain=1.0, budget="uniform", metric="output", values="channels")
    statistics = calibrate(model, random_tokens(2, 16), method.needs)
    plan = method.plan(model, statistics)
    assert all(layer.key_free_mix_GNF is None for layer in plan.layers)
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        # Channels are in another order, so that sums round otherwise.
        torch.testing.assert_close(apply(model, plan)(tokens).logits, model(tokens).logits)


def test_a_mixed_plan_is_kept_and_checked(tmp_path):
    model = _model("glm")
    layer = _rotating(model, seed=4)
    plan = plan_of(model, [None, layer, None])
    plan.save(tmp_path / "plan.rap")
    assert Plan.load(tmp_path / "plan.rap") == plan
    alone = dataclasses.replace(layer, query_free_mix_GNF=None)
    with pytest.raises(PlanError, match="mixing must come together"):
        plan_of(model, [None, alone, None])
    narrow = dataclasses.replace(layer, key_free_mix_GNF=layer.key_free_mix_GNF[:, :, 1:])
    with pytest.raises(PlanError, match="key_free_mix_GNF is"):
        plan_of(model, [None, narrow, None])
