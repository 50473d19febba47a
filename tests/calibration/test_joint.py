"""Moments across heads, against the outputs of the projections and those of single heads."""

import pytest
import torch

from cases.models import random_tokens, tiny_model
from rap.calibration.forward import averaged_group
from rap.calibration.run import calibrate
from rap.model.layers import attention_layers, attention_spec, projections
from rap.model.rope import AttentionShape, HeadGeometry

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def seen_by(model, windows, index):
    """Keys and values of a layer [N, G, D] as projected."""
    layer, found = attention_layers(model)[index], {}
    parts = projections(layer, attention_spec(model.config))
    handles = [
        parts[projection].register_forward_hook(
            lambda module, inputs, output, projection=projection: found.update({projection: output})
        )
        for projection in "kv"
    ]
    with torch.no_grad():
        model(input_ids=windows)
    for handle in handles:
        handle.remove()
    dim = layer.shape.head_dim
    return layer.shape, {
        projection: x.flatten(0, 1).unflatten(-1, (-1, dim)) for projection, x in found.items()
    }


@pytest.mark.parametrize("name", ["qwen2", "glm"])
def test_joint_moments_are_those_of_all_heads_side_by_side(name):
    """Head by head: biases (qwen2), interleaved pairs and free channels (glm) included."""
    model = tiny_model(name, dtype=torch.float64, heads=6)
    windows = random_tokens(3, 17)
    found = calibrate(model, windows, {"joint"}).layers[1]
    shape, heads = seen_by(model, windows, 1)
    first, second = shape.geometry.pair_channels().unbind(1)
    keys, values = heads["k"], heads["v"]
    pairs = torch.complex(keys[..., first], keys[..., second]).flatten(1)
    free = keys[..., shape.geometry.rotary_dim :].flatten(1)
    own = torch.view_as_complex(found["joint_key_moment"].double().contiguous())
    expected = torch.einsum("np,nr->pr", pairs, pairs.conj()) / windows.numel()
    across = expected[: shape.geometry.num_pairs, shape.geometry.num_pairs :]
    assert across.abs().max() > 0.05 * expected.abs().max()  # heads have something in common
    torch.testing.assert_close(own, expected, **CLOSE)
    for side, states in (("free", free), ("value", values.flatten(1))):
        expected = states.mT @ states / windows.numel()
        torch.testing.assert_close(found[f"joint_{side}_moment"].double(), expected, **CLOSE)


def test_blocks_on_the_diagonal_are_those_of_single_heads():
    model, windows = tiny_model("glm", heads=6), random_tokens(3, 17)
    needs = {"pairs", "joint"}
    found = calibrate(model, windows, needs).layers[1]
    for joint, single in (
        ("joint_key_moment", "key_moment"),
        ("joint_free_moment", "key_free_moment"),
    ):
        size = found[single].shape[1]
        for head, expected in enumerate(found[single]):
            block = slice(head * size, (head + 1) * size)
            torch.testing.assert_close(found[joint][block, block], expected)


@pytest.mark.parametrize("needs", [{"averages"}, {"averages", "values", "gradients", "fisher"}])
@pytest.mark.parametrize("name", ["llama", "phi3", "glm"])
def test_values_are_averaged_as_every_query_head_attends(name, needs):
    """Against the attention weights of the model itself, with projections joined or apart."""
    model = tiny_model(name, dtype=torch.float64, heads=8, kv_heads=4)
    windows, group = random_tokens(3, 17), 4
    found = calibrate(model, windows, needs).layers[1]
    layer, seen = attention_layers(model)[1], []
    value = projections(layer, attention_spec(model.config))["v"]
    handle = value.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attended = model(input_ids=windows, output_attentions=True).attentions[1]
    handle.remove()
    averaged_HNV = torch.einsum("bhts,bsv->hbtv", attended, seen[0]).flatten(1, 2)
    expected = averaged_HNV.mT @ averaged_HNV / windows.numel()
    width = group * layer.shape.head_dim
    assert found["averaged_moment"].shape == (8, width, width)
    torch.testing.assert_close(found["averaged_moment"].double(), expected, **CLOSE)
    if "values" in needs:
        dim = layer.shape.head_dim
        own = torch.stack(
            [
                found["averaged_moment"][h, h // 2 * dim :][:dim, h // 2 * dim :][:, :dim]
                for h in range(8)
            ]
        )
        torch.testing.assert_close(own, found["value_moment"])


def test_other_statistics_do_not_see_that_attention_runs_again():
    model, windows = tiny_model("llama", heads=8, kv_heads=4), random_tokens(3, 17)
    needs = {"pairs", "values", "gradients", "joint", "energy", "fisher"}
    alone, beside = (calibrate(model, windows, n).layers for n in (needs, needs | {"averages"}))
    for one, other in zip(alone, beside, strict=True):
        assert other.keys() == {*one, "averaged_moment"}
        assert all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize(
    ("heads", "dim", "group"),
    [(3, 64, 3), (8, 128, 4), (8, 64, 8), (12, 64, 6), (1, 256, 1), (2, 512, 1)],
)
def test_groups_stay_within_what_can_be_held(heads, dim, group):
    assert averaged_group(AttentionShape(heads, heads, 64, HeadGeometry(dim, dim))) == group
