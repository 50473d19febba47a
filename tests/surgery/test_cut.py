"""Cuts of weights: plain rows against loops, and mixed slots and value subspaces as identities."""

import dataclasses

import pytest
import torch
from torch import Tensor

from cases.layouts import llama_layout
from cases.models import random_tokens, tiny_model
from cases.plans import plan_of, random_plan
from rap.model.errors import PlanError
from rap.model.kinds.pairs import cut
from rap.model.rope import AttentionShape, HeadGeometry
from rap.model.specs import QKNorm
from rap.planning.plan import PairPlan
from rap.surgery.apply import apply

# Two KV heads with three query heads each; heads of eight channels of which six rotate.
SHAPE = AttentionShape(6, 2, 5, HeadGeometry(8, 6))
LAYER = PairPlan.of_indices([[0, 2], [1, 2]], [[0, 3, 7], [1, 2, 5]], [[1], [0]])
HEADS = {"q": 6, "k": 2, "v": 2, "o": 6}


def _kept(projection: str, head: int, interleaved: bool) -> list[int]:
    """Dense channels of a head that stay, in their new order."""
    if projection in "vo":
        return LAYER.channels_GC[head].tolist()
    pairs = LAYER.frequency_GM[head].tolist()
    first = [2 * pair for pair in pairs] if interleaved else pairs
    second = [channel + 1 for channel in first] if interleaved else [pair + 3 for pair in pairs]
    return [*first, *second, *(6 + free for free in LAYER.free_GN[head].tolist())]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("projection", "qkvo")
