"""Pairs of a head that take positions of several axes: every kept pair keeps its own axis."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from rap.methods import Rap, parse_method
from rap.methods.dense import key_mixing_limit
from rap.model.attention import RapAttention
from rap.model.errors import UnsupportedModelError
from rap.model.families import FAMILIES
from rap.model.layers import attention_layers, rotary_module
from rap.model.rope import pair_tables
from rap.model.specs import AttentionSpec
from rap.surgery.apply import apply

TOKENS, PROMPT = 11, 6
# The families' rotation and norms round to float32, as in the comparison of families.
BOUND = 1e-5
# A thousand bounds, relative to the largest logit.
VISIBLE = 1e-2
# The axis of every dense pair, from the families' own code: in blocks, or in turns (T, H, W, T, H,
# W, ...) for as long as an axis has any left. Those of qwen3_5 rotate two pairs of a head.
AXES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (0, 0, 0, 0, 1, 1, 2, 2)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (0, 1, 2, 0, 1, 2, 0, 0)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (0, 1)),
}
BY_AXIS = [case for case in CASES if case.name in AXES]
by_axis = pytest.mark.parametrize("case", BY_AXIS, ids=lambda case: case.name)


def _positions() -> Tensor:
    """Positions [3, B, T] of time, height and width, all different."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(40, (3, 2, TOKENS), generator=generator)


def _both(case: Case) -> tuple[Any, Any]:
    """A model cut at random, and the dense one with what it drops masked."""
    model = case.model()
    plan = random_case_plan(model, case)
    return apply(model, plan), masked_by_hooks(model, plan, case)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@by_axis
@torch.no_grad()
def test_pruned_model_equals_the_masked_dense_model_at_positions_of_an_image(case: Case):
    small, dense = _both(case)
    tokens, positions = random_tokens(2, TOKENS), _positions()
    expected = dense(tokens, position_ids=positions, use_cache=False).logits
    found = small(tokens, position_ids=positions, use_cache=False).logits
    assert _error(found, expected) < BOUND
    for axis in AXES[case.name]:
        alike = positions[axis].expand(3, -1, -1)
        assert _error(dense(tokens, position_ids=alike).logits, expected) > VISIBLE, axis
    output = small(tokens[:, :PROMPT], position_ids=positions[..., :PROMPT], use_cache=True)
    parts = [output.logits]
    for step in range(PROMPT, TOKENS):
        output = small(
            tokens[:, step : step + 1],
            position_ids=positions[..., step : step + 1],
            past_key_values=output.past_key_values,
        )
        parts.append(output.logits)
    assert _error(torch.cat(parts, dim=1), expected) < BOUND


AxisOf = Callable[[Tensor, Tensor], Tensor]


def _of_the_pair(axes_P: Tensor, index_GM: Tensor) -> Tensor:
    return axes_P[index_GM]


def _of_the_slot(axes_P: Tensor, index_GM: Tensor) -> Tensor:
    """The axes of the first pairs, which are not the kept ones."""
    return axes_P[: index_GM.shape[1]].expand_as(index_GM)


def _of_time(axes_P: Tensor, index_GM: Tensor) -> Tensor:
    return torch.zeros_like(index_GM)


def _logits_rotated_by(small: Any, case: Case, axis_of: AxisOf) -> Tensor:
    """Logits [B, T, V] where every slot rotates at its frequency by the axis that is said."""
    axes_P, positions = torch.tensor(AXES[case.name]), _positions()
    frequencies_P = rotary_module(small).inv_freq
    assert len(axes_P) == len(frequencies_P)

    def slot_tables(tables: Any, index_GM: Tensor) -> tuple[Tensor, Tensor]:
        turns_GMBT = positions[axis_of(axes_P, index_GM.long())] * 1.0
        angle = (turns_GMBT * frequencies_P[index_GM.long()][..., None, None]).permute(2, 0, 3, 1)
        return angle.cos().double(), angle.sin().double()

    with ExitStack() as stack:
        cut = [module for module in small.modules() if isinstance(module, RapAttention)]
        for module in cut:
            stack.enter_context(mock.patch.object(module, "slot_tables", slot_tables))
        tokens = random_tokens(2, TOKENS)
        return small(tokens, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("case", BY_AXIS[:4], ids=lambda case: case.name)
@torch.no_grad()
def test_another_axis_than_that_of_the_kept_pair_is_seen(case: Case):
    small, dense = _both(case)
    expected = dense(random_tokens(2, TOKENS), position_ids=_positions(), use_cache=False).logits
    assert _error(_logits_rotated_by(small, case, _of_the_pair), expected) < BOUND
    assert _error(_logits_rotated_by(small, case, _of_the_slot), expected) > VISIBLE
    assert _error(_logits_rotated_by(small, case, _of_time), expected) > VISIBLE


@pytest.mark.parametrize("case", BY_AXIS[:2], ids=lambda case: case.name)
def test_tables_of_all_axes_give_every_pair_its_own(case: Case):
    """As older releases of transformers hand them to every layer."""
    model, positions = case.model(dtype=torch.float32), _positions()
    rotary, axes_P = rotary_module(model), torch.tensor(AXES[case.name])
    angle = positions[..., None] * rotary.inv_freq
    tables = tuple(torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    cos, sin = pair_tables(tables, len(axes_P), "repeated", [4, 2, 2])
    pairs = torch.arange(len(axes_P))
    torch.testing.assert_close(cos, angle[axes_P, ..., pairs].permute(1, 2, 0).cos())
    torch.testing.assert_close(sin, angle[axes_P, ..., pairs].permute(1, 2, 0).sin())
    layer = next(module for module in _both(case)[0].modules() if isinstance(module, RapAttention))
    assert torch.equal(layer._pair_tables(tables)[0], cos)


def _row(case: Case) -> AttentionSpec:
    return FAMILIES[case.around["text_config"]["model_type"] if case.around else case.model_type]


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.around or _row(case).by_axis],
    ids=lambda case: case.name,
)
def test_rows_say_which_models_have_several_axes(case: Case):
    rotary = rotary_module(case.model(dtype=torch.float32))
    assert hasattr(rotary, "mrope_section") == _row(case).by_axis


@torch.no_grad()
def test_pairs_of_several_axes_are_neither_folded_nor_given_to_baselines():
    """A folded slot rotates by one angle; baselines rotate cached keys by their slots."""
    model = next(case for case in BY_AXIS if case.name == "qwen2_vl").model(dtype=torch.float32)
    layers = attention_layers(model)
    assert Rap(retain=0.5).keys == "fold"
    assert all("different axes" in key_mixing_limit(layer, model.config) for layer in layers)
    with pytest.raises(UnsupportedModelError, match="positions of several axes: use method rap"):
        parse_method("palu", 0.5).check_model(model)
