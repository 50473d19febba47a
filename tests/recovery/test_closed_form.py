"""The output refit: what it solves, that it keeps the better, and that it changes nothing else."""

import pytest
import torch

import rap
from cases.models import random_tokens, tiny_model
from rap.recovery.closed_form import refit_outputs


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


def test_first_layer_is_the_least_squares_solution(pair: tuple) -> None:
    """Against torch.linalg.lstsq on the stacked tokens, an independent route."""
    dense, small = pair
    windows = random_tokens(8, 64)
    caught: dict[str, torch.Tensor] = {}
    hooks = [
        model.model.layers[0].self_attn.o_proj.register_forward_hook(
            lambda _, inputs, output, name=name: caught.update(
                {name: (inputs[0].flatten(0, -2), output.flatten(0, -2))}
            )
        )
        for name, model in (("dense", dense), ("small", small))
    ]
    with torch.no_grad():
        dense(windows[:6])
        small(windows[:6])
    for hook in hooks:
        hook.remove()
    expected = torch.linalg.lstsq(caught["small"][0], caught["dense"][1]).solution.T
    refit_outputs(small, dense, windows, ridge=1e-14)
    found = small.model.layers[0].self_attn.o_proj.weight
    torch.testing.assert_close(found.data, expected, atol=1e-6, rtol=1e-6)


def test_a_refit_that_does_not_help_is_not_kept(pair: tuple) -> None:
    """Fitted on one repeated token and judged on others, the solution is worse and is dropped."""
    dense, small = pair
    windows = torch.cat([torch.full((6, 64), 3), random_tokens(2, 64)])
    before = small.model.layers[0].self_attn.o_proj.weight.clone()
    first = refit_outputs(small, dense, windows, ridge=1e-14)[0]
    assert first.after >= first.before
    assert not first.kept
    assert torch.equal(small.model.layers[0].self_attn.o_proj.weight, before)


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
