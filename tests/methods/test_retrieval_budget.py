"""Budget `retrieval`: the layers without which copying fails are wider, at the same cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import rap
from cases.command import error_violations, run
from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from rap.calibration.statistics import Statistics
from rap.methods import Rap, parse_method
from rap.methods.trials import Retrieval, Trials
from rap.model.errors import RapError
from rap.planning.budgets import WIDER, num_wide, widened
from rap.planning.plan import PairPlan, Plan

LAYERS = 5


def calibrated(method: Rap, **fields: Any) -> tuple[Any, Statistics]:
    """A tiny float64 Llama whose attention matters, and what the method needs of it."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 48, "layers": LAYERS}
    model: Any = tiny_model(dtype=torch.float64, **sizes, **fields)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 3.0
    return model, rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))


def widths(plan: Plan) -> list[int]:
    """Slots of keys of every layer's cached heads."""
    return [x.frequency_GM.shape[-1] for x in plan.layers if isinstance(x, PairPlan)]


@given(
    st.floats(0.2, 1.0),
    st.integers(2, 40),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 3]),
    st.randoms(),
)
def test_the_total_is_that_of_equal_widths(
    retain: float, layers: int, unit: int, heads: int, drawn: Any
) -> None:
    sizes, wide = [96] * layers, drawn.sample(range(layers), num_wide(layers))
    how: dict[str, Any] = {"heads": [heads] * layers, "whole": sizes, "unit": unit}
    found = widened(retain, wide, sizes, **how)
    assert abs(sum(found) - retain * sum(sizes)) <= unit / 2 + 1e-9
    assert {found[i] for i in wide} == {
        min(range(unit, 97, unit), key=lambda n: (abs(n - min(1, WIDER * retain) * 96), -n))
    }
    others = [found[i] for i in range(layers) if i not in wide]
    assert max(others) - min(others) <= unit
    assert min(found[i] for i in wide) >= max(others) - unit


@pytest.mark.parametrize(("layers", "wide"), [(1, 0), (2, 1), (5, 1), (12, 1), (30, 3), (32, 3)])
def test_a_tenth_of_the_layers_is_wide(layers: int, wide: int) -> None:
    assert num_wide(layers) == wide


def test_copying_is_the_loss_of_the_second_of_two_copies() -> None:
    method = Rap(retain=0.5, budget="retrieval")
    model, statistics = calibrated(method)
    plan = Rap(retain=0.5, merge="auto").plan(model, statistics)
    small: Any = rap.apply(model, plan)
    windows = statistics.windows
    assert windows is not None
    with torch.no_grad():
        logits = small(windows.repeat(1, 2)).logits[:, 31:-1]
    expected = cross_entropy(logits.flatten(0, 1).double(), windows.flatten())
    cuts = {i: layer for i, layer in enumerate(plan.layers) if layer is not None}
    found = Trials(model, statistics).copying(cuts)
    assert found == pytest.approx(float(expected), rel=1e-6)
    assert Trials(model, statistics).copying({}) != pytest.approx(found, rel=1e-4)


def test_copies_are_as_long_as_the_model_was_made_for() -> None:
    method = Rap(retain=0.5, budget="retrieval")
    model, statistics = calibrated(method, max_position_embeddings=40)
    assert statistics.windows is not None
    short = replace(statistics, windows=statistics.windows[:, :20])
    assert Trials(model, statistics).copying({}) == Trials(model, short).copying({})


def test_layers_come_by_how_well_the_model_copies_with_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = Rap(retain=0.5, budget="retrieval", align=4)
    model, statistics = calibrated(method)

    def copying(self: Trials, cuts: dict) -> float:
        (dense,) = {*range(LAYERS)} - {*cuts}
        return [0.9, 1.0, 0.8, 0.2, 0.9][dense]

    monkeypatch.setattr(Trials, "copying", copying)
    retrieval = Retrieval(method, model, statistics)
    plan = replace(method, budget="uniform").plan(model, statistics)
    assert retrieval.chosen(plan, 3) == [0, 2, 3]
    assert retrieval.chosen(plan, 1) == [3]
    assert retrieval.chosen(plan, 0) == []
    found = method.plan(model, statistics)
    assert widths(found)[3] == max(widths(found))
    assert len({*widths(found)}) > 1
    assert found.method["budget"] == "retrieval"
    assert abs(found.kept_fraction - plan.kept_fraction) <= 4 / (2 * 16 * LAYERS * 2)


@pytest.mark.parametrize("settings", ["", ":merge=1", ":merge=2:queries=factored"])
def test_the_plan_is_of_the_asked_cache_and_decodes(settings: str) -> None:
    method = parse_method("rap" + settings + ":budget=retrieval", 0.5)
    assert isinstance(method, Rap)
    model, statistics = calibrated(method)
    plan = method.plan(model, statistics)
    found = widths(plan)
    assert len({*found}) > 1
    assert plan.kept_fraction == pytest.approx(0.5, abs=0.03)
    small: Any = rap.apply(model, plan)
    prompt = random_tokens(1, 9)
    whole = small(prompt).logits
    cache = small(prompt[:, :8]).past_key_values
    last = small(prompt[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(last, whole[:, 8:], rtol=1e-5, atol=1e-5)


def test_a_layer_whose_cache_is_read_is_dense_with_its_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in CASES if case.name == "gemma3n_text")
    model: Any = case.model()
    method = parse_method("rap:layers=all:budget=retrieval", 0.5)
    tried: list[set[int]] = []

    def copying(self: Trials, cuts: dict) -> float:
        tried.append({*cuts})
        return float(len(tried))

    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))
    monkeypatch.setattr(Trials, "copying", copying)
    plan = method.plan(model, statistics)
    readers = {
        i: shape.source
        for i, shape in enumerate(plan.shapes)
        if shape is not None and shape.source is not None
    }
    assert readers
    assert any(source not in cuts for cuts in tried for source in readers.values())
    for cuts in tried:
        assert all((reader in cuts) == (source in cuts) for reader, source in readers.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_share": 0.6}, "needs key_share 0.5"),
        ({"key_share": "pooled"}, "needs key_share 0.5"),
        ({"profile": "stock"}, "one width for all"),
    ],
)
def test_other_shares_and_one_width_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(RapError, match=message):
        Rap(retain=0.5, budget="retrieval", **settings)


def test_layers_that_are_read_one_by_one_cannot_be_tried(tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = ("compress", "bundled", "--retain", 0.5, "--budget", "retrieval", "--stream", "-o", out)
    found = run(*call)
    assert found.code == 2
    assert "evaluates the whole model (budget 'retrieval'): remove --stream" in found.err
    assert error_violations(found) == []
    assert not out.exists()


@pytest.mark.parametrize("method", ["rap:merge=1", "rap:merge=2", "rap"])
def test_the_command_plans(tmp_path: Path, method: str) -> None:
    out = tmp_path / "plan.rap"
    few = ("--windows", 4, "--window", 64, "-o", out)
    found = run(
        "plan", "bundled", "--retain", 0.5, "--method", method, "--budget", "retrieval", *few
    )
    assert found.code == 0, found.err
    assert len({*widths(Plan.load(out))}) > 1
