"""The identity everything rests on: a pruned model is the dense one with what it drops zeroed.

The dense side is a stock transformers model whose rows are zeroed in `plans.zeroed`.
"""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.layouts import llama_layout
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan, zeroed
from rap.surgery.apply import apply

FAMILIES = ["llama", "mistral", "qwen2"]
TOKENS = 11

# The same sums in another order: some 100 roundings of 1e-16 of values below 100.
MODULE_BOUND = 1e-10
# The families' norms round to float32 inside, whatever the model's dtype is. A sum that lies at a
# rounding boundary may go either way there, which is 6e-8 of the value, and is amplified once.
LOGIT_BOUND = {torch.float64: 1e-6, torch.float32: 1e-5}


@st.composite
def cases(draw) -> tuple[dict[str, Any], list[tuple[int, int] | None], int]:
    """Fields of a tiny model, what each of its layers keeps, and a seed."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    groups = draw(st.sampled_from([1, 2, 3, 7]))
    pairs = draw(st.integers(2, 9))
    layers = draw(st.integers(1, 3))
    kept = st.one_of(st.none(), st.tuples(st.integers(1, pairs), st.integers(1, 2 * pairs)))
    widths = [draw(kept) for _ in range(layers)]
    if widths == [None] * layers:
        widths[0] = (1, 1)
    fields = {
        "model_type": draw(st.sampled_from(FAMILIES)),
        "rope": draw(st.sampled_from(["default", "llama3", "yarn"])),
        "heads": kv_heads * groups,
        "hidden": kv_heads * groups * (1 + 24 // (kv_heads * groups)),
        "kv_heads": kv_heads,
        "head_dim": 2 * pairs,
        "layers": layers,
    }
    return fields, widths, draw(st.integers(0, 2**20))


def _both(fields: dict[str, Any], widths: list, seed: int, **layout: Any) -> tuple[Any, Any]:
    """The pruned model and the zeroed dense one."""
    model = tiny_model(**fields, seed=seed)
    plan = random_plan(model, widths, seed=seed)
    return apply(model, plan), zeroed(model, plan, **layout)


def _difference_of_modules(small: Any, dense: Any, seed: int) -> float:
    """The largest difference of any layer's attention output over random hidden states."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(
        2, TOKENS, dense.config.hidden_size, dtype=torch.float64, generator=generator
    )
    # Positions that do not start at zero and differ from row to row, as with left padding.
    positions = torch.stack([torch.arange(TOKENS), 40 + torch.arange(TOKENS)])
    tables = dense.model.rotary_emb(hidden, positions)
    outputs = [
        [layer.self_attn(hidden, tables, None)[0] for layer in model.model.layers]
        for model in (small, dense)
    ]
    return max(float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))


def _decode(model: Any, tokens: Tensor) -> Tensor:
    """Logits [B, T, V] of a prompt of five tokens, then one token at a time from the cache."""
    output = model(tokens[:, :5], use_cache=True)
    parts = [output.logits]
    for position in range(5, tokens.shape[1]):
        output = model(tokens[:, position : position + 1], past_key_values=output.past_key_values)
        parts.append(output.logits)
    return torch.cat(parts, 1)


@settings(max_examples=30, derandomize=True)
@given(cases())
@torch.no_grad()
def test_attention_equals_the_zeroed_dense_attention(case):
    fields, widths, seed = case
    small, dense = _both(fields | {"dtype": torch.float64}, widths, seed)
    assert _difference_of_modules(small, dense, seed) < MODULE_BOUND


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@settings(max_examples=12, derandomize=True)
@given(case=cases())
@torch.no_grad()
def test_logits_equal_the_zeroed_dense_logits_in_prefill_and_decode(dtype, case):
    fields, widths, seed = case
    small, dense = _both(fields | {"dtype": dtype}, widths, seed)
    tokens = random_tokens(2, TOKENS, seed)
    expected = dense(tokens).logits
    bound = LOGIT_BOUND[dtype] * float(expected.abs().max())
    assert (small(tokens).logits - expected).abs().max() < bound
    assert (_decode(small, tokens) - expected).abs().max() < bound


