"""PaLU and SVD-LLM against the whitened problem they solve, by another route than the package's."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from cases.models import random_tokens, tiny_model
from rap.methods import METHODS
from rap.methods.svdllm import kept_shares
from rap.planning.budgets import allocate
from rap.planning.subspace import whitened_factors

HEADS, DIM, HIDDEN = 4, 8, 48


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, rap.Statistics, Tensor]:
    """A tiny Llama of four KV heads, its statistics, and what layer 0's projections read [N, E]."""
    model = tiny_model(
        dtype=torch.float64, heads=8, kv_heads=HEADS, head_dim=DIM, hidden=HIDDEN, layers=2
    )
    windows = random_tokens(4, 64)
    statistics = rap.calibrate(model, windows, {"inputs", "fisher"}, batch_size=3)
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


def layer_error(dense: Any, attention: Any, projection: str, x_NE: Tensor) -> float:
    """What a layer's keys or values, made from its latent, miss of the dense ones."""
    wanted = getattr(dense, f"{projection}_proj")(x_NE)
    latent = getattr(attention, f"{projection}_proj")(x_NE)
    factors = getattr(attention, f"{projection}_up")
    parts = zip(factors, latent.chunk(len(factors), -1), strict=True)
    found = torch.cat([up(part) for up, part in parts], -1)
    return float((wanted - found).detach().square().sum(-1).mean())


def replaced(calibrated: tuple, name: str, **settings: Any) -> Any:
    """The first attention of the model a method makes."""
    model, statistics, _ = calibrated
    method = METHODS[name](**settings)
    return method.apply(model, method.plan(model, statistics)).model.layers[0].self_attn


@pytest.mark.parametrize("retain", [0.75, 0.5])
@pytest.mark.parametrize("projection", ["k", "v"])
def test_svdllm_reaches_the_optimum_over_all_heads(
    calibrated: tuple, projection: str, retain: float
) -> None:
    dense, x_NE = calibrated[0].model.layers[0].self_attn, calibrated[2]
    attention = replaced(calibrated, "svdllm", retain=retain)
    best = optimum(getattr(dense, f"{projection}_proj").weight, x_NE, round(retain * HEADS * DIM))
    # The moment is kept in float32.
    assert layer_error(dense, attention, projection, x_NE) == pytest.approx(best, rel=1e-5)


@pytest.fixture(scope="module")
def uneven() -> tuple[Any, rap.Statistics, list[Tensor]]:
    """Five layers whose W_k and W_v shrink with depth, their statistics and inputs [N, E]."""
    model = tiny_model(
        dtype=torch.float64, heads=8, kv_heads=HEADS, head_dim=DIM, hidden=HIDDEN, layers=5
    )
    seen: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.k_proj.weight.data *= 20 * 0.6**index
        attention.v_proj.weight.data *= 20 * 0.7 ** (4 - index)
        attention.k_proj.register_forward_hook(
            lambda m, inputs, o, index=index: seen.update({index: inputs[0].detach().flatten(0, 1)})
        )
    windows = random_tokens(4, 64)
    statistics = rap.calibrate(model, windows, {"inputs"})
    with torch.no_grad():
        model(windows)
    return model, statistics, list(seen.values())


def ranks(plan: Any, name: str) -> list[int]:
    """The widths of that name in every layer of a plan."""
    return [getattr(layer.entry(), name) for layer in plan.layers]


@pytest.mark.parametrize("retain", [0.9, 0.5, 0.2])
def test_svdllm2_ranks_follow_the_logarithm_of_what_is_lost(uneven: tuple, retain: float) -> None:
    """Against shares computed with losses by Cholesky, over all 256 tokens."""
    model, statistics, inputs = uneven
    plan = METHODS["svdllm2"](retain=retain).plan(model, statistics)
    size = HEADS * DIM
    for projection, name in (("k", "keys"), ("v", "values")):
        inverse = []
        for layer, x_NE in zip(model.model.layers, inputs, strict=True):
            weight = getattr(layer.self_attn, f"{projection}_proj").weight
            lost = len(x_NE) * optimum(weight, x_NE, round(retain * size))
            inverse.append(1 / math.log(lost))
        removed = [(1 - retain) * 5 * w / sum(inverse) for w in inverse]
        found = ranks(plan, name)
        assert sum(found) == round(retain * 5 * size)
        # A whole rank is as near as it gets; handing out the last one moves others by one more.
        for kept, share in zip(found, removed, strict=True):
            assert abs(kept - (1 - share) * size) <= 1
    assert ranks(plan, "keys") == sorted(ranks(plan, "keys"), reverse=True)
    assert ranks(plan, "values") == sorted(ranks(plan, "values"))
    assert len(set(ranks(plan, "keys"))) > 2
    assert METHODS["svdllm2"](retain=1.0).plan(model, statistics).kept_fraction == 1


def test_svdllm2_reaches_the_optimum_at_its_own_ranks(uneven: tuple) -> None:
    model, statistics, inputs = uneven
    method = METHODS["svdllm2"](retain=0.5)
    plan = method.plan(model, statistics)
    small = method.apply(model, plan)
    for index in (0, 4):
        dense, x_NE = model.model.layers[index].self_attn, inputs[index]
        for projection, name in (("k", "keys"), ("v", "values")):
            best = optimum(
                getattr(dense, f"{projection}_proj").weight, x_NE, ranks(plan, name)[index]
            )
            found = layer_error(dense, small.model.layers[index].self_attn, projection, x_NE)
            # The moment is kept in float32.
            assert found == pytest.approx(best, rel=1e-5)


