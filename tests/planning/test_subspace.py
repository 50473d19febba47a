"""The weighted subspace against the Eckart-Young bound, and folded keys against complex algebra."""

import math

import pytest
import torch

import rap
from cases.groupings import groupings
from cases.models import random_tokens, tiny_model
from rap.model.layers import attention_layers
from rap.model.rope import AttentionShape, HeadGeometry
from rap.planning.folding import (
    EDGES,
    NUM_DISTANCES,
    fold_head,
    frequency_groups,
    logit_error,
    spectrum,
    usual_reach,
)
from rap.planning.subspace import hermitian_root, output_gram, weighted_subspace

SIZE = 8


def moment(seed: int, *, dtype: torch.dtype = torch.float64, size: int = SIZE) -> torch.Tensor:
    """A Hermitian second moment with eigenvalues over four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * size, size, dtype=dtype, generator=generator)
    rows = rows * torch.logspace(0, -2, size, dtype=torch.float64)
    return rows.mH @ rows / len(rows)


def loss(inner: torch.Tensor, outer: torch.Tensor, projection: torch.Tensor) -> float:
    left = torch.eye(len(inner), dtype=inner.dtype) - projection
    return float(torch.trace(outer @ left @ inner @ left.mH).real)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_error_is_the_eckart_young_bound(dtype: torch.dtype, rank: int) -> None:
    inner, outer = moment(1, dtype=dtype), moment(2, dtype=dtype)
    factors = weighted_subspace(inner, outer, rank)
    bound = float(factors.singular[rank:].square().sum())
    assert loss(inner, outer, factors.up @ factors.down) == pytest.approx(bound, rel=1e-9)
    # The bound itself, from an independent route: singular values of outer^1/2 inner^1/2.
    product = torch.linalg.eigvals(outer @ inner).real.sort(descending=True).values
    assert bound == pytest.approx(float(product[rank:].sum()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_factors_have_equal_norms_whatever_the_units(dtype: torch.dtype) -> None:
    """Moments of gradients are millions of times smaller than those of activations."""
    inner, outer = moment(1, dtype=dtype), moment(2, dtype=dtype)
    factors, small = (weighted_subspace(inner, scale * outer, 5) for scale in (1.0, 1e-8))
    torch.testing.assert_close(factors.down.norm(dim=-1), factors.up.norm(dim=-2))
    torch.testing.assert_close(small.down.abs(), factors.down.abs(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(small.up @ small.down, factors.up @ factors.down)


def test_no_other_projection_is_better() -> None:
    inner, outer = moment(3), moment(4)
    best = weighted_subspace(inner, outer, 3)
    optimum = loss(inner, outer, best.up @ best.down)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e-1):
        noise = torch.randn(3, SIZE, dtype=torch.float64, generator=generator) * scale
        assert loss(inner, outer, best.up @ (best.down + noise)) > optimum


def test_full_rank_is_the_identity() -> None:
    factors = weighted_subspace(moment(5), moment(6), SIZE)
    torch.testing.assert_close(
        factors.up @ factors.down, torch.eye(SIZE).double(), atol=1e-9, rtol=0
    )


def test_directions_without_energy_do_not_break_the_factors() -> None:
    inner = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    inner[0, 0] = 1.0
    factors = weighted_subspace(inner, moment(7), SIZE)
    assert torch.isfinite(factors.up).all()
    assert torch.isfinite(factors.down).all()
    assert float((factors.up @ factors.down)[0, 0]) == pytest.approx(1.0, abs=1e-5)


def test_what_reads_the_values_is_the_gram_of_every_query_head() -> None:
    shape = AttentionShape(6, 2, 5, HeadGeometry(4, 4))
    w_o = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    found = output_gram(w_o, shape)
    assert found.shape == (6, 4, 4)
    for head, gram in enumerate(found):
        columns = w_o[:, 4 * head : 4 * head + 4].double()
        torch.testing.assert_close(gram, columns.mT @ columns)


def test_groups_follow_the_turn_over_the_context() -> None:
    frequencies = torch.tensor([1.0, 0.05, 0.02, 0.001, 0.0005], dtype=torch.float64)
    assert frequency_groups(frequencies, 100, (1.0, 10.0)) == [0, -2, -2, -1, -1]
    assert frequency_groups(frequencies, 100, ()) == [0, 1, 2, 3, 4]


def test_folding_at_full_width_is_plain() -> None:
    frequencies = torch.logspace(0, -4, SIZE, dtype=torch.float64)
    query, key = (moment(seed, dtype=torch.complex128) for seed in (8, 9))
    head = fold_head(query, key, frequencies, SIZE, context=512)
    assert head.frequency.tolist() == list(range(SIZE))
    assert torch.equal(head.key_mix, torch.eye(SIZE, dtype=torch.complex128))
    assert torch.equal(head.query_mix, head.key_mix)
    assert head.error == pytest.approx(0.0, abs=1e-20)


def test_equal_frequencies_fold_without_mismatch() -> None:
    """One frequency for all pairs: the error is the low-rank bound and nothing else."""
    frequencies = torch.full((SIZE,), 1e-3, dtype=torch.float64)
    query, key = (moment(seed, dtype=torch.complex128) for seed in (10, 11))
    with groupings((3.0,)):
        head = fold_head(query, key, frequencies, 3, context=512)
    bound = float(spectrum(query, key, frequencies, 512)[3:].sum())
    assert head.error == pytest.approx(bound, rel=1e-8)
    with groupings(()):
        pairs = fold_head(query, key, frequencies, 3, context=512)
    assert head.error < pairs.error


def test_mismatch_counts() -> None:
    """The same slots at a wrong frequency have a larger error: the control of the measure."""
    frequencies = torch.tensor([0.02, 0.018, 0.016, 0.001], dtype=torch.float64)
    query, key = (moment(seed, dtype=torch.complex128, size=4) for seed in (12, 13))
    with groupings((30.0,)):
        head = fold_head(query, key, frequencies, 2, context=1000)
    roots = hermitian_root(query), hermitian_root(key)
    wrong = torch.full_like(head.frequency, 3)
    slots = (head.key_mix, head.query_mix, usual_reach(1000))
    assert head.error < logit_error(*roots, frequencies, wrong, *slots)


def turned_by(pairs: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs as channels [..., 2P], turned as `rope.rotate_pairs` turns them."""
    first, second, cos, sin = pairs.real, pairs.imag, angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.parametrize("turned", [False, True])
