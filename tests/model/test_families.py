"""Every family against its own stock attention with the dropped channels masked by hooks."""

import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cases.family_cases import CASES, HEAD_DIM, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from cases.plans import plan_of
from rap.model import modeling
from rap.model.attention import ATTENTION
from rap.model.families import FAMILIES, INNER, WRAPPERS
from rap.model.layers import SOFT_CAP, attention_layers, text_config
from rap.model.specs import NORM_MODES
from rap.planning.plan import PairPlan
from rap.surgery.apply import apply

TOKENS = 11
# The same sums in another order: some 100 roundings of 1e-16 of values below 100. Where the family
# itself rounds to float32 inside the attention, that is 6e-8 of values of about ten.
MODULE_BOUND = {False: 1e-10, True: 1e-5}
# Families' layer norms round to float32 whatever the model's dtype is.
LOGIT_BOUND = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _registered():
    modeling.register()


def _close(found: Tensor, expected: Tensor, bound: float) -> bool:
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


def test_every_family_has_a_case():
    inside = {case.around["text_config"]["model_type"] for case in CASES if case.around}
    alone = {case.model_type for case in CASES}
    assert alone == {*FAMILIES, *WRAPPERS} - {*INNER}
    assert {*INNER} <= inside


def test_text_models_that_come_inside_others_alone_are_named_so():
    assert {*FAMILIES} - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} == {*INNER}


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
@torch.no_grad()
def test_pruned_model_equals_the_masked_dense_model(case: Case, tmp_path):
    model = case.model()
    plan = random_case_plan(model, case)
    small, dense = apply(model, plan), masked_by_hooks(model, plan, case)
    _check_logits_in_prefill_and_decode(small, dense)
    _check_generation_with_left_padding(small, dense)
    _check_attention(small, dense, MODULE_BOUND[case.in_float32])
    _check_saved_and_loaded(small, model, tmp_path)


@every_case
def test_no_plan_splits_heads_between_devices(case: Case):
    """It would split no frequencies with them: every device has the whole model."""
    model = case.model()
    small: Any = apply(model, random_case_plan(model, case))
    assert small.tp_plan == {}
    if case.name in ("llama", "gemma3"):
        assert model.tp_plan


def _check_attention(small: Any, dense: Any, bound: float) -> None:
    calls = {}
    for layer in attention_layers(dense):
        if layer.module is not None:
            layer.module.register_forward_hook(
                lambda module, args, kwargs, output, index=layer.index: calls.__setitem__(
                    index, (args, kwargs, output[0])
                ),
                with_kwargs=True,
            )
    # Positions that do not start at zero and differ from row to row, as with left padding.
    positions = torch.stack([torch.arange(TOKENS), 40 + torch.arange(TOKENS)])
    dense(random_tokens(2, TOKENS), position_ids=positions, use_cache=False)
    compared = 0
    for layer in attention_layers(small):
        if isinstance(layer.module, modeling.RapAttention):
            args, kwargs, expected = calls[layer.index]
            found = layer.module(*args, **kwargs)[0]
            assert _close(found, expected, bound), layer.index
            compared += 1
    assert compared == sum(widths is not None for widths in small.config.rap["layers"]) > 0


def _check_logits_in_prefill_and_decode(small: Any, dense: Any) -> None:
    tokens = random_tokens(2, TOKENS)
    expected = dense(tokens, use_cache=False).logits
    assert _close(small(tokens, use_cache=False).logits, expected, LOGIT_BOUND)
    output = small(tokens[:, :5], use_cache=True)
    parts = [output.logits]
    for position in range(5, TOKENS):
        output = small(tokens[:, position : position + 1], past_key_values=output.past_key_values)
        parts.append(output.logits)
    assert _close(torch.cat(parts, 1), expected, LOGIT_BOUND)


def _check_generation_with_left_padding(small: Any, dense: Any) -> None:
    tokens = random_tokens(3, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[1, :1] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found, expected = (model.generate(tokens, **options) for model in (small, dense))
    assert torch.equal(found, expected)


def _check_saved_and_loaded(small: Any, dense: Any, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    # A copy, for memory-mapped weights are aligned otherwise and sums take another path.
    again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
    again.config._experts_implementation = "eager"
    assert type(again) is type(small)
    state = again.state_dict()
    assert state.keys() == small.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in small.state_dict().items())
    tokens = random_tokens(2, TOKENS)
    if getattr(text_config(small.config), SOFT_CAP, None) is not None:
        small.set_attn_implementation(ATTENTION)  # as loading takes it: SDPA leaves the cap out
    assert torch.equal(again(tokens).logits, small(tokens).logits)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    if not any("experts" in name for name in names):
        return
    # Experts are stored one by one under the names of the dense checkpoint.
    dense.save_pretrained(tmp_path / "dense")
    with safe_open(tmp_path / "dense" / "model.safetensors", "pt") as stored:
        dense_names = set(stored.keys())
    added = ("frequency_index", "kept_channels")
    assert {name for name in names if not name.endswith(added)} == dense_names


_SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", **_SCALED},
    "yarn": {"rope_type": "yarn", **_SCALED},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(HEAD_DIM // 2)],
        "long_factor": [2.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)],
        **_SCALED,
    },
    # The second half of the pairs stands still, at frequency zero.
    "proportional": {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_every_scaling_of_rope_is_read_off_the_model(rope: str):
    """Prompts shorter and longer than the trained length, past which some change frequencies."""
    case = Case("llama", {"rope_parameters": ROPES[rope], "max_position_embeddings": 8})
    model = case.model()
    plan = random_case_plan(model, case)
    small, dense = apply(model, plan), masked_by_hooks(model, plan, case)
    for length in (5, 21, 5):
        tokens = random_tokens(2, length)
        assert _close(small(tokens).logits, dense(tokens).logits, LOGIT_BOUND)


@every_case
@torch.no_grad()
def test_everything_kept_in_another_order_is_the_dense_model(case: Case):
    model = case.model()
    generator = torch.Generator().manual_seed(1)
    layers: list[PairPlan | None] = []
    for index, layer in enumerate(attention_layers(model)):
        if index in case.absent:
            layers.append(None)
            continue
        if index in case.sources:
            layers.append(layers[case.sources[index]])
            continue
        size, rotated = case.sizes(index)
        heads = range(layer.shape.num_kv_heads)
        orders = [
            [torch.randperm(count, generator=generator).tolist() for _ in heads]
            for count in (rotated // 2, size, size - rotated)
        ]
        layers.append(PairPlan.of_indices(*orders))
    # a plan keeps its indices in ascending order
    with mock.patch("rap.model.kinds.pairs._check_index"):
        plan = plan_of(model, layers)
        modes = NORM_MODES if case.norms and case.name != "stablelm:norm" else ("exact",)
        models = [apply(model, dataclasses.replace(plan, qk_norm=mode)) for mode in modes]
    tokens = random_tokens(2, TOKENS)
    expected = model(tokens).logits
    for small in models:
        assert _close(small(tokens).logits, expected, LOGIT_BOUND)
