"""Layers with a sliding window, left dense beside pruned full attention, in the real engine."""

import pytest

import rap
from cases.models import random_tokens, tiny_model
from cases.served import assert_agrees, eager, prompts_of, run_tiny
from rap.serving.engine import Round

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

WINDOW = 16
TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize("retain", [0.5, 1.0])
def test_the_cache_of_full_attention_holds_one_over_retain_tokens(tmp_path, retain):
    """Half of a head divides the pages of a dense one: nothing is padded."""
    fields = {"layers": 4, "layer_types": TYPES, "sliding_window": WINDOW}
    model = tiny_model("gemma3_text", head_dim=64, hidden=64, **fields)
    method = rap.parse_method("rap:merge=1:budget=uniform", retain=retain)
    statistics = rap.calibrate(model, random_tokens(2, 40), method.needs_for(model))
    plan = method.plan(model, statistics)
    assert plan.spared == (0, 2)
    small = eager(method.apply(model, plan))
    small.save_pretrained(tmp_path)
    run = run_tiny(tmp_path, Round(prompts_of(3, 40, 140), max_tokens=8, prompt_logprobs=True))
    assert_agrees(small, run.rounds[0])
    token = rap.footprint(small).kv_bytes_per_token
    assert token == retain * rap.footprint(model).kv_bytes_per_token
    # Both pairs of layers draw pages of one size from one pool; of windows few are held.
    assert run.capacity_tokens == pytest.approx(2**27 / token, rel=0.01)
