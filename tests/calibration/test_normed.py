"""Moments behind the norm of queries and keys, against what the family's own norm gives."""

import pytest
import torch

from cases.family_cases import CASES
from cases.models import random_tokens, tiny_model
from rap.calibration.backward import GradientMoment
from rap.calibration.moments import NORMED, JointMoment, PairMoment, behind_norm
from rap.calibration.registry import observed_layer
from rap.calibration.run import calibrate
from rap.methods.dense import dense_layers
from rap.model.layers import attention_layers

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# The layout that a case names is written down from the family's own code.
CASES_WITH_NORMS = [
    case
    for case in CASES
    if case.norms
    and not case.around
    and any(layer.maps_keys for layer in dense_layers(case.model()).present)
]


def _flat(case, states):
    """What a norm gives, [B, T, G D]."""
    heads = states.transpose(1, 2) if case.normed == "BHTD" else states
    return heads.reshape(*heads.shape[:2], -1)


@pytest.mark.parametrize("case", CASES_WITH_NORMS, ids=lambda case: case.name)
def test_they_are_those_of_what_the_norm_gives(case):
    model = case.model()
    windows = random_tokens(1, 19)
    statistics = calibrate(model, windows, {"normed", "normed_gradients", "pairs"})
    layer = next(x for x in attention_layers(model) if x.norm is not None)
    found, watched = statistics.layers[layer.index], observed_layer(model, layer)
    pairs, joint, gradient = PairMoment(watched), JointMoment(watched), GradientMoment(watched)
    outputs = {}
    for projection, norm in zip("qk", layer.norm.names, strict=True):
        getattr(layer.module, norm).register_forward_hook(
            lambda module, inputs, output, projection=projection: outputs.update(
                {projection: output}
            )
        )
    logits = model(windows).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="sum"
    )
    (by_keys,) = torch.autograd.grad(loss, outputs["k"])
    for projection in "qk":
        states = _flat(case, outputs[projection].detach())
        pairs.update(projection, states, states)
    joint.update("k", states, states)
    gradient.update("k", _flat(case, by_keys))
    expected = pairs.compute(19) | joint.compute(19) | gradient.compute(19)
    names = (*PairMoment.names, "joint_key_moment", "key_gradient", "free_gradient")
    for kept in names:
        torch.testing.assert_close(found[NORMED + kept], expected[kept], **CLOSE)
    assert not torch.allclose(found["key_moment"], expected["key_moment"], rtol=0.1)
    seen = behind_norm(found)
    assert torch.equal(seen["key_moment"], found[NORMED + "key_moment"])


def test_layers_without_a_norm_that_a_map_may_follow_have_none():
    for name in ("llama", "hunyuan_v1_dense"):
        model = tiny_model(name, heads=4, kv_heads=2)
        found = calibrate(model, random_tokens(2, 9), {"normed", "normed_gradients"}).layers[0]
        assert not found
