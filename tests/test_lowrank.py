"""PaLU and SVD-LLM against the whitened problem they solve, by another route than the package's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from models import random_tokens, tiny_model
from rap.allocation import allocate
from rap.lowrank import whitened_factors
from rap.methods import METHODS

HEADS, DIM, HIDDEN = 4, 8, 48


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, rap.Statistics, Tensor]:
    """A tiny Llama of four KV heads, its statistics, and what layer 0's projections read [N, E]."""
    model = tiny_model(
        dtype=torch.float64, heads=8, kv_heads=HEADS, head_dim=DIM, hidden=HIDDEN, layers=2
    )
    windows = random_tokens(4, 64)
    statistics = rap.calibrate(model, windows, {"inputs", "fisher"})
    seen: list[Tensor] = []
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].detach().flatten(0, 1))
    )
    with torch.no_grad():
        model(windows)
    handle.remove()
    return model, statistics, seen[0]


def optimum(weight: Tensor, x_NE: Tensor, rank: int) -> float:
    """The least E ||(W - Z) x||^2 of any Z of that rank: Cholesky whitening, the SVD's tail."""
    root = torch.linalg.cholesky(x_NE.mT @ x_NE / len(x_NE))
    return float(torch.linalg.svdvals(weight.detach() @ root)[rank:].square().sum())


def layer_error(dense: Any, attention: Any, role: str, x_NE: Tensor) -> float:
    """What a layer's keys or values, made from its latent, miss of the dense ones."""
    wanted = getattr(dense, f"{role}_proj")(x_NE)
    latent = getattr(attention, f"{role}_proj")(x_NE)
    factors = getattr(attention, f"{role}_up")
    parts = zip(factors, latent.chunk(len(factors), -1), strict=True)
    found = torch.cat([up(part) for up, part in parts], -1)
    return float((wanted - found).detach().square().sum(-1).mean())


def replaced(calibrated: tuple, name: str, **settings: Any) -> Any:
    """The first attention of the model a method makes."""
    model, statistics, _ = calibrated
    method = METHODS[name](**settings)
    return method.apply(model, method.plan(model, statistics)).model.layers[0].self_attn


@pytest.mark.parametrize("retain", [0.75, 0.5])
@pytest.mark.parametrize("role", ["k", "v"])
def test_svdllm_reaches_the_optimum_over_all_heads(
    calibrated: tuple, role: str, retain: float
) -> None:
    dense, x_NE = calibrated[0].model.layers[0].self_attn, calibrated[2]
    attention = replaced(calibrated, "svdllm", retain=retain)
    best = optimum(getattr(dense, f"{role}_proj").weight, x_NE, round(retain * HEADS * DIM))
    # The moment is kept in float32.
    assert layer_error(dense, attention, role, x_NE) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("retain", [0.75, 0.5])
def test_palu_reaches_the_optimum_of_every_group(
    calibrated: tuple, size: int, retain: float
) -> None:
    dense, x_NE = calibrated[0].model.layers[0].self_attn, calibrated[2]
    settings = {"retain": retain, "group_size": size, "ranks": "uniform"}
    attention = replaced(calibrated, "palu", **settings)
    groups = dense.k_proj.weight.chunk(HEADS // size)
    best = sum(optimum(rows, x_NE, round(retain * size * DIM)) for rows in groups)
    assert layer_error(dense, attention, "k", x_NE) == pytest.approx(best, rel=1e-5)
    joint = layer_error(dense, replaced(calibrated, "svdllm", retain=retain), "k", x_NE)
    assert best >= joint * (1 - 1e-5)
    assert (best > joint * 1.01) == (size < HEADS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_folding_values_into_the_output_changes_nothing(calibrated: tuple, size: int) -> None:
    """Against values made from the latent first, then the dense output projection."""
    dense, x_NE = calibrated[0].model.layers[0].self_attn, calibrated[2]
    attention = replaced(calibrated, "palu", retain=0.5, group_size=size, ranks="uniform")
    rank = attention.value_rank
    factors = [
        whitened_factors(rows, calibrated[1].layers[0]["input_moment"], rank)
        for rows in dense.v_proj.weight.chunk(HEADS // size)
    ]
    values = torch.cat([x_NE @ (up @ down).mT for up, down in factors], -1)
    each = values.unflatten(-1, (HEADS, DIM)).repeat_interleave(2, 1).flatten(1)
    latents = attention.v_proj(x_NE).unflatten(-1, (HEADS // size, rank))
    read = latents.repeat_interleave(2 * size, 1).flatten(1)
    torch.testing.assert_close(attention.o_proj(read), dense.o_proj(each), rtol=1e-9, atol=1e-9)


def test_a_plain_factorisation_is_the_svd_and_full_rank_is_the_weight() -> None:
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    up, down = whitened_factors(weight, None, 5)
    tail = torch.linalg.svdvals(weight)[5:].square().sum()
    torch.testing.assert_close((weight - up @ down).square().sum(), tail)
    up, down = whitened_factors(weight, torch.eye(20), 12)
    torch.testing.assert_close(up @ down, weight)
    # A direction that is never read, or rows that are the same, leave nothing infinite.
    weight[5:] = weight[4]
    up, down = whitened_factors(weight, torch.diag(torch.arange(20.0)), 12)
    assert torch.isfinite(up).all()
    assert torch.isfinite(down).all()
    torch.testing.assert_close(up @ down, weight, rtol=0, atol=1e-9)


def test_fisher_ranks_share_one_budget_by_score(calibrated: tuple) -> None:
    model, statistics, _ = calibrated
    plan = METHODS["palu"](retain=0.6, group_size=2).plan(model, statistics)
    found = [layer.widths[name] for name in ("keys", "values") for layer in plan.layers]
    scores = [float(layer[f"root_fisher_{r}"].mean()) for r in "kv" for layer in statistics.layers]
    assert found == allocate(scores, 0.6, [2 * DIM] * 4)
    assert len(set(found)) > 1
    assert plan.kept_fraction == pytest.approx(0.6, abs=1 / (8 * DIM))
    coarse = METHODS["palu"](retain=0.6, group_size=2, multiple=4).plan(model, statistics)
    assert {layer.widths["keys"] % 4 for layer in coarse.layers} == {0}


def test_a_group_that_does_not_divide_the_heads_is_refused(calibrated: tuple) -> None:
    model, statistics, _ = calibrated
    with pytest.raises(rap.RapError, match="group_size 3 does not divide the 4 KV heads"):
        METHODS["palu"](retain=0.5, group_size=3).plan(model, statistics)


def test_a_sliding_window_keeps_its_last_latents() -> None:
    """The cache drops tokens behind the window; keys of the rest keep their places."""
    model = tiny_model("mistral", dtype=torch.float64, sliding_window=6)
    method = METHODS["svdllm"](retain=0.75)
    small = method.apply(
        model, method.plan(model, rap.calibrate(model, random_tokens(4, 32), method.needs))
    )
    ids = random_tokens(1, 20)
    with torch.no_grad():
        whole = small(ids).logits
        cache = small(ids[:, :9], use_cache=True).past_key_values
        steps = [small(ids[:, [t]], past_key_values=cache).logits for t in range(9, 20)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 9:], rtol=0, atol=1e-5)
