"""TransMLA against its definition on activations: components of what the dense layer projects."""

import pytest
import torch
from torch import Tensor

import rap
from cases.models import random_tokens, tiny_model
from rap.methods import METHODS
from rap.model.errors import UnsupportedModelError

HEADS, GROUPS, DIM, PAIRS, HIDDEN = 4, 2, 16, 8, 48


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def dense(request):
    """A model with and one without biases, and its statistics."""
    sizes = {"heads": HEADS, "kv_heads": GROUPS, "head_dim": DIM, "hidden": HIDDEN}
    model = tiny_model(request.param, dtype=torch.float64, **sizes)
    return model, rap.calibrate(model, random_tokens(6, 48), {"inputs"}, batch_size=2)


def _keys_read(model, statistics) -> Tensor:
    """Keys [N, G, D], without biases, whose second moment is that of the calibration text."""
    moment = statistics.layers[0]["input_moment"].double()
    inputs = torch.linalg.cholesky(moment + 1e-12 * torch.eye(HIDDEN)).mT
    keys = inputs @ model.model.layers[0].self_attn.k_proj.weight.detach().mT
    return keys.unflatten(-1, (GROUPS, DIM))


def _turned(x: Tensor, at: int, frequency: Tensor) -> Tensor:
    """x [..., P, 2] rotated at a position."""
    angle = at * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize(("rotated", "fold"), [(16, 1), (16, 4), (8, 2), (8, 4), (4, 8)])
