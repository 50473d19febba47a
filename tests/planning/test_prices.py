"""What budget `error` pays for a width is what the cut at that width is expected to cost."""

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import rap
from cases.family_cases import CASES
from cases.models import random_tokens
from rap.methods.dense import dense_layers
from rap.model.layers import attention_layers
from rap.planning.knapsack import allocate_by_error
from rap.planning.losses import free_moments, key_moments, value_moments
from rap.planning.plan import PairPlan
from rap.planning.subspace import weighted_subspace

NEEDS = {"fisher", "energy", "pairs", "values", "gradients"}
LAYER = 1


@functools.cache
def calibrated(name: str) -> tuple[Any, rap.Statistics]:
    """A family's tiny model in float32, and all that any setting asks of calibration."""
    model = next(case for case in CASES if case.name == name).model().float()
    return model, rap.calibrate(model, random_tokens(4, 48), NEEDS)


def paid(model: Any, statistics: rap.Statistics, **settings: Any) -> tuple[list, list[int]]:
    """Curves, and heads if told, that the budget of a plan is spent by."""
    with mock.patch("rap.methods.trials.allocate_by_error", wraps=allocate_by_error) as spend:
        method = rap.Rap(retain=0.5, budget="error", align=2, merge=1, layers="all", **settings)
        method.plan(model, statistics)
    return spend.call_args.args[0], spend.call_args.kwargs.get("heads")


def dropped(moments: tuple[Tensor, Tensor], kept_GN: Tensor) -> Tensor:
    """What all heads lose, tr(O C), by the rows that none of theirs keeps; half of it for pairs."""
    moment, reader = moments
    lost = torch.zeros((), dtype=torch.float64)
    for head, kept in enumerate(kept_GN.tolist()):
        out = [index for index in range(moment.shape[-1]) if index not in kept]
        for i in out:
            for j in out:
                lost += (reader[head, ..., i, j] * moment[head, ..., j, i]).real.sum()
    return lost / 2 if moment.is_complex() else lost


def projected(moments: tuple[Tensor, Tensor], layer: PairPlan) -> Tensor:
    """What values lose, tr(O (I - P) C (I - P)^T), by the directions or channels of a plan."""
    if layer.channels_GC is not None:
        return dropped(moments, layer.channels_GC)
    kept = layer.value_up_GDC.double() @ layer.value_down_GCD.double()
    lost = torch.eye(kept.shape[-1], dtype=torch.float64) - kept
    return torch.einsum("grij,gjk,grkl,gil->", moments[1], lost, moments[0], lost)


def price(model: Any, statistics: rap.Statistics, metric: str, **settings: Any) -> Tensor:
    """Cost of the plans of one layer at 1 ... D/2 steps, in units of `metric`.

    A width that would cost less than a larger one costs as much as that.
    """
    layer, found = attention_layers(model)[LAYER], statistics.layers[LAYER]
    shape = layer.shape
    keys, free = key_moments(found, metric), free_moments(found, metric)
    if layer.norm is not None and metric == "loss":
        # What a norm hides of the gradient: pairs do not make up for each other.
        keys, free = (
            (moment, reader * torch.eye(reader.shape[-1])) for moment, reader in (keys, free)
        )
    rows = []
    for step in range(1, shape.head_dim // 2 + 1):
        retain = 2 * step / shape.head_dim
        # Plain pairs and channels read no metric at equal widths.
        plain = settings.get("keys") == "pairs" and settings.get("values") == "channels"
        read = {} if plain else {"metric": metric}
        separate = {"merge": 1, **read, **settings}
        method = rap.Rap(retain=retain, budget="uniform", align=2, **separate)
        plan = method.plan(model, statistics).layers[LAYER]
        values = value_moments(found, dense_layers(model).weights[LAYER]["o"], shape, metric)
        rows.append(
            [
                dropped(keys, plan.frequency_GM),
                dropped(free, plan.free_GN),
                projected(values, plan),
            ]
        )
    parts = torch.tensor(rows, dtype=torch.float64).flip(0).cummax(0).values.flip(0)
    of_keys, of_values = parts[:, :2].sum(1), parts[:, 2]
    if metric == "loss":
        return 0.5 * (of_keys + of_values)
    energy = torch.einsum("grij,grji->", *values)
    return of_values + of_keys / (shape.head_dim * shape.num_heads) * energy


@pytest.mark.parametrize("metric", ["loss", "output"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"keys": "pairs"}),
        ("llama", {"keys": "pairs", "values": "channels"}),
        ("glm", {"keys": "pairs", "score": "energy"}),
        # A pair is kept at the least of widths, though a proportional part of it is none.
        ("gpt_neox", {"keys": "pairs", "values": "channels"}),
        # Whatever was asked for, normalised keys keep pairs.
        ("qwen3", {}),
        ("qwen3", {"values": "channels"}),
    ],
)
def test_a_width_costs_what_its_plan_loses(name: str, settings: dict, metric: str):
    model, statistics = calibrated(name)
    curves, _ = paid(model, statistics, metric=metric, **settings)
    found = torch.tensor(curves[LAYER], dtype=torch.float64)[1:]
    expected = price(model, statistics, metric, **settings)
    # Curves of outputs are relative to the whole output: compared as shares of the first width.
    if metric == "output":
        found, expected = found / found[0], expected / expected[0]
    # Factors of a plan are float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected[0]))


@pytest.mark.parametrize("metric", ["loss", "output"])
def test_channels_that_never_rotate_are_paid_for(metric: str):
    """Logits of theirs that are 1e6 times as large are all that a width then costs."""
    model, statistics = calibrated("glm")
    layers = [dict(layer) for layer in statistics.layers]
    for name in ("query_free_moment", "free_gradient"):
        layers[LAYER][name] = 1e6 * layers[LAYER][name]
    louder = dataclasses.replace(statistics, layers=tuple(layers))
    found = torch.tensor(paid(model, louder, metric=metric)[0][LAYER], dtype=torch.float64)
    saved = weighted_subspace(*free_moments(layers[LAYER], metric), 1).singular.square().sum(0)
    # Of 16 channels 8 rotate: a step adds a pair or two channels that do not, a pair first.
    lost = torch.stack([saved[free:].sum() for free in (0, 0, 2, 2, 4, 4, 6, 6, 8)])
    torch.testing.assert_close(found / found[0], lost / lost[0], rtol=0, atol=1e-3)


def test_heads_of_a_layer_are_paid_for():
    model, statistics = calibrated("llama")
    _, heads = paid(model, statistics)
    assert heads == [layer.shape.num_kv_heads for layer in attention_layers(model)]
    _, heads = paid(model, statistics, key_share="pooled")
    assert heads == [2] * 6
