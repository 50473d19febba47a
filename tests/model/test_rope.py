"""Geometry: which channels pair up, at which frequency, and the rotation of kept slots."""

import cmath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases.models import tiny_model
from rap.model.errors import UnsupportedModelError
from rap.model.layers import rotary_module
from rap.model.rope import (
    AttentionShape,
    HeadGeometry,
    gather_pairs,
    pair_tables,
    read_frequencies,
    rotate_pairs,
)


@pytest.mark.parametrize(
    ("geometry", "order", "pairs"),
    [
        (HeadGeometry(6, 6), [0, 1, 2, 3, 4, 5], [[0, 3], [1, 4], [2, 5]]),
        (HeadGeometry(6, 6, "interleaved"), [0, 2, 4, 1, 3, 5], [[0, 1], [2, 3], [4, 5]]),
        (HeadGeometry(7, 4), [0, 1, 2, 3, 4, 5, 6], [[0, 2], [1, 3]]),
        (HeadGeometry(7, 4, "interleaved"), [0, 2, 1, 3, 4, 5, 6], [[0, 1], [2, 3]]),
        (HeadGeometry(3, 0), [0, 1, 2], []),
    ],
    ids=["half", "interleaved", "partial half", "partial interleaved", "no positions"],
)
def test_channels_of_a_head(geometry, order, pairs):
    assert geometry.canonical_order().tolist() == order
    assert geometry.pair_channels().tolist() == pairs
    assert (geometry.num_pairs, geometry.num_free) == (len(pairs), len(order) - 2 * len(pairs))


@pytest.mark.parametrize("sizes", [(4, 6), (4, 3), (4, -2)], ids=["wide", "odd", "negative"])
def test_impossible_geometry_is_an_assertion(sizes):
    with pytest.raises(AssertionError):
        HeadGeometry(*sizes)


def test_group_size_counts_query_heads_of_a_kv_head():
    shape = AttentionShape(21, 3, 64, HeadGeometry(8, 8))
    assert (shape.group_size, shape.head_dim) == (7, 8)


@st.composite
def slots(draw):
    """Sizes of a rotation, an index per KV head that may repeat, and a seed."""
    kv_heads, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    kept = draw(st.integers(1, 2 * pairs))
    row = st.lists(st.integers(0, pairs - 1), min_size=kept, max_size=kept).map(sorted)
    index = [draw(row) for _ in range(kv_heads)]
    return draw(st.sampled_from([1, 2, 3, 7])), draw(st.integers(0, 3)), pairs, index


@settings(max_examples=30, derandomize=True)
@given(slots(), st.booleans())
def test_rotation_multiplies_each_slot_by_its_own_phase(case, per_row_positions):
    """Against Python's complex numbers, one by one; 1e-14 is ten roundings of values near 1."""
    groups, free, pairs, index = case
    kv_heads, kept = len(index), len(index[0])
    generator = torch.Generator().manual_seed(kept)
    rows = 2 if per_row_positions else 1
    angle_BTP = torch.rand(rows, 3, pairs, generator=generator, dtype=torch.float64) * 7
    x = torch.randn(
        2, kv_heads * groups, 3, 2 * kept + free, generator=generator, dtype=torch.float64
    )
    # Not contiguous, as a view of a projection's output is not.
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    tables = (gather_pairs(t, torch.tensor(index)) for t in (angle_BTP.cos(), angle_BTP.sin()))
    turned = rotate_pairs(x, *tables)

    assert torch.equal(turned[..., 2 * kept :], x[..., 2 * kept :])
    for batch, head, token in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        before, after = x[batch, head, token], turned[batch, head, token]
        for slot, pair in enumerate(index[head // groups]):
            angle = float(angle_BTP[batch % rows, token, pair])
            expected = complex(before[slot], before[kept + slot]) * cmath.exp(1j * angle)
            assert abs(complex(after[slot], after[kept + slot]) - expected) < 1e-14


def test_rotation_of_a_layer_without_positions_changes_nothing():
    x = torch.randn(2, 4, 3, 5)
    nothing = torch.zeros(1, 2, 3, 0)
    assert torch.equal(rotate_pairs(x, nothing, nothing), x)


@pytest.mark.parametrize("kind", ["repeated", "interleaved", "half", "complex"])
def test_one_column_per_pair_of_every_table(kind):
    expected = torch.tensor([[[3.0, 5.0, 7.0]]]), torch.tensor([[[4.0, 6.0, 8.0]]])
    tables = {
        "half": expected,
        "repeated": tuple(torch.cat([values, values], -1) for values in expected),
        "interleaved": tuple(values.repeat_interleave(2, -1) for values in expected),
        "complex": torch.complex(*expected),
    }[kind]
    found = pair_tables(tables, 3, kind)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("rope", ["default", "llama3", "yarn"])
def test_frequencies_are_those_the_model_rotates_by(rope):
    rotary = rotary_module(tiny_model(rope=rope))
    found = read_frequencies(rotary)
    assert found.dtype == torch.float64
    assert torch.equal(found, rotary.inv_freq.double())
    assert not found.requires_grad
    plain = read_frequencies(rotary_module(tiny_model()))
    assert torch.equal(found, plain) == (rope == "default")


def test_rotary_module_without_frequencies_is_refused():
    with pytest.raises(UnsupportedModelError, match="Identity has no inv_freq"):
        read_frequencies(nn.Identity())