def test_logits_are_those_of_rotated_components(dense, rotated: int, fold: int):
    """With a latent that loses nothing: rotate the leading components, leave the others alone."""
    model, statistics = dense
    method = METHODS["transmla"](retain=1.0, rotated=rotated, freqfold=fold)
    small = method.apply(model, method.plan(model, statistics))
    attention, own = small.model.layers[0].self_attn, model.model.layers[0].self_attn
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    frequency = model.model.rotary_emb.inv_freq.double()
    # Pairs [.., head, P, 2] of what is read, of the keys and of the queries.
    read = _keys_read(model, statistics).unflatten(-1, (2, PAIRS)).transpose(-1, -2)
    with torch.no_grad():
        k = own.k_proj(x).unflatten(-1, (GROUPS, 2, PAIRS)).transpose(-1, -2)
        q = own.q_proj(x).unflatten(-1, (HEADS, 2, PAIRS)).transpose(-1, -2)
    kept, step = fold * rotated // 2 // PAIRS, 2 * PAIRS // rotated
    logits = torch.zeros(HEADS, 5, 5, dtype=torch.float64)
    for first in range(0, PAIRS, fold):
        part = slice(first, first + fold)
        # Both halves are samples of the same G * fold real variables.
        both = read[:, :, part].flatten(1, 2).transpose(1, 2).flatten(0, 1)
        vectors = torch.linalg.svd(both, full_matrices=True).Vh
        for number, vector in enumerate(vectors.unflatten(-1, (GROUPS, fold))):
            slow = number < kept
            at = frequency[first + step * number] if slow else torch.zeros(())
            z = torch.einsum("gp,tgpc->tc", vector, k[:, :, part])
            for head in range(HEADS):
                y = torch.einsum("p,tpc->tc", vector[head // 2], q[:, head, part])
                for t in range(5):
                    for s in range(t + 1):
                        logits[head, t, s] += (_turned(y[t], t, at) * _turned(z[s], s, at)).sum()
    with torch.no_grad():
        parts = attention.project(x[None])
        tables = small.model.rotary_emb(x[None], torch.arange(5)[None])
        queries, shared = attention.position(parts[0], parts[1], tables)
        keys, values = attention.expand(shared, parts[2], 0)
        found = torch.einsum("htw,hsw->hts", queries[0], keys[0].repeat_interleave(2, 0)).tril()
        wanted = own.v_proj(x).unflatten(-1, (GROUPS, DIM)).transpose(0, 1)
    # cos and sin of the family are float32.
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(values[0], wanted, rtol=0, atol=1e-10)
    assert shared.shape == (1, 1, 5, rotated)


def test_the_latent_loses_the_least_energy_of_balanced_keys_and_values(dense):
    """That is the tail of their joint spectrum, where keys are scaled to the length of values."""
    model, statistics = dense
    few, whole = (
        METHODS["transmla"](retain=retain, rotated=16, freqfold=1).plan(model, statistics)
        for retain in (0.5, 1.0)
    )
    moment = statistics.layers[0]["input_moment"].double()
    rank = few.layers[0].entry().latent
    assert rank == 64 // 2 - 16
    kept, dense_maps = (
        [
            plan.layers[0].weights[f"{name}_up.weight"] @ plan.layers[0].weights["v_proj.weight"]
            for name in "kv"
        ]
        for plan in (few, whole)
    )
    value = model.model.layers[0].self_attn.v_proj.weight.detach()
    torch.testing.assert_close(dense_maps[1], value, rtol=0, atol=1e-10)
    # The smaller component of both heads' pairs, of either half of a pair.
    read = _keys_read(model, statistics).unflatten(-1, (2, PAIRS))
    still = []
    for pair in range(PAIRS):
        halves = read[..., pair].transpose(1, 2)
        vector = torch.linalg.svd(halves.flatten(0, 1), full_matrices=True).Vh[1]
        still += (halves @ vector).norm(dim=0).tolist()
    balance = sum(still) / len(still) / ((value @ moment) * value).sum(1).sqrt().mean()
    stacked = torch.cat([dense_maps[0] / balance, value])
    tail = torch.linalg.eigvalsh(stacked @ moment @ stacked.mT).flip(-1)[rank:].sum()
    lost = [a - b for a, b in zip(dense_maps, kept, strict=True)]
    energy = [((x @ moment) * x).sum() for x in lost]
    torch.testing.assert_close(energy[0] / balance**2 + energy[1], tail)


def test_the_fold_is_the_one_windows_are_read_best_with(monkeypatch):
    """It doubles as long as perplexity falls, and not beyond."""
    seen = []
    perplexities = {1: 30.0, 2: 20.0, 4: 25.0, 8: 1.0}
    method = METHODS["transmla"](retain=0.5, rotated=16)
    layers = [type("Layer", (), {"shape": _shape(), "index": 0})()]
    monkeypatch.setattr(type(method), "_layer", lambda self, layer, fold, whole: (fold, whole))
    monkeypatch.setattr("rap.methods.transmla.as_stored", lambda layer, new: new)

    class Trials:
        def perplexity(self, cuts):
            fold, whole = cuts[0]
            assert whole
            seen.append(fold)
            return perplexities[fold]

    assert method._best(layers, Trials()) == 2
    assert seen == [1, 2, 4]


def _shape():
    model = tiny_model("llama", heads=HEADS, kv_heads=GROUPS, head_dim=DIM, hidden=HIDDEN)
    return rap.model.layers.attention_layers(model)[0].shape


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rotated": 3}, "are not RoPE pairs"),
        ({"freqfold": 0}, "freqfold cannot be 0"),
    ],
)
def test_settings_that_are_none_are_refused(settings, said):
    with pytest.raises(rap.RapError, match=said):
        METHODS["transmla"](**settings)


@pytest.mark.parametrize(
    "settings", [{"rotated": 12}, {"freqfold": 3}, {"rotated": 8, "freqfold": 1}]
)
def test_what_does_not_divide_is_refused_before_calibration(settings):
    with pytest.raises(UnsupportedModelError, match="do not divide"):
        METHODS["transmla"](**settings).check_shapes([_shape()])


def test_a_budget_without_a_latent_is_refused(dense):
    model, statistics = dense
    method = METHODS["transmla"](retain=0.2, rotated=16, freqfold=1)
    with pytest.raises(rap.RapError, match="leave nothing of retain"):
        method.plan(model, statistics)
