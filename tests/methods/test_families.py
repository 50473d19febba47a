"""The default method, from calibration to a pruned model, on families with their own attention."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES
from cases.models import random_tokens
from rap.calibration.run import calibrate
from rap.methods import Rap, base
from rap.model.errors import RapError
from rap.planning.folding import fold_head, spectrum

NAMES = ["phi3", "gpt_neox", "qwen3", "qwen3_next", "gemma3_text", "llama4_text", "olmo2", "afmoe"]
NAMES += ["gemma3n_text", "gemma4_text", "gemma4_text:tied", "gemma3n", "gemma4"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"merge": 1}, {"qk_norm": "exact"}],
    ids=["merged", "constant", "exact"],
)
@pytest.mark.parametrize("name", NAMES)
def test_default_method_compresses_to_the_budget(name, settings):
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    method = Rap(retain=0.5, **settings)
    statistics = calibrate(model, random_tokens(4, 16), method.needs_for(model))
    plan = method.plan(model, statistics)
    assert plan.kept_fraction == pytest.approx(0.5, abs=0.01)
    assert plan.qk_norm == method.qk_norm
    kept = [layer for layer in plan.layers if layer is not None]
    merged = any(layer.merge > 1 for layer in kept)
    assert merged == (not settings and not name.startswith(("gemma3n", "gemma4")))
    if case.norms and name != "llama4_text" and not merged:
        assert all(layer.key_mix_GMP2 is None for layer in kept)
        assert all((layer.query_ratio_H >= 1).all() for layer in kept)
        own = [layer for i, layer in enumerate(plan.layers) if layer and i not in case.sources]
        assert all((layer.key_ratio_G >= 1).all() for layer in own)
    small = method.apply(model, plan)
    with torch.no_grad():
        assert torch.isfinite(small(random_tokens(2, 9)).logits).all()


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "persimmon"])
def test_gradients_of_a_shared_linear_are_split_by_projection(name):
    """Scores of a fused linear are those of the same rows by plain differentiation."""
    case = next(case for case in CASES if case.name == name)
    model = case.model(dtype=torch.float32)
    tokens = random_tokens(1, 16)
    statistics = calibrate(model, tokens, {"fisher"})
    attention = getattr(model.get_decoder().layers[0], case.attention)
    linear = attention.qkv_proj if name == "phi3" else attention.query_key_value
    logits = model(tokens, use_cache=False).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradient = linear.weight.grad.abs().sum(1)
    dim = 16
    if name == "phi3":
        expected = gradient[-2 * dim :].view(2, dim)
    else:
        expected = gradient.view(6, 3, dim)[:, 2]
    found = statistics.layers[0]["root_fisher_v"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def _local_and_global(name: str = "gemma3_text") -> tuple[Any, list[Tensor]]:
    """A model and its layers' frequencies, written down from the configuration of the case."""
    model = next(case for case in CASES if case.name == name).model(dtype=torch.float32)
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    local, everywhere = 1e3**-exponents, 1e5**-exponents / 4
    return model, [local, everywhere, local]


def test_every_layer_has_its_own_frequencies():
    model, expected = _local_and_global()
    for found, own in zip(base.dense_layers(model).frequencies, expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({"budget": "error"}, ("rap.planning.losses.spectrum", spectrum, 2)),
        ({"budget": "uniform"}, ("rap.methods.keys.fold_head", fold_head, 2)),
    ],
    ids=["error", "fold"],
)
def test_layers_are_weighed_at_their_own_frequencies(settings: dict, reads: tuple):
    """Folding is allowed on a normalised model here, for no family without norms rotates so."""
    name, function, position = reads
    model, expected = _local_and_global()
    statistics = calibrate(model, random_tokens(4, 16), {"pairs", "values", "energy", "gradients"})
    dense = base.dense_layers(model)
    layers = [dataclasses.replace(layer, mixes_keys=True) for layer in dense.layers]
    dense = dataclasses.replace(dense, layers=layers)
    seen: list[Tensor] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[position])
        return function(*args, **kwargs)

    method = Rap(retain=0.5, score="energy", merge=1, **settings)
    with (
        mock.patch.object(base, "dense_layers", return_value=dense),
        mock.patch(name, record),
    ):
        method.plan(model, statistics)
    per_layer = len(seen) // 3
    for index, own in enumerate(expected):
        for found in seen[index * per_layer : (index + 1) * per_layer]:
            torch.testing.assert_close(found, own, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "which"), [("gemma3_text", "0 and 1"), ("smollm3", "0 and 1")])
@pytest.mark.parametrize("keys", ["fold", "pairs"])
def test_stock_profile_is_refused_where_layers_rotate_differently(name, which, keys):
    model = next(case for case in CASES if case.name == name).model(dtype=torch.float32)
    method = Rap(retain=0.5, keys=keys, profile="stock")
    statistics = calibrate(model, random_tokens(2, 16), method.needs_for(model))
    with pytest.raises(RapError, match=f"layers {which} rotate at other frequencies"):
        method.plan(model, statistics)
