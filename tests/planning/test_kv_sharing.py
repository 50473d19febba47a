"""Layers that read the keys and values of another: one choice for all, and what is seen of them."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from rap.calibration.kv_sharing import BY_HEAD, SUMMED
from rap.calibration.registry import STATISTICS
from rap.calibration.run import calibrate
from rap.evaluation.cost.footprint import footprint
from rap.methods import Rap
from rap.methods.registry import Random
from rap.model.errors import PlanError
from rap.model.fingerprint import fingerprint_model
from rap.model.kinds.pairs import value_rotation
from rap.model.layers import attention_layers
from rap.planning.plan import Plan
from rap.surgery.apply import apply

SHARING = [case for case in CASES if case.sources]
TOKENS = random_tokens(2, 11)
# A thousand bounds of the family matrix, relative to the largest logit.
VISIBLE = 1e-2
every_case = pytest.mark.parametrize("case", SHARING, ids=lambda case: case.name)


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _error(model: Any, other: Any) -> float:
    found, expected = model(TOKENS).logits, other(TOKENS).logits
    return float((found - expected).abs().max() / expected.abs().max())


@every_case
def test_a_reader_must_keep_what_its_source_keeps(case: Case):
    model = case.model()
    plan = random_case_plan(model, case)
    reader, source = next(iter(case.sources.items()))
    layer = plan.layers[reader]
    other = dataclasses.replace(layer, frequency_GM=layer.frequency_GM.flip(0).contiguous())
    values = dataclasses.replace(layer, channels_GC=layer.channels_GC.flip(0).contiguous())
    for wrong, message in ((other, "same pairs"), (values, "same values"), (None, "or neither")):
        layers = [wrong if i == reader else kept for i, kept in enumerate(plan.layers)]
        with pytest.raises(PlanError, match=message) as refused:
            dataclasses.replace(plan, layers=tuple(layers))
        assert f"layer{'s' if wrong is None else ''} " in str(refused.value)
        assert str(source) in str(refused.value)


@pytest.mark.parametrize("fault", ["queries", "index", "values", "norm"])
@torch.no_grad()
def test_a_reader_cut_by_another_choice_is_seen(fault: str):
    """What the plan refuses, planted in the model: the comparison of the family matrix fails."""
    case = _case("gemma4_text")
    model = case.model()
    plan = dataclasses.replace(random_case_plan(model, case), qk_norm="exact")
    small, dense = apply(model, plan), masked_by_hooks(model, plan, case)
    assert _error(small, dense) < 1e-5
    source, reader = (small.model.layers[index].self_attn for index in (1, 3))
    if fault == "queries":
        reader.kept_channels.copy_(reader.kept_channels.flip(0))
    elif fault == "index":
        reader.frequency_index.copy_(reader.frequency_index.flip(0))
    elif fault == "values":
        reader.o_proj.weight.copy_(reader.o_proj.weight.flip(1))
    else:
        # Values divided by the size of what is kept of them.
        width = source.value_width
        source.v_proj.weight.view(2, -1, 36)[:, width:] = 0
        source.v_proj.bias.view(2, -1)[:, width:] = 0
    assert _error(small, dense) > VISIBLE


@torch.no_grad()
def test_a_subspace_of_normalised_values_is_its_projection_after_the_norm():
    """The dense model with every head's values projected behind their norm."""
    case = _case("gemma4_text")
    model = case.model()
    generator = torch.Generator().manual_seed(5)
    plan = dataclasses.replace(random_case_plan(model, case), qk_norm="exact")
    layers, projections = list(plan.layers), {}
    for index, layer in enumerate(plan.layers):
        if layer is None:
            continue
        if index not in case.sources:
            size = case.sizes(index)[0]
            down, up = (torch.randn(2, 9, size, generator=generator) for _ in range(2))
            projections[index] = up.double().mT @ down.double()
            factors = {"value_down_GCD": down, "value_up_GDC": up.mT.contiguous()}
        else:
            kept = layers[case.sources[index]]
            factors = {name: getattr(kept, name) for name in ("value_down_GCD", "value_up_GDC")}
        layers[index] = dataclasses.replace(layer, channels_GC=None, **factors)
    plan = dataclasses.replace(plan, layers=tuple(layers))
    every = [
        layer and dataclasses.replace(layer, **_all_values(case.sizes(i)[0]))
        for i, layer in enumerate(plan.layers)
    ]
    dense = masked_by_hooks(model, dataclasses.replace(plan, layers=tuple(every)), case)
    for index, project_GDD in projections.items():
        norm = dense.model.layers[index].self_attn.v_norm
        norm.register_forward_hook(
            lambda module, inputs, output, p=project_GDD: torch.einsum("gde,btge->btgd", p, output)
        )
    assert _error(apply(model, plan), dense) < 1e-5


def _all_values(size: int) -> dict[str, Any]:
    every = torch.arange(size, dtype=torch.int32).expand(2, -1).contiguous()
    return {"channels_GC": every, "value_down_GCD": None, "value_up_GDC": None}