def test_plain_cut_keeps_the_named_rows(projection, dtype, pairing):
    shape = dataclasses.replace(SHAPE, geometry=HeadGeometry(8, 6, pairing))
    heads = HEADS[projection]
    weight = torch.randn(heads * 8, 5).to(dtype)
    rows = [
        head * 8 + channel
        for head in range(heads)
        for channel in _kept(projection, head // (heads // 2), pairing == "interleaved")
    ]
    dense = weight.T.contiguous() if projection == "o" else weight
    result = cut(projection, dense, LAYER, shape)
    assert torch.equal(result, weight[rows].T if projection == "o" else weight[rows])
    assert result.is_contiguous()
    if projection != "o":
        assert torch.equal(cut(projection, weight[:, 0], LAYER, shape), weight[rows, 0])


@pytest.mark.parametrize("projection", "qkvo")
def test_cut_shares_no_memory_with_the_dense_tensor(projection):
    size = (5, 48) if projection == "o" else (HEADS[projection] * 8, 5)
    dense = torch.randn(size)
    everything = PairPlan.of_indices([[0, 1, 2]] * 2, [list(range(8))] * 2, [[0, 1]] * 2)
    for layer in (LAYER, everything):
        cut(projection, dense, layer, SHAPE).zero_()
    assert (dense != 0).all()
    bias = torch.ones(5)
    cut("o", bias, LAYER, SHAPE).zero_()
    assert (bias == 1).all()


def test_rows_for_the_norm_are_cut_in_their_mode_alone():
    """Two combinations of a head's channels behind those it keeps; `exact` keeps everything."""
    sketch = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    layer = dataclasses.replace(LAYER, key_sketch_GSD=sketch)
    weight = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    constant, rows, exact = (
        cut("k", weight, layer, SHAPE, norm=QKNorm(), norm_mode=mode)
        for mode in ("constant", "rows", "exact")
    )
    assert torch.equal(constant, cut("k", weight, LAYER, SHAPE))
    assert torch.equal(exact, weight)
    for head, found in enumerate(rows.unflatten(0, (2, 7))):
        assert torch.equal(found[:5], constant.unflatten(0, (2, 5))[head])
        torch.testing.assert_close(found[5:], sketch[head] @ weight[8 * head : 8 * head + 8])


def test_what_works_on_single_channels_refuses_mixtures():
    mix = _one_hot(LAYER.frequency_GM, 3)
    folded = dataclasses.replace(LAYER, query_mix_GMP2=mix, key_mix_GMP2=mix)
    for projection, size in (("k", (16, 5)), ("q_norm.weight", (8,))):
        with pytest.raises(PlanError, match="keys of a layer with QK-norm cannot be folded"):
            cut(projection, torch.ones(size), folded, SHAPE, norm=QKNorm())
    subspace = dataclasses.replace(
        LAYER,
        channels_GC=None,
        value_down_GCD=torch.ones(2, 3, 8),
        value_up_GDC=torch.ones(2, 8, 3),
    )
    with pytest.raises(PlanError, match="values behind a gate cannot be a subspace"):
        cut("gate", torch.ones(48, 5), subspace, SHAPE)


def test_unknown_projection_is_an_assertion():
    with pytest.raises(AssertionError):
        cut("x", torch.zeros(5, 5), LAYER, SHAPE)


def _one_hot(index_GM: Tensor, num_pairs: int) -> Tensor:
    """Mixing matrices [G, M, P, 2] that choose the pairs themselves."""
    real = torch.nn.functional.one_hot(index_GM.long(), num_pairs).double()
    return torch.stack([real, torch.zeros_like(real)], -1)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_by_one_hot_matrices_is_plain_pruning_bit_for_bit(dtype, pairing):
    with llama_layout(pairing, rotary_pairs=5):
        model = tiny_model(heads=6, kv_heads=2, hidden=36, dtype=dtype, attention_bias=True)
        plan = random_plan(model, [(3, 5), (4, 7)])
        mixed = []
        for layer in plan.layers:
            mix = _one_hot(layer.frequency_GM, 5)
            mixed.append(dataclasses.replace(layer, query_mix_GMP2=mix, key_mix_GMP2=mix))
        expected = apply(model, plan).state_dict()
        found = apply(model, plan_of(model, mixed)).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@torch.no_grad()
def test_turning_a_pair_of_q_and_k_alike_changes_nothing(model_type):
    """A phase commutes with the rotation: every slot times e^(i phi) leaves all logits as they are.

    1e-6 for the norms' float32 roundings, as in test_identity.
    """
    model = tiny_model(model_type, heads=6, kv_heads=2, hidden=36, dtype=torch.float64)
    plan = random_plan(model, [(3, 16), (8, 16)])
    generator = torch.Generator().manual_seed(1)
    turned = []
    for layer in plan.layers:
        phase = torch.rand(layer.frequency_GM.shape, generator=generator, dtype=torch.float64) * 7
        mix = _one_hot(layer.frequency_GM, 8)[..., :1] * torch.stack(
            [phase.cos(), phase.sin()], -1
        ).unsqueeze(2)
        turned.append(dataclasses.replace(layer, query_mix_GMP2=mix, key_mix_GMP2=mix))
    tokens = random_tokens(2, 9)
    expected = apply(model, plan)(tokens).logits
    found = apply(model, plan_of(model, turned))(tokens).logits
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
    # Only the keys turned is another model.
    half = [
        dataclasses.replace(layer, query_mix_GMP2=_one_hot(layer.frequency_GM, 8))
        for layer in turned
    ]
    other = apply(model, plan_of(model, half))(tokens).logits
    assert (other - expected).abs().max() > 1e-2


@torch.no_grad()
def test_two_slots_at_one_frequency_add_up_to_the_pair():
    """k.q of a pair split over two slots of its frequency, weights a and 1 - a on the key side."""
    model = tiny_model(kv_heads=1, layers=1, dtype=torch.float64)
    plain = PairPlan.of_indices([[1, 5]], [list(range(16))])
    split = dataclasses.replace(
        plain,
        frequency_GM=torch.tensor([[1, 1, 5]], dtype=torch.int32),
        query_mix_GMP2=_one_hot(torch.tensor([[1, 1, 5]]), 8),
        key_mix_GMP2=_one_hot(torch.tensor([[1, 1, 5]]), 8)
        * torch.tensor([0.3, 0.7, 1.0])[:, None, None].double(),
    )
    tokens = random_tokens(2, 9)
    expected = apply(model, plan_of(model, [plain]))(tokens).logits
    small = apply(model, plan_of(model, [split]))
    assert small.model.layers[0].self_attn.frequency_index.tolist() == [[1, 1, 5]]
    # 1e-6 for the norms' float32 roundings, as in test_identity.
    assert (small(tokens).logits - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@torch.no_grad()
def test_value_subspace_of_full_rank_is_the_dense_model(model_type):
    """Any orthogonal basis per KV head. 1e-6 as in test_identity, for the norms' roundings."""
    model = tiny_model(model_type, heads=6, kv_heads=2, hidden=36, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    layers = []
    for _ in range(2):
        basis = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator).double()).Q
        every_pair = torch.arange(8, dtype=torch.int32).expand(2, -1)
        layers.append(
            PairPlan(
                every_pair,
                torch.empty(2, 0, dtype=torch.int32),
                value_down_GCD=basis.transpose(1, 2),
                value_up_GDC=basis,
            )
        )
    tokens = random_tokens(2, 9)
    expected = model(tokens).logits
    small = apply(model, plan_of(model, layers))
    assert (small(tokens).logits - expected).abs().max() < 1e-6 * expected.abs().max()
    # Folding back through another head's basis is another model.
    swapped = [
        dataclasses.replace(layer, value_up_GDC=layer.value_up_GDC.flip(0)) for layer in layers
    ]
    other = apply(model, plan_of(model, swapped))(tokens).logits
    assert (other - expected).abs().max() > 1e-2
