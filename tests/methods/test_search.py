"""Budget `search`: widths that the cut model itself asks for, remembered when it is killed."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rap
from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from rap.calibration.statistics import Statistics
from rap.checkpoint.stored import StoredModel
from rap.methods import Rap
from rap.methods.trials import TRIED_WINDOWS, Search, Trials
from rap.model.errors import RapError
from rap.runtime.sources import StoredLayers

FAMILIES = ["phi3", "qwen3", "gpt_oss", "olmo2", "gemma3n_text", "qwen3_next"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where searches are remembered."""
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def calibrated(method: Rap, layers: int = 2) -> tuple[Any, Statistics]:
    """A tiny float64 Llama whose attention matters, and what the method needs of it."""
    model = tiny_model(dtype=torch.float64, layers=layers)
    for name, weight in model.named_parameters():
        if "o_proj.weight" in name:
            weight.data *= 3.0
    return model, rap.calibrate(model, random_tokens(4, 32), method.needs_for(model))


def divergence(model: Any, statistics: Statistics, plan: Any) -> float:
    """KL of the cut that `rap.apply` makes, by the package's own measure."""
    assert statistics.windows is not None
    tried = statistics.windows[:TRIED_WINDOWS]
    cut = rap.apply(model, plan)
    fidelity = rap.fidelity(cut, model, tried.flatten(), window=tried.shape[1], dtype=None)
    return float(fidelity.kl.value)


@pytest.mark.parametrize("key_share", [0.5, "pooled"])
def test_a_search_is_nearer_to_dense_at_the_same_cache(key_share: Any) -> None:
    method = Rap(retain=0.5, budget="search", key_share=key_share)
    model, statistics = calibrated(method, layers=4)
    plain = replace(method, budget="error").plan(model, statistics)
    found = method.plan(model, statistics)
    assert found.kept_fraction == plain.kept_fraction
    assert divergence(model, statistics, found) < divergence(model, statistics, plain)


@pytest.mark.parametrize("qk_norm", ["constant", "exact", "rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_tried_is_what_is_cut(family: str, qk_norm: str) -> None:
    """Norms, one linear for q, k and v, sinks, and layers that read the keys of others included."""
    method = Rap(retain=0.5, budget="search", qk_norm=qk_norm)
    model = next(case for case in CASES if case.name == family).model(dtype=torch.float32)
    statistics = rap.calibrate(model, random_tokens(4, 16), method.needs_for(model))
    plan = replace(method, budget="error").plan(model, statistics)
    trials = Trials(model, statistics, qk_norm)
    trials.windows_NT = trials.windows_NT[:TRIED_WINDOWS]
    measured = trials.divergence(
        {index: layer for index, layer in enumerate(plan.layers) if layer is not None}
    )
    assert measured == pytest.approx(divergence(model, statistics, plan), rel=1e-3)
    assert method.plan(model, statistics).kept_fraction == plan.kept_fraction


def test_a_killed_search_goes_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Rap(retain=0.5, budget="search")
    model, statistics = calibrated(method)
    measure, measured = Trials.divergence, []

    def killed(self: Trials, cuts: Any) -> float:
        measured.append(0)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return measure(self, cuts)

    monkeypatch.setattr(Trials, "divergence", killed)
    with pytest.raises(KeyboardInterrupt):
        method.plan(model, statistics)
    found = method.plan(model, statistics)
    whole = len(measured)
    (kept,) = (home / "searches").iterdir()
    kept.unlink()
    measured[:] = [0] * 5
    assert method.plan(model, statistics) == found
    # The interrupted one was measured twice, the three before it once.
    assert len(measured) - 5 == whole - 1


def test_a_broken_record_is_measured_again(home: Path) -> None:
    method = Rap(retain=0.5, budget="search")
    model, statistics = calibrated(method)
    found = method.plan(model, statistics)
    (kept,) = (home / "searches").iterdir()
    kept.write_text("[1, 2")
    assert method.plan(model, statistics) == found


def test_what_another_text_measured_is_not_taken(home: Path) -> None:
    """Two texts that begin alike: the cuts that are tried were planned from all of each."""
    method = Rap(retain=0.5, budget="search")
    model, statistics = calibrated(method)
    others = random_tokens(*statistics.windows.shape, seed=9)
    windows = torch.cat([statistics.windows, others])
    longer = rap.calibrate(model, windows, method.needs_for(model))
    shorter = replace(longer, layers=statistics.layers)
    files = {Search(method, model, one).kept for one in (longer, shorter)}
    halved = Search(method, copy.deepcopy(model).to(torch.bfloat16), longer).kept
    assert len(files | {halved}) == 3


def test_layers_that_are_read_one_by_one_cannot_be_searched(tmp_path: Path) -> None:
    method = Rap(retain=0.5, budget="search")
    model, statistics = calibrated(method)
    model.save_pretrained(tmp_path)
    with pytest.raises(RapError, match=r"budget 'search'.* the whole model in memory; remove"):
        method.plan_from(StoredLayers(StoredModel(tmp_path)), statistics)


def test_equal_widths_cannot_be_searched() -> None:
    with pytest.raises(RapError, match=r"profile 'stock' needs one width"):
        Rap(budget="search", profile="stock")
    with pytest.raises(RapError, match=r"budget 'search' gives K and V one width"):
        Rap(budget="search", key_share=0.3)


def test_other_statistics_are_another_search(home: Path) -> None:
    method = Rap(retain=0.5, budget="search")
    model, statistics = calibrated(method)
    more = rap.calibrate(model, random_tokens(5, 32), method.needs_for(model))
    for read in (statistics, more, statistics):
        method.plan(model, read)
    assert len(list((home / "searches").iterdir())) == 2
