"""STAR-KV's cut against the dense model whose weights are truncated by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from cases.models import random_tokens, tiny_model
from rap.methods import METHODS

HEADS, DIM, LAYERS = 4, 8, 3


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, rap.Statistics]:
    """A tiny float64 model whose heads and layers differ in size, with biases, and statistics."""
    sizes = {"heads": 8, "kv_heads": HEADS, "head_dim": DIM, "hidden": 48, "layers": LAYERS}
    model = tiny_model("qwen2", dtype=torch.float64, **sizes)
    for index, layer in enumerate(model.model.layers):
        sizes = torch.linspace(0.8, 1.3, HEADS * DIM, dtype=torch.float64)
        layer.self_attn.k_proj.weight.data *= sizes.roll(5 * index)[:, None]
        layer.self_attn.v_proj.weight.data *= 1 + 0.2 * index
    return model, rap.calibrate(model, random_tokens(4, 64), {"inputs"})


def blocks(model: Any, projection: str) -> list[Tensor]:
    """What is decomposed by itself: W_k of every head, W_v of every layer."""
    weights = [
        getattr(layer.self_attn, f"{projection}_proj").weight for layer in model.model.layers
    ]
    if projection == "v":
        return [weight.detach() for weight in weights]
    return [head.detach() for weight in weights for head in weight.chunk(HEADS)]


def truncated(model: Any, retain: float, gap: float) -> tuple[Any, dict[str, list[int]]]:
    """A copy that keeps the singular values above one threshold a type, and how many of each."""
    found, ranks = copy.deepcopy(model), {}
    for projection, share in (("k", retain - gap / 2), ("v", retain + gap / 2)):
        parts = blocks(found, projection)
        every = torch.cat([torch.linalg.svdvals(part) for part in parts])
        ordered, count = every.sort(descending=True).values, round(share * len(every))
        # Between two of them: another routine gives each to the last digit but one.
        least = ordered[count - 1 : count + 1].mean()
        ranks[projection] = []
        for part in parts:
            up, values, down = torch.linalg.svd(part, full_matrices=False)
            part.copy_(up * values.where(values >= least, 0) @ down)
            ranks[projection].append(int((values >= least).sum()))
    return found, ranks


@pytest.mark.parametrize(("retain", "gap"), [(0.7, 0.2), (0.5, 0.2), (0.5, 0.0)])
def test_it_is_the_dense_model_of_truncated_weights(
    calibrated: tuple, retain: float, gap: float
) -> None:
    model, statistics = calibrated
    wanted, ranks = truncated(model, retain, gap)
    method = METHODS["starkv"](retain=retain, gap=gap)
    plan = method.plan(model, statistics)
    keys = torch.tensor(ranks["k"]).view(LAYERS, HEADS).sum(1).tolist()
    assert [layer.entry().keys for layer in plan.layers] == keys
    assert [layer.entry().values for layer in plan.layers] == ranks["v"]
    assert len(set(ranks["k"])) > 2, "every head has the same rank: the threshold decides nothing"
    ids = random_tokens(2, 40, seed=1)
    with torch.no_grad():
        # Products of float64 numbers of size 10, through three layers.
        torch.testing.assert_close(
            method.apply(model, plan)(ids).logits, wanted(ids).logits, rtol=0, atol=1e-9
        )
        assert (wanted(ids).logits - model(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize(
    ("retain", "kept"), [(0.7, (0.6, 0.8)), (0.95, (0.9, 1.0)), (1.0, (1, 1)), (0.2, (0.1, 0.3))]
)
def test_values_keep_more_while_there_is_room(
    calibrated: tuple, retain: float, kept: tuple[float, float]
) -> None:
    plan = METHODS["starkv"](retain=retain).plan(*calibrated)
    size = HEADS * DIM * LAYERS
    for name, share in zip(("keys", "values"), kept, strict=True):
        found = sum(getattr(layer.entry(), name) for layer in plan.layers)
        # At least one direction is kept of every head's keys.
        assert found == max(round(share * size), HEADS * LAYERS if name == "keys" else LAYERS)


def test_whitened_ranks_keep_more_of_what_is_read(calibrated: tuple) -> None:
    """The whitened cut misses less of keys and values on the calibration text, as it is made to."""
    model, statistics = calibrated
    missed = []
    for name in ("starkv", "starkv:plus"):
        method = rap.methods.parse_method(name, 0.5)
        small = method.apply(model, method.plan(model, statistics))
        total = 0.0
        for index, layer in enumerate(small.model.layers):
            dense, cut = model.model.layers[index].self_attn, layer.self_attn
            moment = statistics.layers[index]["input_moment"].double()
            for projection in "kv":
                up = (
                    getattr(cut, f"{projection}_up")[0].weight
                    @ getattr(cut, f"{projection}_proj").weight
                )
                lost = getattr(dense, f"{projection}_proj").weight - up
                total += float((lost @ moment @ lost.mT).trace().detach())
        missed.append(total)
    assert missed[1] < 0.9 * missed[0]
