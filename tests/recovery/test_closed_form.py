"""The output refit: what it solves, that it keeps the better, and that it changes nothing else."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from cases.models import random_tokens, tiny_model
from rap.recovery import closed_form
from rap.recovery.closed_form import refit_outputs
from rap.runtime.layerwise import LayerwiseRunner


@pytest.fixture
def pair() -> tuple:
    """A dense tiny model and its paper cut at half the cache, float64."""
    dense = tiny_model("llama", dtype=torch.float64, hidden=32, layers=3)
    method = rap.Rap(
        retain=0.5, keys="pairs", values="channels", budget="uniform", score="magnitude"
    )
    statistics = rap.calibrate(dense, random_tokens(2, 32), method.needs)
    return dense, method.apply(dense, method.plan(dense, statistics))


def test_the_output_error_falls_in_every_layer(pair: tuple) -> None:
    dense, small = pair
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    results = refit_outputs(small, dense, random_tokens(16, 64))
    assert [result.layer for result in results] == [0, 1, 2]
    assert all(result.kept and result.after < result.before for result in results)
    changed = {n for n, tensor in small.state_dict().items() if not torch.equal(tensor, before[n])}
    assert changed == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)}


def _first_layer(dense: Any, small: Any, windows: Tensor) -> tuple[Tensor, Tensor]:
    """What the pruned layer 0 hands to o_proj, and what the dense one makes of its own."""
    caught: dict[str, Tensor] = {}
    for name, model in (("dense", dense), ("small", small)):
        handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(
            lambda _, inputs, output, name=name: caught.update(
                {f"{name} in": inputs[0].flatten(0, -2), f"{name} out": output.flatten(0, -2)}
            )
        )
        with torch.no_grad():
            model(windows)
        handle.remove()
    return caught["small in"], caught["dense out"]


def test_first_layer_is_the_least_squares_solution(
    pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch.linalg.lstsq on the tokens of all batches stacked, an independent route."""
    monkeypatch.setattr(closed_form, "RIDGE", 1e-14)
    monkeypatch.setattr(closed_form, "BATCH", 4)
    dense, small = pair
    windows = random_tokens(8, 64)
    expected = torch.linalg.lstsq(*_first_layer(dense, small, windows[:6])).solution.T
    refit_outputs(small, dense, windows)
    found = small.model.layers[0].self_attn.o_proj.weight
    torch.testing.assert_close(found.data, expected, atol=1e-6, rtol=1e-6)


def test_ridge_and_errors_are_those_of_their_definitions(
    pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "RIDGE", 0.3)
    dense, small = pair
    windows = random_tokens(8, 64)
    old = small.model.layers[0].self_attn.o_proj.weight.detach().clone()
    fit_Z, fit_Y = _first_layer(dense, small, windows[:6])
    judge_Z, judge_Y = _first_layer(dense, small, windows[6:])
    first = refit_outputs(small, dense, windows)[0]
    gram = fit_Z.mT @ fit_Z
    ridge = 0.3 * gram.diagonal().mean() * torch.eye(len(gram)).double()
    # The minimum of |Z W - Y|^2 + ridge |W - W_o|^2, solved for W and not for the change.
    new = torch.linalg.solve(gram + ridge, fit_Z.mT @ fit_Y + ridge @ old.mT).mT
    # Layers work in float32.
    found = small.model.layers[0].self_attn.o_proj.weight.data
    torch.testing.assert_close(found, new, atol=1e-6, rtol=1e-5)
    for found, weight in ((first.before, old), (first.after, new)):
        lost = (judge_Y - judge_Z @ weight.mT).square().sum() / judge_Y.square().sum()
        assert found == pytest.approx(float(lost), rel=1e-5)


def test_activations_that_are_not_finite_are_refused(pair: tuple) -> None:
    dense, small = pair
    with torch.no_grad():
        small.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
    with pytest.raises(rap.RapError, match="layer 1: activations are not finite"):
        refit_outputs(small, dense, random_tokens(8, 16))


def test_a_refit_that_does_not_help_is_not_kept(
    pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted on one repeated token and judged on others, the solution is worse and is dropped."""
    monkeypatch.setattr(closed_form, "RIDGE", 1e-14)
    dense, small = pair
    windows = torch.cat([torch.full((6, 64), 3), random_tokens(2, 64)])
    before = small.model.layers[0].self_attn.o_proj.weight.clone()
    first = refit_outputs(small, dense, windows)[0]
    assert first.after >= first.before
    assert not first.kept
    assert torch.equal(small.model.layers[0].self_attn.o_proj.weight, before)


def test_a_layer_that_adds_nothing_stays_so(pair: tuple) -> None:
    dense, small = pair
    with torch.no_grad():
        for model in pair:
            model.model.layers[1].self_attn.o_proj.weight.zero_()
    first, silent, last = refit_outputs(small, dense, random_tokens(8, 64))
    assert (silent.before, silent.after, silent.kept) == (0, 0, False)
    assert first.kept
    assert last.kept


def test_windows_are_split_where_asked_whatever_the_batch(
    pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 8 hold windows of both parts; the last one is not full."""
    dense, small = pair
    windows, found = random_tokens(10, 64), []
    monkeypatch.setattr(closed_form, "HELD_OUT_SHARE", 0.3)
    for size in (8, 1):
        monkeypatch.setattr(closed_form, "BATCH", size)
        found.append(refit_outputs(copy.deepcopy(small), dense, windows))
    for one, other in zip(*found, strict=True):
        assert one.before == pytest.approx(other.before, rel=1e-5)
        assert one.after == pytest.approx(other.after, rel=1e-5)


def test_a_layer_reads_what_the_refitted_ones_before_it_give(pair: tuple) -> None:
    dense, small = pair
    windows, again = random_tokens(8, 64), copy.deepcopy(small)
    first = refit_outputs(small, dense, windows)
    with torch.no_grad():
        refitted = small.model.layers[0].self_attn.o_proj.weight
        again.model.layers[0].self_attn.o_proj.weight.copy_(refitted)
    second = refit_outputs(again, dense, windows)
    assert second[1].before == pytest.approx(first[1].before, rel=1e-6)
    assert second[0].before == pytest.approx(first[0].after, rel=1e-4)


def test_every_layer_is_walked_once(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time grows with the layers, not with their square: three passes of a layer, all counted."""
    dense, small = pair
    passes: list[int] = []
    run = LayerwiseRunner.run
    monkeypatch.setattr(
        LayerwiseRunner,
        "run",
        lambda self, layer, index, rows: passes.append(index) or run(self, layer, index, rows),
    )
    refit_outputs(small, dense, random_tokens(4, 32))
    assert Counter(passes) == {0: 3, 1: 3, 2: 3}


def test_nothing_to_do_at_full_width() -> None:
    dense = tiny_model("qwen2", dtype=torch.float64)
    method = rap.Rap.paper(retain=1.0, score="magnitude")
    statistics = rap.calibrate(dense, random_tokens(2, 32), method.needs)
    small = method.apply(dense, method.plan(dense, statistics))
    results = refit_outputs(small, dense, random_tokens(8, 32))
    assert all(result.before == 0.0 and not result.kept for result in results)


def test_too_few_windows(pair: tuple) -> None:
    with pytest.raises(rap.RapError, match="at least 2"):
        refit_outputs(pair[1], pair[0], random_tokens(1, 64))
    assert refit_outputs(copy.deepcopy(pair[1]), pair[0], random_tokens(2, 64))
