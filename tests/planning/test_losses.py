"""Expected losses of widths: against the loss formula on explicit projections, and measured."""

import dataclasses

import pytest
import torch

import rap
from cases.models import random_tokens, tiny_model
from rap.methods.dense import dense_layers
from rap.methods.values import layer_errors
from rap.model.layers import attention_layers
from rap.planning.losses import (
    Orders,
    free_moments,
    key_moments,
    one_width,
    part_losses,
    value_moments,
    value_subspace,
    width_errors,
)

CONTEXT = 256


@pytest.fixture(scope="module")
def calibrated() -> tuple:
    """A tiny Llama of three layers with every moment."""
    model = tiny_model("llama", dtype=torch.float64, heads=4, kv_heads=2, head_dim=16, layers=3)
    needs = {"pairs", "values", "gradients", "energy"}
    return model, rap.calibrate(model, random_tokens(6, 64), needs)


def curve(model, statistics, index, **orders):
    layer = attention_layers(model)[index]
    found, frequencies = statistics.layers[index], dense_layers(model).frequencies[index]
    keys = key_moments(found, "loss")
    values = value_moments(found, torch.empty(0), layer.shape, "loss")
    free = free_moments(found, "loss")
    parts = part_losses(keys, values, free, layer.shape, frequencies, CONTEXT, Orders(**orders))
    return one_width(*parts)


def backwards(size, heads=2):
    """Indices of every head from the last to the first: an order no moment knows of."""
    return torch.arange(size).flip(0).expand(heads, -1)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_values_lose_what_their_projection_takes_away(calibrated, steps):
    """1/2 tr(O (I - P) C (I - P)^T) of the planned subspace, summed over query heads, is the
    curve's part for values.
    """
    model, statistics = calibrated
    retain = steps / 8
    plan = rap.Rap(retain=retain, budget="uniform", align=2, merge=1).plan(model, statistics)
    layer, found = plan.layers[1], statistics.layers[1]
    down, up = layer.value_down_GCD, layer.value_up_GDC
    lost = torch.eye(16, dtype=torch.float64) - up.double() @ down.double()
    reader, moment = found["value_gradient"].double(), found["value_moment"].double()
    assert reader.shape == moment.shape == (4, 16, 16)
    lost = lost.repeat_interleave(2, 0)
    explicit = 0.5 * torch.einsum("hij,hjk,hkl,hil->", reader, lost, moment, lost)
    whole = curve(model, statistics, 1)
    keys_alone = _key_part(model, statistics, 1, steps)
    torch.testing.assert_close(
        torch.tensor(whole[steps] - keys_alone, dtype=torch.float64), explicit, rtol=1e-5, atol=0
    )


def _key_part(model, statistics, index, steps):
    """The curve with values that no gradient reaches."""
    found = dict(statistics.layers[index])
    found["value_gradient"] = torch.zeros_like(found["value_gradient"])
    layers = [None] * index + [found]
    return curve(model, dataclasses.replace(statistics, layers=tuple(layers)), index)[steps]


DROPPED = [
    {"pairs_GP": backwards(8), "free_GF": backwards(0)},
    {"channels_GD": backwards(16)},
]


@pytest.mark.parametrize("orders", [{}, *DROPPED])
def test_curves_fall_to_nothing(calibrated, orders):
    losses = torch.tensor(curve(*calibrated, 2, **orders), dtype=torch.float64)
    assert losses[-1] == 0
    assert (losses.diff() <= 0).all()
    if not orders:
        assert (losses.diff().diff() >= -1e-12).all()


