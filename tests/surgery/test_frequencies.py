"""Frequencies that depend on the length of a text, of models that have read some before a cut."""

from typing import Any

import pytest
import torch

from cases.models import random_tokens, tiny_model
from cases.plans import plan_of
from rap.planning.plan import PairPlan
from rap.runtime.memory import in_precision
from rap.surgery.apply import apply

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [float(i + 1) for i in range(8)], "factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def whole(model: Any) -> Any:
    """A plan that keeps everything."""
    layer = PairPlan.of_indices([list(range(8))] * 2, [list(range(16))] * 2)
    return plan_of(model, [layer] * 2)


@pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("read", [(), (16,), (60,), (60, 16), (16, 60)], ids=str)
@torch.no_grad()
def test_a_cut_after_some_texts_is_a_cut_before_them(rope: dict[str, Any], read: tuple) -> None:
    """A pass makes two names of one tensor, or grows the frequencies until a short text comes."""
    model = tiny_model(rope_parameters=dict(rope), max_position_embeddings=32)
    for length in read:
        model(random_tokens(1, length))
    small = apply(model, whole(model))
    for length in (16, 60, 16):
        ids = random_tokens(1, length, seed=length)
        torch.testing.assert_close(small(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_copy_in_another_precision_keeps_its_frequencies() -> None:
    model = tiny_model(rope_parameters=dict(LONG))
    model(random_tokens(1, 16))
    cast = in_precision(model, torch.bfloat16)
    cast(random_tokens(1, 16))
    assert cast.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(cast.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
