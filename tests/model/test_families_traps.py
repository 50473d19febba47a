"""Each class of mistake a family invites, planted: the comparison of the family matrix must fail.

And QK-norm's constant mode, which has no masked dense model to equal: its formula, and its error
beside that of the naive norm over kept channels.
"""

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, HEAD_DIM, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from cases.plans import zeroed
from rap.calibration.run import calibrate
from rap.methods import Rap
from rap.model import families as specs
from rap.model.errors import CheckpointError, PlanError, UnsupportedModelError
from rap.model.layers import attention_layers
from rap.surgery.apply import apply

TOKENS = random_tokens(2, 11)
# A thousand bounds of the family matrix, relative to the largest logit.
VISIBLE = 1e-2


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _error(small: Any, dense: Any) -> float:
    """The largest difference of logits relative to the largest logit, with positions from 40."""
    positions = 40 + torch.arange(11).expand(2, -1)
    found, expected = (m(TOKENS, position_ids=positions).logits for m in (small, dense))
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("glm", {"pairing": "half"}),
        ("glm4_moe", {"pairing": "interleaved"}),
        ("llama4_text", {"pairing": "half"}),
        ("cohere", {"table": "repeated"}),
        ("gemma2", {"arguments": ()}),
        ("nanochat", {"clockwise": False}),
        ("llama", {"clockwise": True}),
        ("ministral3", {"query_scale": None}),
        ("llama4_text", {"query_scale": None}),
        ("phi3", {"fused": "heads"}),
        ("qwen3", {"norm": None}),
        ("hunyuan_v1_dense", {"norm": specs.QKNorm(("query_layernorm", "key_layernorm"))}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
@torch.no_grad()
def test_a_wrong_row_is_seen(name: str, planted: dict[str, Any]):
    case = _case(name)
    model = case.model()
    model.set_attn_implementation("eager")  # no mask hides a missing window or soft cap
    plan = random_case_plan(model, case)
    dense = masked_by_hooks(model, plan, case)
    assert _error(apply(model, plan), dense) < 1e-5
    row = dataclasses.replace(specs.FAMILIES[name], **planted)
    with mock.patch.dict(specs.FAMILIES, {name: row}):
        try:
            wrong = apply(model, dataclasses.replace(plan, shapes=_shapes(model)))
        except (PlanError, CheckpointError, AttributeError, RuntimeError):
            return
        error = _error(wrong, dense)
    assert error > VISIBLE


def _shapes(model: Any) -> tuple:
    return tuple(layer.shape for layer in attention_layers(model))


@pytest.mark.parametrize("name", ["qwen2", "glm", "olmo2", "llama4_text"])
@torch.no_grad()
def test_one_index_for_all_heads_is_seen(name: str):
    case = _case(name)
    model = case.model()
    plan = random_case_plan(model, case)
    small, dense = apply(model, plan), masked_by_hooks(model, plan, case)
    for buffer, index in small.named_buffers():
        if buffer.endswith(("frequency_index", "kept_channels")):
            index[:] = index[:1].clone()
    assert _error(small, dense) > VISIBLE


@torch.no_grad()
def test_gate_rows_that_follow_the_keys_are_seen():
    case = _case("qwen3_next")
    model = case.model()
    plan = random_case_plan(model, case)
    small, dense = apply(model, plan), masked_by_hooks(model, plan, case)
    gate = small.model.layers[3].self_attn.q_proj.weight[6 * HEAD_DIM :]
    gate[:] = gate.flip(0).clone()
    assert _error(small, dense) > VISIBLE


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "olmo2", "hunyuan_v1_dense", "qwen3_moe"])
@torch.no_grad()
def test_constant_norm_is_nearer_to_the_masked_model_than_the_naive_norm(name: str):
    """Measured ratios against the mean over kept channels, in the attention of the first layer.

    Energy falls from pair to pair as in trained models: the kept pairs are not like the rest.
    """
    case = _case(name)
    model = case.model(dtype=torch.float32)
    fall = torch.exp(-0.5 * torch.arange(HEAD_DIM // 2)).repeat(2)
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = linear.out_features // HEAD_DIM
            linear.weight.mul_(fall.repeat(heads)[:, None])
            if linear.bias is not None:
                linear.bias.mul_(fall.repeat(heads))
    widths = {"score": "energy", "budget": "uniform", "layers": "all"}
    method = Rap(retain=0.5, keys="pairs", values="channels", **widths)
    plan = method.plan(model, calibrate(model, random_tokens(4, 32), {"energy"}))
    dense = masked_by_hooks(model, plan, case)
    small = apply(model, plan)
    naive = copy.deepcopy(small)
    seen = {"constant": 0.0, "naive": 0.0}
    for name, each in (("constant", small), ("naive", naive)):
        if name == "naive":
            for buffer, ratio in each.named_buffers():
                if buffer.endswith(".ratio"):
                    attention = each.get_submodule(buffer.rsplit(".", 2)[0])
                    ratio.fill_(HEAD_DIM / attention.key_width)
        seen[name] = _error_of_first_attention(each, dense, case)
    assert seen["constant"] < 0.5 * seen["naive"], seen


def _error_of_first_attention(small: Any, dense: Any, case: Case) -> float:
    outputs = []
    for model in (small, dense):
        layers = getattr(model.get_decoder(), "model", model.get_decoder()).layers
        index = next(i for i in range(len(layers)) if i not in case.absent)
        found: list[Tensor] = []
        handle = getattr(layers[index], case.attention).register_forward_hook(
            lambda module, inputs, output, found=found: found.append(output[0])
        )
        model(random_tokens(4, 32, seed=5), use_cache=False)
        handle.remove()
        outputs.append(found[0])
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())


@torch.no_grad()
def test_constant_norm_follows_its_formula():
    case = _case("gemma3_text")
    model = case.model()
    plan = dataclasses.replace(random_case_plan(model, case), qk_norm="constant")
    ratios = {"query_ratio_H": torch.arange(1.0, 7.0), "key_ratio_G": torch.tensor([2.0, 3.0])}
    layers = [item and dataclasses.replace(item, **ratios) for item in plan.layers]
    attention = apply(model, dataclasses.replace(plan, layers=tuple(layers))).model.layers[1]
    attention, dense = attention.self_attn, model.model.layers[1].self_attn
    states = torch.randn(1, 5, 36, dtype=torch.float64)
    found = attention.k_norm(attention.project(states)[1])
    for head in range(2):
        pairs = plan.layers[1].frequency_GM[head].tolist()
        kept = [*pairs, *(pair + HEAD_DIM // 2 for pair in pairs)]
        keys = dense.k_proj(states)[0, :, head * HEAD_DIM : (head + 1) * HEAD_DIM][:, kept]
        mean = ratios["key_ratio_G"][head] * keys.square().sum(1, keepdim=True) / HEAD_DIM
        expected = keys / (mean + dense.k_norm.eps).sqrt() * (1 + dense.k_norm.weight[kept])
        assert torch.allclose(found[0, head], expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
@torch.no_grad()
def test_masking_by_hooks_is_zeroing_rows_by_hand(name: str):
    """The two dense sides of the identity, one for every family and one without the table."""
    case = _case(name)
    model = case.model()
    plan = random_case_plan(model, case)
    assert _error(zeroed(model, plan), masked_by_hooks(model, plan, case)) < 1e-10


@pytest.mark.parametrize("setting", ["keys", "values"])
def test_mixing_is_refused_where_single_channels_matter(setting: str):
    case = _case("qwen3_next")
    model = case.model()
    plan = random_case_plan(model, case)
    layer = plan.layers[3]
    if setting == "keys":
        mix = torch.zeros(2, layer.num_pairs, 2, 2)
        other = dataclasses.replace(layer, key_mix_GMP2=mix, query_mix_GMP2=mix)
    else:
        basis = torch.eye(HEAD_DIM).expand(2, -1, -1)
        other = dataclasses.replace(
            layer, channels_GC=None, value_down_GCD=basis, value_up_GDC=basis
        )
    with pytest.raises(PlanError, match="cannot be"):
        apply(model, dataclasses.replace(plan, layers=(None, None, None, other)))


def test_a_norm_per_head_needs_the_exact_mode():
    case = _case("stablelm:norm")
    model = case.model()
    plan = dataclasses.replace(random_case_plan(model, case), qk_norm="constant")
    with pytest.raises(UnsupportedModelError, match="plan with qk_norm='exact'"):
        apply(model, plan)


def test_unknown_norm_mode_is_refused():
    model = _case("qwen3").model()
    plan = random_case_plan(model, _case("qwen3"))
    with pytest.raises(PlanError, match="unknown QK-norm mode 'none'"):
        dataclasses.replace(plan, qk_norm="none")
    small = apply(model, plan)
    small.config.rap["qk_norm"] = "none"
    with pytest.raises(CheckpointError, match="QK-norm mode 'none'"):
        type(small)(small.config)