def random_moments(generator, size, heads=2, complex_numbers=False):
    """Second moments [heads, size, size] of few samples, so that parts cancel or add up."""
    dtype = torch.complex128 if complex_numbers else torch.float64
    samples = torch.randn(heads, size, size // 2, generator=generator, dtype=dtype)
    return samples @ samples.mH


@pytest.mark.parametrize("metric", ["loss", "output"])
@pytest.mark.parametrize("seed", range(20))
def test_keeping_more_never_costs_more(metric, seed):
    """Of any moments and any order: 16 of 32 channels rotate, nothing is mixed."""
    generator = torch.Generator().manual_seed(seed)
    geometry = rap.model.rope.HeadGeometry(head_dim=32, rotary_dim=16)
    shape = rap.model.rope.AttentionShape(
        num_heads=4, num_kv_heads=2, hidden_size=64, geometry=geometry
    )
    keys, values, free = (
        tuple(random_moments(generator, size, complex_numbers=paired) for _ in range(2))
        for size, paired in ((8, True), (32, False), (16, False))
    )
    values = tuple(torch.stack([one, one.flip(0)], 1) for one in values)
    orders = Orders(backwards(8), backwards(16), backwards(32))
    parts = keys, values, free, shape, torch.ones(8).double(), CONTEXT
    if metric == "loss":
        curves = part_losses(*parts, orders)
    else:
        curves = (width_errors(*parts, (0.3, 0.2), orders),)
    rise = max(float(torch.tensor(found).diff().max()) for found in curves)
    assert rise <= 0
    assert all(found[-1] == 0 for found in curves)


def test_a_subspace_is_that_of_all_query_heads_of_a_group():
    """What heads read adds up: any one of theirs alone would lose more."""
    generator = torch.Generator().manual_seed(0)
    moment, reader = (random_moments(generator, 8, complex_numbers=False) for _ in range(2))
    values = tuple(torch.stack([one, one.flip(-2, -1), one.flip(0)], 1) for one in (moment, reader))
    found = value_subspace(values, 3)
    lost = torch.eye(8).double() - found.up @ found.down
    whole = [part.sum(1) for part in values]
    best = torch.linalg.svdvals(_root(whole[1]) @ _root(whole[0]))[:, 3:].square().sum()
    assert float((whole[1] * (lost @ whole[0] @ lost.mT)).sum()) == pytest.approx(float(best))


def _root(moment):
    values, vectors = torch.linalg.eigh(moment)
    return vectors * values.clamp_min(0).sqrt()[:, None] @ vectors.mT


@pytest.mark.parametrize("orders", DROPPED)
def test_dropping_is_never_cheaper_than_mixing(calibrated, orders):
    mixed = torch.tensor(curve(*calibrated, 0), dtype=torch.float64)
    dropped = torch.tensor(curve(*calibrated, 0, **orders), dtype=torch.float64)
    assert (dropped - mixed >= -1e-12).all()
    assert (dropped - mixed).max() > 0


def test_output_errors_are_relative(calibrated):
    model, statistics = calibrated
    layer = attention_layers(model)[0]
    w_o = layer.module.o_proj.weight
    moments = [
        key_moments(statistics.layers[0], "output"),
        value_moments(statistics.layers[0], w_o, layer.shape, "output"),
        free_moments(statistics.layers[0], "output"),
    ]
    dense = dense_layers(model).layers[0]
    errors = width_errors(*moments, layer.shape, dense.frequencies, CONTEXT, dense.logit_scales)
    assert errors[0] == 1
    assert errors[-1] == 0


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}


def yarn(attention_factor, rotates=1.0):
    rope = YARN | {"attention_factor": attention_factor, "partial_rotary_factor": rotates}
    return {"rope_parameters": rope, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("family", "one", "other", "factor"),
    [
        ("granite", {"attention_multiplier": 0.32}, {"attention_multiplier": 0.02}, 16.0),
        ("llama", yarn(1.5), yarn(1.0), 1.5**2),
        ("stablelm", yarn(1.5, 0.5), yarn(1.0, 0.5), 1.5**2),
    ],
)
def test_output_errors_are_of_the_function_not_of_how_it_is_scaled(family, one, other, factor):
    """What logits are multiplied by and the rotating rows of W_q that make up for it."""
    sizes = {"dtype": torch.float64, "heads": 4, "kv_heads": 2, "hidden": 64}
    ids, models = random_tokens(4, 48), []
    for settings in (one, other):
        torch.manual_seed(0)
        models.append(tiny_model(family, **sizes, **settings))
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        for layer in attention_layers(models[1]):
            geometry = layer.shape.geometry
            rotating = geometry.canonical_order()[: geometry.rotary_dim]
            rows = layer.module.q_proj.weight.unflatten(0, (4, 16))
            rows[:, rotating] *= factor
    # Tables of cos and sin are float32, and so are statistics.
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits, **close)
    found = []
    for model in models:
        dense = dense_layers(model).with_statistics(rap.calibrate(model, ids, {"pairs", "values"}))
        found.append([layer_errors(layer, CONTEXT) for layer in dense.layers])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), **close)
