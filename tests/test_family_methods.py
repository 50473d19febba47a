"""The default method, from calibration to a pruned model, on families with their own attention."""

import pytest
import torch

from family_cases import CASES
from models import random_tokens
from rap.calibration import calibrate
from rap.methods import Rap

NAMES = ["phi3", "gpt_neox", "qwen3", "qwen3_next", "gemma3_text", "llama4_text", "olmo2", "afmoe"]


@pytest.mark.parametrize("qk_norm", ["constant", "exact"])
@pytest.mark.parametrize("name", NAMES)
def test_default_method_compresses_to_the_budget(name, qk_norm):
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    method = Rap(retain=0.5, qk_norm=qk_norm)
    statistics = calibrate(model, random_tokens(4, 16), method.needs_for(model))
    plan = method.plan(model, statistics)
    assert plan.kept_fraction == pytest.approx(0.5, abs=0.01)
    assert plan.qk_norm == qk_norm
    kept = [layer for layer in plan.layers if layer is not None]
    if case.norms and name != "llama4_text":
        assert all(layer.key_mix_GMP2 is None for layer in kept)
        assert all((layer.key_ratio_G >= 1).all() for layer in kept)
    small = method.apply(model, plan)
    with torch.no_grad():
        assert torch.isfinite(small(random_tokens(2, 9)).logits).all()


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "persimmon"])
def test_gradients_of_a_shared_linear_are_split_by_role(name):
    """Scores of a fused linear are those of the same rows by plain differentiation."""
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    tokens = random_tokens(1, 16)
    statistics = calibrate(model, tokens, {"fisher"})
    attention = getattr(model.get_decoder().layers[0], case.attention)
    linear = attention.qkv_proj if name == "phi3" else attention.query_key_value
    logits = model(tokens, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradient = linear.weight.grad.abs().sum(1)
    dim = 16
    if name == "phi3":
        expected = gradient[-2 * dim :].view(2, dim)
    else:
        expected = gradient.view(6, 3, dim)[:, 2]
    found = statistics.layers[0]["root_fisher_v"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
