"""Layers that read the cache of an earlier one, in the real engine: they cache nothing.

The reference is the pruned model in transformers, itself compared with the dense one elsewhere.
"""

import pytest

from cases.models import VOCABULARY, tiny_model
from cases.plans import random_plan
from cases.served import assert_agrees, eager, prompts_of, run_divided, run_tiny
from rap.serving.engine import Round
from rap.surgery.apply import apply

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

FULL, SLIDING = "full_attention", "sliding_attention"
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8} | {
    "vocab_size_per_layer_input": VOCABULARY
}
# Layers 3 and 4 read layer 2. Without windows the capacity is the plain sum over layers.
GEMMA3N = SHARED | {
    "layers": 5,
    "layer_types": [FULL] * 5,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1e4},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    },
    "intermediate_size": [128] * 5,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    "laurel_rank": 8,
    "altup_num_inputs": 2,
}
# Layer 4 reads layer 2, layer 5 layer 3, whose keys and values are of one linear and one head.
GEMMA4 = SHARED | {
    "layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 16,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
        FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}


def _pruned(path, family, fields, widths):
    model = tiny_model(family, head_dim=64, hidden=64, **fields)
    small = eager(apply(model, random_plan(model, [*widths, None, None])))
    small.save_pretrained(path)
    return small


def test_readers_take_no_cache_with_sizes_by_layer_chunks_and_prefix_cache(tmp_path):
    """One source pruned, its readers with it; one layer of another size, one dense."""
    small = _pruned(tmp_path, "gemma3n_text", GEMMA3N, [(20, 40), None, (16, 32)])
    again = Round(prompts_of(3, 40, 140), max_tokens=8)
    run = run_tiny(
        tmp_path,
        Round(prompts_of(3, 40, 140), max_tokens=8, prompt_logprobs=True),
        again,
        again,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    assert_agrees(small, run.rounds[0])
    assert sum(one.cached_tokens for one in run.rounds[2]) >= 128
    assert_agrees(small, run.rounds[2])
    # Two KV heads of float32 keys and values: 40 as 64, 64 and 32 channels, none of the readers.
    assert run.capacity_tokens == pytest.approx(2**27 / (2 * 4 * 2 * (64 + 64 + 32)), rel=0.01)


@pytest.mark.parametrize("widths", [(16, 32), None], ids=["pruned", "dense"])
def test_two_ranks_with_heads_divided_and_replicated(tmp_path, widths):
    """The heads of layers with a window are divided, the one of those without is replicated."""
    small = _pruned(tmp_path, "gemma4_text", GEMMA4, [(16, 32), (40, 80), widths, (20, 64)])
    assert_agrees(small, run_divided(tmp_path, 3, 40, 140))


@pytest.mark.families
@pytest.mark.parametrize(
    ("family", "fields", "widths"),
    [
        ("gemma3n_text", GEMMA3N, [(20, 40), None, (16, 32)]),
        ("gemma4_text", GEMMA4, [(16, 32), (40, 80), (16, 32), (20, 64)]),
    ],
    ids=["gemma3n", "gemma4"],
)
def test_compiled(tmp_path, family, fields, widths):
    small = _pruned(tmp_path, family, fields, widths)
    asked = Round(prompts_of(3, 40, 140), max_tokens=8, prompt_logprobs=True)
    assert_agrees(small, run_tiny(tmp_path, asked, enforce_eager=False).rounds[0])