def test_logit_error_is_that_of_rotated_channels(turned: bool) -> None:
    """Mean square over readers and keys, by real arithmetic; a query stands d after its key."""
    frequencies = torch.tensor([0.3, 0.02, 0.018, 0.016, 0.001], dtype=torch.float64)
    context, size = 400, len(frequencies)
    generator = torch.Generator().manual_seed(16)
    samples = torch.randn(2, 30, size, dtype=torch.complex128, generator=generator)
    mix = torch.randn(2, size, size, dtype=torch.complex128, generator=generator)
    readers, keys = samples @ mix
    readers = torch.cat([readers, 1j * readers])
    moments = [x.mT @ x.conj() / len(x) for x in (readers, keys)]
    settings = {"turned": True} if turned else {}
    with groupings((10.0,)):
        head = fold_head(*moments, frequencies, 3, context, **settings)
    assert len(set(head.frequency.tolist()) & {1, 2, 3, 4}) >= 2  # some slots are of a group
    errors = []
    for step in torch.linspace(0, 1, NUM_DISTANCES, dtype=torch.float64):
        distance = torch.expm1(step * math.log1p(math.sqrt(context)))
        queries = readers
        if turned:  # as the key sees them, so that the query itself is turned back
            queries = readers * torch.polar(torch.ones(()).double(), -distance * frequencies)
        kept = distance * frequencies[head.frequency]
        full = turned_by(queries, distance * frequencies) @ turned_by(keys, 0 * frequencies).T
        short = turned_by(queries @ head.query_mix.T, kept)
        errors.append(full - short @ turned_by(keys @ head.key_mix.T, 0 * kept).T)
    explicit = torch.stack(errors).square().mean()
    assert head.error == pytest.approx(float(explicit), rel=1e-9)
    weights = spectrum(*moments, frequencies, context, edges=())
    assert float(weights.sum()) == pytest.approx(_without(readers, keys), rel=1e-9)


