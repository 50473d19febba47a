"""The scale of expected losses: keys, values and layers compare, however a model is written."""

import pytest
import torch
from torch import Tensor

import rap
from cases.models import random_tokens, tiny_model
from rap.calibration.statistics import Statistics
from rap.methods.dense import PrunableLayer, dense_layers
from rap.methods.values import layer_losses
from rap.model.rope import AttentionShape, HeadGeometry

CONTEXT = 256
HEADS, DIM, SAMPLES = 2, 12, 40


def losses(model, statistics: Statistics, index: int) -> tuple[Tensor, Tensor]:
    """Expected loss of keys and of values at every width, float64."""
    layer = dense_layers(model).with_statistics(statistics).layers[index]
    found = layer_losses(layer, CONTEXT)
    keys, values = (torch.tensor(part, dtype=torch.float64) for part in found)
    return keys, values


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_repeating_key_and_value_heads_costs_the_same(group: int) -> None:
    """Grouped queries, and the same function with a key and value head for every query head."""
    sizes = {"dtype": torch.float64, "heads": 8, "hidden": 64, "layers": 2}
    model = tiny_model("llama", kv_heads=8 // group, **sizes)
    repeated = tiny_model("llama", kv_heads=8, **sizes)
    weights = model.state_dict()
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            heads = weights[name].unflatten(0, (8 // group, 16))
            weights[name] = heads.repeat_interleave(group, 0).flatten(0, 1)
    repeated.load_state_dict(weights)
    windows = random_tokens(24, 64)
    assert torch.equal(model(windows[:1]).logits, repeated(windows[:1]).logits)
    needs = {"pairs", "values", "gradients"}
    both = [(m, rap.calibrate(m, windows, needs)) for m in (model, repeated)]
    for index in range(2):
        (keys, values), (keys_alone, values_alone) = (losses(m, s, index) for m, s in both)
        # Moments are kept in float32.
        torch.testing.assert_close(values[0], values_alone[0], rtol=1e-4, atol=0)
        # With repeated heads each may choose directions of its own.
        assert (values >= values_alone * (1 - 1e-4)).all()
        # A shared key is pulled by all its queries at once. How their pulls agree is noise here:
        # 2 % at most over these layers.
        torch.testing.assert_close(keys[0], keys_alone[0], rtol=0.03, atol=0)


def circular(seed: int) -> Tensor:
    """Complex samples [G, N, P] with correlated pairs, every one also a quarter turn further."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(2, HEADS, SAMPLES, DIM // 2, dtype=torch.float64, generator=generator)
    mix = torch.randn(DIM // 2, DIM // 2, dtype=torch.float64, generator=generator)
    samples = torch.complex(*real) @ mix.to(torch.complex128)
    return torch.cat([samples, 1j * samples], dim=1)


def channels(samples_GNP: Tensor) -> Tensor:
    """The same samples as channels [G, N, 2P]."""
    return torch.cat([samples_GNP.real, samples_GNP.imag], dim=-1)


def second_moment(samples_GNP: Tensor) -> Tensor:
    return samples_GNP.mT @ samples_GNP.conj() / samples_GNP.shape[1]


def layer_of(keys: Tensor, gradients: Tensor, *, rotary: int, mixes: bool = True) -> PrunableLayer:
    """A layer with these keys and gradients, of which the first channels rotate.

    Frequencies are 0: turning or not, it is the same layer.
    """
    shape = AttentionShape(HEADS, HEADS, HEADS * DIM, HeadGeometry(DIM, rotary))
    pairs = rotary // 2
    found = {}
    for name, samples in (("moment", keys), ("gradient", gradients)):
        paired = second_moment(samples[..., :pairs])
        free = second_moment(channels(samples[..., pairs:]))
        found[f"key_{name}"] = torch.view_as_real(paired.contiguous())
        found["free_gradient" if name == "gradient" else "key_free_moment"] = free
        found[f"value_{name}"] = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
    weights, still = {"o": torch.empty(0)}, torch.zeros(pairs, dtype=torch.float64)
    return PrunableLayer(0, shape, lambda: weights, still, mixes_keys=mixes, statistics=found)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("rotary", [DIM, 4, 0])
def test_keys_cost_half_the_mean_square_of_what_they_move(rotary: int, mixes: bool) -> None:
    """1/2 E[(g^T k)^2] over all gradients and keys, by real arithmetic, for channels that turn."""
    keys, gradients = circular(1), circular(2)
    layer = layer_of(keys, gradients, rotary=rotary, mixes=mixes)
    # The rotating and the other channels move the loss independently of each other.
    moved = [
        torch.einsum("gnd,gmd->gnm", channels(gradients[..., part]), channels(keys[..., part]))
        for part in (slice(None, rotary // 2), slice(rotary // 2, None))
    ]
    explicit = sum(0.5 * part.square().mean((1, 2)).sum() for part in moved)
    found = layer_losses(layer, CONTEXT)[0]
    assert found[0] == pytest.approx(float(explicit), rel=1e-9)


def test_channels_that_never_rotate_cost_what_they_would_as_pairs() -> None:
    """Circular moments leave a real subspace nothing to gain on a complex one, at any width."""
    keys, gradients = circular(3), circular(4)
    rotating, still = (
        layer_losses(layer_of(keys, gradients, rotary=rotary), CONTEXT)[0] for rotary in (DIM, 0)
    )
    assert rotating == pytest.approx(still, rel=1e-6)
    assert still[0] > still[-1] == 0