@pytest.mark.parametrize("table", ["repeated", "interleaved", "half"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@settings(max_examples=4, derandomize=True)
@given(case=cases())
@torch.no_grad()
def test_identity_holds_in_every_layout(pairing, table, case):
    fields, widths, seed = case
    fields |= {"model_type": "llama", "dtype": torch.float64}
    with llama_layout(pairing, table):
        small, dense = _both(fields, widths, seed, interleaved=pairing == "interleaved")
        assert _difference_of_modules(small, dense, seed) < MODULE_BOUND
        tokens = random_tokens(2, TOKENS, seed)
        expected = dense(tokens).logits
        bound = LOGIT_BOUND[torch.float64] * float(expected.abs().max())
        assert (_decode(small, tokens) - expected).abs().max() < bound


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@torch.no_grad()
def test_identity_holds_for_partial_rotation(pairing):
    with llama_layout(pairing, rotary_pairs=4):
        fields = {"dtype": torch.float64}
        small, dense = _both(fields, [(2, 5), (3, 16)], 3, interleaved=pairing == "interleaved")
        assert small.model.layers[0].self_attn.key_width == 2 * 2 + 8
        assert _difference_of_modules(small, dense, 3) < MODULE_BOUND


@pytest.mark.parametrize(
    "window",
    [
        {"model_type": "mistral", "sliding_window": 4},
        {
            "model_type": "qwen2",
            "sliding_window": 4,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ],
    ids=["mistral", "qwen2"],
)
@torch.no_grad()
def test_identity_holds_under_a_sliding_window(window):
    small, dense = _both(window | {"dtype": torch.float64}, [(3, 5), (5, 9)], 1)
    tokens = random_tokens(2, TOKENS)
    expected = dense(tokens).logits
    bound = LOGIT_BOUND[torch.float64] * float(expected.abs().max())
    assert (small(tokens).logits - expected).abs().max() < bound
    assert (_decode(small, tokens) - expected).abs().max() < bound
    # The window matters at this length, else the comparison would show nothing about it.
    wide, _ = _both(window | {"dtype": torch.float64, "sliding_window": 64}, [(3, 5), (5, 9)], 1)
    assert (wide(tokens).logits - expected).abs().max() > 1e-3


@torch.no_grad()
def test_keeping_everything_is_the_dense_model_bit_for_bit():
    small, _ = _both({"model_type": "qwen2"}, [(8, 16), None], 0)
    tokens = random_tokens(2, TOKENS)
    dense = tiny_model("qwen2")
    assert torch.equal(small(tokens).logits, dense(tokens).logits)


def _scale_by_kept_width(attention: Any) -> None:
    attention.scaling = attention.key_width**-0.5


def _share_the_first_head_index(attention: Any) -> None:
    attention.frequency_index[:] = attention.frequency_index[:1].clone()


def _count_kept_pairs_from_zero(attention: Any) -> None:
    attention.frequency_index[:] = torch.arange(attention.num_slots, dtype=torch.int32)


def _serve_query_heads_in_turn(attention: Any) -> None:
    weight = attention.q_proj.weight.unflatten(0, (2, 3, attention.key_width))
    attention.q_proj.weight = torch.nn.Parameter(weight.transpose(0, 1).flatten(0, 2).contiguous())


def _swap_members_of_pairs(attention: Any) -> None:
    weight = attention.k_proj.weight.unflatten(0, (-1, 2, attention.num_slots))
    attention.k_proj.weight = torch.nn.Parameter(weight.flip(1).flatten(0, 2).contiguous())


@pytest.mark.parametrize(
    "fault",
    [
        _scale_by_kept_width,
        _share_the_first_head_index,
        _count_kept_pairs_from_zero,
        _serve_query_heads_in_turn,
        _swap_members_of_pairs,
    ],
)
@torch.no_grad()
def test_the_comparison_sees(fault):
    """Each planted fault moves the output a million bounds away, so the bounds above are tests."""
    fields = {"heads": 6, "kv_heads": 2, "hidden": 36, "dtype": torch.float64}
    small, dense = _both(fields, [(3, 7), (5, 9)], 0)
    assert _difference_of_modules(small, dense, 0) < MODULE_BOUND
    faulty = copy.deepcopy(small)
    fault(faulty.model.layers[0].self_attn)
    assert _difference_of_modules(faulty, dense, 0) > 1e6 * MODULE_BOUND