def test_kept_values_come_first_and_all_others_after():
    case = _case("gemma4_text")
    model = case.model()
    plan = random_case_plan(model, case)
    turn_GDD, factor_GCC = value_rotation(plan.layers[2], plan.shapes[2])
    identity = torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(turn_GDD @ turn_GDD.mT, identity.expand(2, -1, -1))
    for head, kept in enumerate(plan.layers[2].channels_GC.tolist()):
        assert turn_GDD[head].argmax(1)[: len(kept)].tolist() == kept
    assert torch.equal(factor_GCC, torch.eye(11, dtype=torch.float64))


@every_case
def test_readers_cache_nothing_and_count_nothing(case: Case):
    """The kept fraction is that of the bytes which the cache really grows by."""
    model = case.model(dtype=torch.float32, sliding_window=64)
    method = Random(retain=0.6, layers="all")
    plan = method.plan(model, calibrate(model, random_tokens(1, 8), ()))
    shapes = [layer.shape for layer in attention_layers(model)]
    assert {i: s.source for i, s in enumerate(shapes) if s.source is not None} == case.sources
    dense, small = (footprint(x).kv_bytes(1) for x in (model, apply(model, plan)))
    own = [shape for index, shape in enumerate(shapes) if index not in case.sources]
    assert dense == sum(2 * 2 * 4 * shape.head_dim for shape in own)
    assert small == plan.kept_fraction * dense
    assert plan.kept_fraction == pytest.approx(0.6, abs=0.03)


@every_case
def test_a_plan_is_the_same_after_saving(case: Case, tmp_path):
    model = case.model(dtype=torch.float32)
    method = Rap(
        retain=0.5, qk_norm="rows", norm_rows=2, score="energy", metric="output", layers="all"
    )
    plan = method.plan(model, calibrate(model, random_tokens(2, 12), method.needs_for(model)))
    plan.save(tmp_path / "plan.safetensors")
    assert Plan.load(tmp_path / "plan.safetensors") == plan
    for reader, source in case.sources.items():
        mine, theirs = plan.layers[reader], plan.layers[source]
        assert mine.norm_rows == theirs.norm_rows == 2
        assert mine.key_sketch_GSD is None
        assert not torch.equal(mine.query_ratio_H, theirs.query_ratio_H)


def test_every_statistic_of_queries_or_outputs_says_how_readers_add():
    """Those of logits are for methods that families with norms of queries do not have, averages and
    moments behind norms for merged heads, which layers that share keys and values do not have.
    """
    for need, statistic in STATISTICS.items():
        if {"q", "o"} & set(getattr(statistic, "projections", ())) and need not in (
            "logits",
            "averages",
            "normed",
        ):
            assert {*statistic.names, *statistic.norm_names} & {*BY_HEAD, *SUMMED}, need


@every_case
def test_statistics_of_a_source_are_those_of_all_that_read_it(case: Case):
    model = case.model(dtype=torch.float32)
    seen: dict[tuple[int, str], Tensor] = {}
    handles = []
    for layer in attention_layers(model):
        for projection, name in (("q", "q_norm"), ("o", "o_proj")):
            module = getattr(layer.module, name)
            handles.append(module.register_forward_hook(_keep(seen, (layer.index, projection))))
    tokens = random_tokens(1, 16)
    with torch.no_grad():
        model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    statistics = calibrate(model, tokens, {"energy", "values", "gradients", "fisher"}).layers
    for reader, source in case.sources.items():
        assert statistics[reader] is None
        found = statistics[source]
        dim = case.sizes(source)[0]
        # The heads of KV head 0 are the first three of the source, then those of the reader.
        queries = [seen[index, "q"].view(16, 6, dim) for index in (source, reader)]
        energy = torch.cat([x[:, half] for half in (slice(3), slice(3, 6)) for x in queries], 1)
        order = attention_layers(model)[source].shape.geometry.canonical_order()
        expected = energy.square().mean(0)[:, order]
        torch.testing.assert_close(found["energy_q"], expected, rtol=1e-4, atol=1e-5)
        outputs = [seen[index, "o"].view(16, 6, dim) for index in (source, reader)]
        heads = torch.cat([x[:, half] for half in (slice(3), slice(3, 6)) for x in outputs], 1)
        moment = torch.einsum("nhd,nhe->hde", heads, heads) / 16
        torch.testing.assert_close(found["value_moment"], moment, rtol=1e-4, atol=1e-5)
        assert found["value_gradient"].shape == (12, dim, dim)
        assert (found["value_gradient"].diagonal(dim1=1, dim2=2).sum(1) > 0).all()


def _keep(seen: dict[tuple[int, str], Tensor], key: tuple[int, str]) -> Any:
    def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[key] = inputs[0] if key[1] == "o" else output

    return hook


def test_uses_of_one_projection_are_seen_apart():
    """Keys and values of one linear have gradients of their own, whose sum is the linear's."""
    model = _case("gemma4_text:tied").model(dtype=torch.float32)
    before, tokens = fingerprint_model(model), random_tokens(1, 16)
    found = calibrate(model, tokens, {"fisher", "energy"}).layers[1]
    assert not torch.equal(found["root_fisher_k"], found["root_fisher_v"])
    assert fingerprint_model(model) == before
    attention = model.model.layers[1].self_attn
    assert attention.v_proj is None
    assert "v_proj" not in dict(attention.named_children())
    # Normalised, every head's values have a mean square of 1.
    torch.testing.assert_close(found["energy_v"].mean(1), torch.ones(1))
