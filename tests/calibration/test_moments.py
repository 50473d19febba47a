"""Second moments against the outputs of the projections, and one bad gradient."""

from types import SimpleNamespace

import pytest
import torch

from cases.models import random_tokens, tiny_model
from rap.calibration.backward import check_gradient
from rap.calibration.run import calibrate
from rap.model.errors import CalibrationError
from rap.model.layers import attention_layers, attention_spec, projections
from rap.planning.losses import free_moments, key_moments


@pytest.mark.parametrize("name", ["qwen2", "glm"])
def test_moments_are_those_of_the_projections(name):
    """Pairs as complex numbers, in both layouts of pairs; means over tokens."""
    model, windows = tiny_model(name, dtype=torch.float64, heads=6), random_tokens(3, 17)
    found = calibrate(model, windows, {"pairs", "values", "energy"}, batch_size=2).layers[1]
    layer, seen = attention_layers(model)[1], {}
    shape, parts = layer.shape, projections(layer, attention_spec(model.config))
    handles = [
        parts[projection].register_forward_hook(
            lambda m, inputs, output, projection=projection: seen.update(
                {projection: output, f"{projection} in": inputs[0]}
            )
        )
        for projection in "qkvo"
    ]
    with torch.no_grad():
        model(input_ids=windows)
    for handle in handles:
        handle.remove()
    heads = {name: x.flatten(0, 1).unflatten(-1, (-1, shape.head_dim)) for name, x in seen.items()}
    first, second = shape.geometry.pair_channels().unbind(1)
    close = {"rtol": 1e-4, "atol": 1e-4}
    for group in range(2):
        queries = [heads["q"][:, head] for head in range(3 * group, 3 * group + 3)]
        read = [heads["o in"][:, head] for head in range(3 * group, 3 * group + 3)]
        for side, states in (("query", queries), ("key", [heads["k"][:, group]])):
            pairs = [torch.complex(x[:, first], x[:, second]) for x in states]
            moment = sum(torch.einsum("np,nr->pr", z, z.conj()) for z in pairs) / windows.numel()
            own = torch.view_as_complex(found[f"{side}_moment"][group].double().contiguous())
            torch.testing.assert_close(own, moment, **close)
            still = [x[:, shape.geometry.rotary_dim :] for x in states]
            moment = sum(x.mT @ x for x in still) / windows.numel()
            torch.testing.assert_close(
                found[f"{side}_free_moment"][group].double(), moment, **close
            )
        for head, x in enumerate(read, start=3 * group):
            moment = x.mT @ x / windows.numel()
            torch.testing.assert_close(found["value_moment"][head].double(), moment, **close)
        # Values have no pairs: their channels stay in the dense order.
        energy = heads["v"][:, group].square().mean(0)
        torch.testing.assert_close(found["energy_v"][group].double(), energy, **close)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_single_bad_number_of_a_gradient_is_seen(bad):
    gradient = torch.zeros(2, 3)
    check_gradient(SimpleNamespace(index=1), "k", gradient, 4)
    gradient[1, 2] = bad
    with pytest.raises(CalibrationError, match="layer 1, window 4: the gradient of k_proj"):
        check_gradient(SimpleNamespace(index=1), "k", gradient, 4)


@pytest.mark.parametrize(
    ("metric", "of_pairs", "of_free"),
    [("loss", "key_gradient", "free_gradient"), ("output", "query_moment", "query_free_moment")],
)
def test_every_metric_reads_its_own_moments(metric, of_pairs, of_free):
    """A loss is weighed by gradients, a logit by queries."""
    found = calibrate(tiny_model("glm"), random_tokens(2, 17), {"pairs", "gradients"}).layers[0]
    key, reader = (torch.view_as_real(moment) for moment in key_moments(found, metric))
    assert torch.equal(key, found["key_moment"].double())
    assert torch.equal(reader, found[of_pairs].double())
    key, reader = free_moments(found, metric)
    assert torch.equal(key, found["key_free_moment"].double())
    assert torch.equal(reader, found[of_free].double())