def test_shares_of_losses_that_have_no_logarithm() -> None:
    """Zero and small losses count as e; the mean stays what it was."""
    assert kept_shares([9.0, 9.0, 9.0], 0.6) == pytest.approx([0.6] * 3)
    squared = kept_shares([1e4, 1e6, 1e8], 0.6)
    assert squared == pytest.approx(kept_shares([1e2, 1e3, 1e4], 0.6))
    assert kept_shares([1e4, 1e8], 0.7) == pytest.approx([0.6, 0.8])
    lost = kept_shares([0.0, 1.0, 0.5, math.e, math.e**2], 0.7)
    assert lost == pytest.approx([0.7 - 1 / 30] * 4 + [0.7 + 4 / 30])
    # One that would give more than all of itself gives all; the others' shares are as they were.
    assert kept_shares([0.0, 1e30, 1e30], 0.3)[0] == 0
    assert kept_shares([0.0, 5.0, 1e30], 1.0) == [1.0] * 3


def test_a_projection_of_zeros_gives_its_ranks_to_the_others(uneven: tuple) -> None:
    model = copy.deepcopy(uneven[0])
    model.model.layers[2].self_attn.v_proj.weight.data.zero_()
    statistics = rap.calibrate(model, random_tokens(4, 64), {"inputs"})
    method = METHODS["svdllm2"](retain=0.5, multiple=4)
    plan = method.plan(model, statistics)
    values = ranks(plan, "values")
    assert values[2] == min(values) < 8 < 16 < max(values)
    assert sum(values) == 5 * HEADS * DIM // 2
    assert all(rank % 4 == 0 for rank in values + ranks(plan, "keys"))
    assert torch.isfinite(method.apply(model, plan)(random_tokens(1, 9)).logits).all()


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
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1))
    up, down = whitened_factors(weight, torch.eye(20), 12)
    torch.testing.assert_close(up @ down, weight)
    # A direction that is never read, or rows that are the same, leave nothing infinite.
    weight[5:] = weight[4]
    up, down = whitened_factors(weight, torch.diag(torch.arange(20.0)), 12)
    assert torch.isfinite(up).all()
    assert torch.isfinite(down).all()
    torch.testing.assert_close(up @ down, weight, rtol=0, atol=1e-9)


def test_the_moment_is_of_what_the_projections_read(calibrated: tuple) -> None:
    _, statistics, x_NE = calibrated
    expected = x_NE.mT @ x_NE / len(x_NE)
    torch.testing.assert_close(
        statistics.layers[0]["input_moment"].double(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("model_type", "biases"),
    [("llama", {}), ("seed_oss", {"attention_bias": False, "attention_out_bias": True})],
)
def test_two_groups_of_two_heads_at_full_rank_are_dense(model_type: str, biases: dict) -> None:
    """Every head reads the latent of its own group, and a bias of the output alone stays."""
    shape = {"heads": 8, "kv_heads": HEADS, "head_dim": DIM, "hidden": HIDDEN}
    model, ids = (
        tiny_model(model_type, dtype=torch.float64, **shape, **biases),
        random_tokens(1, 20),
    )
    method = METHODS["palu"](retain=1.0, group_size=2, ranks="uniform")
    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs)
    small = method.apply(model, method.plan(model, statistics))
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, model(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "cohere", "ernie4_5"])
def test_queries_turn_as_in_whole_pairs(model_type: str) -> None:
    """To the last bit in bfloat16, also where the family rotates in float32."""
    model = tiny_model(model_type, dtype=torch.bfloat16, kv_heads=HEADS)
    turned = []
    for name, settings in (("palu", {"ranks": "uniform"}), ("magnitude", {})):
        method = METHODS[name](retain=1.0, **settings)
        statistics = rap.calibrate(model, random_tokens(2, 16), method.needs)
        attention = method.apply(model, method.plan(model, statistics)).model.layers[0].self_attn
        q = torch.randn(1, 4, 9, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        k = q if name == "magnitude" else q.new_zeros(1, 1, 9, 8)
        tables = model.model.rotary_emb(q, torch.arange(9)[None])
        turned.append(attention.position(q, k, tables)[0])
    assert torch.equal(*turned)


def test_fisher_ranks_share_one_budget_by_score(calibrated: tuple) -> None:
    model, statistics, _ = calibrated
    plan = METHODS["palu"](retain=0.6, group_size=2).plan(model, statistics)
    found = [getattr(layer.entry(), name) for name in ("keys", "values") for layer in plan.layers]
    scores = [float(layer[f"root_fisher_{r}"].mean()) for r in "kv" for layer in statistics.layers]
    assert found == allocate(scores, 0.6, [2 * DIM] * 4)
    assert len(set(found)) > 1
    assert plan.kept_fraction == pytest.approx(0.6, abs=1 / (8 * DIM))
    coarse = METHODS["palu"](retain=0.6, group_size=2, multiple=4).plan(model, statistics)
    assert {layer.entry().keys % 4 for layer in coarse.layers} == {0}


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