def _without(readers: torch.Tensor, keys: torch.Tensor) -> float:
    """Mean square of what single pairs add to a logit, summed over pairs."""
    channels = [torch.stack([x.real, x.imag], -1) for x in (readers, keys)]
    return float(torch.einsum("npc,mpc->nmp", *channels).square().mean((0, 1)).sum())


def test_the_best_candidate_is_chosen() -> None:
    frequencies = torch.logspace(0, -4, SIZE, dtype=torch.float64)
    query, key = (moment(seed, dtype=torch.complex128) for seed in (14, 15))
    best = fold_head(query, key, frequencies, 4, context=512)
    alone = []
    for edges in EDGES:
        with groupings(edges):
            alone.append(fold_head(query, key, frequencies, 4, context=512))
    assert best.error == min(head.error for head in alone)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_full_width_reproduces_the_dense_model(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.float64)
    method = rap.Rap(retain=1.0, keys="fold", values="subspace", budget="uniform")
    statistics = rap.calibrate(model, random_tokens(2, 32), method.needs)
    small = method.apply(model, method.plan(model, statistics))
    ids = random_tokens(2, 24, seed=1)
    with torch.no_grad():
        # The value basis and its inverse are float64; their condition costs a few digits.
        torch.testing.assert_close(small(ids).logits, model(ids).logits, atol=1e-8, rtol=0)


def test_folded_attention_is_the_complex_formula() -> None:
    """Logits of folded slots computed by hand: Re(q'^H e^{i phi (s - t)} k') over mixed pairs."""
    model = tiny_model("llama", dtype=torch.float64, heads=4, kv_heads=2, head_dim=16)
    method = rap.Rap(retain=0.5, merge=1, budget="uniform", context=2000)
    statistics = rap.calibrate(model, random_tokens(2, 64), method.needs)
    plan = method.plan(model, statistics)
    small = method.apply(model, plan)
    small.set_attn_implementation("eager")
    layer, planned = attention_layers(model)[0], plan.layers[0]
    assert planned is not None
    assert planned.key_mix_GMP2 is not None
    assert planned.query_mix_GMP2 is not None
    ids = random_tokens(1, 12, seed=2)
    with torch.no_grad():
        attention = small(ids, output_attentions=True).attentions[0][0]
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))[0]
        q, k = (getattr(layer.module, f"{projection}_proj")(hidden) for projection in "qk")
    pairs_q, pairs_k = (
        torch.complex(x[..., :8], x[..., 8:])
        for x in (q.unflatten(-1, (4, 16)), k.unflatten(-1, (2, 16)))
    )
    theta = model.model.rotary_emb.inv_freq.double()
    time = torch.arange(12.0, dtype=torch.float64)
    for head in range(4):
        group = head // 2
        mixes = (planned.query_mix_GMP2[group], planned.key_mix_GMP2[group])
        query, key = (
            pairs @ torch.view_as_complex(mix.contiguous()).T
            for pairs, mix in zip((pairs_q[:, head], pairs_k[:, group]), mixes, strict=True)
        )
        turn = torch.polar(
            torch.ones(1).double(), time[:, None] * theta[planned.frequency_GM[group].long()]
        )
        logits = ((query * turn).conj() @ (key * turn).T).real / 4
        logits = logits.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
        # The tables of cos and sin are float32 inside the model.
        torch.testing.assert_close(attention[head], logits.softmax(-1), atol=1e-6, rtol=0)
