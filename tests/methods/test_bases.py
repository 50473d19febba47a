"""EliteKV and MatryoshkaKV: their statistics, choices and bases, and the training of the latter."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rap
from cases.models import ROPES, random_tokens, tiny_model
from rap.assets import reference_tokenizer
from rap.calibration.forward import SAMPLES_PER_WINDOW
from rap.calibration.memory import estimate_memory
from rap.methods import METHODS
from rap.methods.elitekv import elite_pairs
from rap.methods.replacing import DenseLayer
from rap.recovery.projections import SETTINGS, train_projections
from rap.recovery.stages import recover_stage

HEADS, GROUPS, DIM, PAIRS = 4, 2, 16, 8
NEEDS = {"logits", "rotated", "inputs"}


@pytest.fixture(scope="module")
def calibrated() -> tuple[Any, Tensor, rap.Statistics]:
    """A tiny biased model, the windows it was calibrated on, its statistics."""
    model = tiny_model(
        "qwen2", dtype=torch.float64, heads=HEADS, kv_heads=GROUPS, head_dim=DIM, hidden=48
    )
    windows = random_tokens(4, 48)
    return model, windows, rap.calibrate(model, windows, NEEDS, batch_size=2)


def rotated(x: Tensor, position: int, inv_freq: Tensor, factor: float = 1.0) -> Tensor:
    """One head's state [D] at a position, by rotating every pair (j, j + P) on its own.

    `factor` is YaRN's, which is on cos and sin, so on channels that rotate and on no others.
    """
    out, pairs = x.clone(), len(inv_freq)
    for j, theta in enumerate(inv_freq.tolist()):
        cos, sin = factor * math.cos(position * theta), factor * math.sin(position * theta)
        out[j] = x[j] * cos - x[j + pairs] * sin
        out[j + pairs] = x[j + pairs] * cos + x[j] * sin
    return out


def test_sampled_products_hold_the_dense_logits(calibrated: tuple) -> None:
    """Every sampled product is of some query and an earlier key of one window, at that distance."""
    model, windows, statistics = calibrated
    attention, found = model.model.layers[0].self_attn, statistics.layers[0]
    assert found["logit_distances"].min() == 0
    assert 24 < found["logit_distances"].max() < 48
    angle = found["logit_distances"].double()[:, None] * model.model.rotary_emb.inv_freq.double()
    products = torch.view_as_complex(found["logit_products"].double().contiguous())
    logits_HN = (products * torch.polar(torch.ones_like(angle), angle)).real.sum(-1)
    seen: list[Tensor] = []
    handle = attention.k_proj.register_forward_hook(lambda m, i, o: seen.append(i[0]))
    with torch.no_grad():
        model(windows)
        handle.remove()
        q = attention.q_proj(seen[0]).unflatten(-1, (HEADS, DIM))
        k = attention.k_proj(seen[0]).unflatten(-1, (GROUPS, DIM))
    head, inv_freq = 2, model.model.rotary_emb.inv_freq
    dense = {}
    for window, query in ((w, t) for w in range(4) for t in range(0, 48, 7)):
        for key in range(0, query + 1, 5):
            turned = rotated(q[window, query, head], query, inv_freq)
            value = turned @ rotated(k[window, key, head // 2], key, inv_freq)
            dense[round(float(value), 3)] = query - key
    samples = zip(logits_HN[head].tolist(), found["logit_distances"].tolist(), strict=True)
    matched = [dense[round(v, 3)] == d for v, d in samples if round(v, 3) in dense]
    # The grid above has a tenth of all pairs of positions, 256 of them were sampled.
    assert len(matched) > 5
    assert sum(matched) >= 0.8 * len(matched)


@pytest.mark.parametrize("need", ["inputs", "rotated", "logits"])
def test_the_memory_estimate_counts_them(calibrated: tuple, need: str) -> None:
    model, windows, _ = calibrated
    found = rap.calibrate(model, windows, {need})
    held = sum(tensor.nbytes for layer in found.layers for tensor in layer.values())
    # What `result` drops: the keys' mean and two centres, four of a distance's eight bytes.
    dropped = {"rotated": 3 * GROUPS * DIM, "logits": 4 * SAMPLES_PER_WINDOW, "inputs": 0}
    held += len(found.layers) * 4 * dropped[need]
    assert estimate_memory(model, windows, {need})["accumulators"] == held


def test_elite_pairs_are_the_greedy_choice(calibrated: tuple) -> None:
    """Against partial logits recomputed from scratch in every round."""
    model, _, statistics = calibrated
    found, inv_freq = statistics.layers[0], model.model.rotary_emb.inv_freq.double()
    products = torch.view_as_complex(found["logit_products"].double().contiguous())
    layer: Any = DenseLayer(0, rap_shape(model), {}, {}, found, inv_freq)
    chosen = elite_pairs(layer, 3)
    turn = torch.exp(1j * found["logit_distances"].double()[:, None] * inv_freq)
    for group in range(GROUPS):
        own = products[2 * group : 2 * group + 2]
        full, elite = (own * turn).real.sum(-1), []
        for _ in range(3):

            def distance(extra: int, own: Tensor = own, elite: list = elite, full: Tensor = full):
                some = {*elite, extra}
                parts = [
                    (own[..., p] * turn[:, p]).real if p in some else own[..., p].real
                    for p in range(PAIRS)
                ]
                return float((sum(parts) - full).abs().mean())

            elite.append(min(set(range(PAIRS)) - set(elite), key=distance))
        assert chosen[group].tolist() == sorted(elite)


def rap_shape(model: Any) -> Any:
    """The dense shape of a model's first layer."""
    return rap.model.layers.attention_layers(model)[0].shape


_YARN = ROPES["yarn"] | {"attention_factor": 2.0}
_PARTIAL = {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen2", {}),
        ("qwen2", {"rope_parameters": _YARN}),
        # Channels that never rotated have no factor in the dense model either.
        ("nemotron", {"rope_parameters": _YARN | _PARTIAL, "attention_bias": True, **_PARTIAL}),
    ],
    ids=["default", "yarn", "yarn of half the channels"],
)
def test_elite_pairs_rotate_and_the_rest_does_not(model_type: str, fields: dict) -> None:
    """With a whole latent, attention is that of a dense head whose other pairs stand still."""
    sizes = {"heads": HEADS, "kv_heads": GROUPS, "head_dim": DIM, "hidden": 48}
    model = tiny_model(model_type, dtype=torch.float64, **sizes, **fields)
    statistics = rap.calibrate(model, random_tokens(4, 48), {"logits"}, batch_size=2)
    method = METHODS["elitekv"](retain=1.0, pairs=3)
    small = method.apply(model, method.plan(model, statistics))
    attention = small.model.layers[0].self_attn
    # 2 * 32 channels, 12 of them elite: more than the input has.
    assert attention.v_proj.out_features == 48
    dense, index = model.model.layers[0].self_attn, attention.frequency_index
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotary = model.model.rotary_emb
    inv_freq, factor = rotary.inv_freq.double(), rotary.attention_scaling
    assert factor == fields.get("rope_parameters", {}).get("attention_factor", 1.0)
    still = torch.zeros(GROUPS, len(inv_freq), dtype=torch.float64)
    still.scatter_(1, index.long(), 1.0)
    with torch.no_grad():
        q = dense.q_proj(x).unflatten(-1, (HEADS, DIM))
        k = dense.k_proj(x).unflatten(-1, (GROUPS, DIM))
        logits = torch.zeros(HEADS, 9, 9, dtype=torch.float64)
        for head in range(HEADS):
            frequencies = inv_freq * still[head // 2]
            for t in range(9):
                for s in range(t + 1):
                    turned = rotated(k[s, head // 2], s, frequencies, factor)
                    logits[head, t, s] = rotated(q[t, head], t, frequencies, factor) @ turned
        mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)
        weights = (logits * dense.scaling + mask).softmax(-1)
        values = dense.v_proj(x).unflatten(-1, (GROUPS, DIM)).repeat_interleave(2, 1)
        wanted = dense.o_proj(torch.einsum("hts,shd->thd", weights, values).flatten(1))
        tables = small.model.rotary_emb(x[None], torch.arange(9)[None])
        found, _ = attention(x[None], tables, None)
    # cos and sin of the family are float32.
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-4)


def test_whitening_makes_the_latent_better_for_what_is_read(calibrated: tuple) -> None:
    """Expected squared error of the values from the latent, beside the plain SVD's."""
    model, _, statistics = calibrated
    moment = statistics.layers[1]["input_moment"].double()
    errors = {}
    for whiten in (False, True):
        method = METHODS["elitekv"](retain=0.4, pairs=2, whiten=whiten)
        attention = method.apply(model, method.plan(model, statistics)).model.layers[1].self_attn
        missing = model.model.layers[1].self_attn.v_proj.weight
        missing = (missing - attention.v_up.weight @ attention.v_proj.weight).detach()
        errors[whiten] = float((missing @ moment * missing).sum())
    assert errors[True] < 0.9 * errors[False]


def test_rotated_statistics_are_of_the_dense_cache(calibrated: tuple) -> None:
    model, windows, statistics = calibrated
    with torch.no_grad():
        cache = model(windows, use_cache=True).past_key_values
    for layer, found in zip(cache.layers, statistics.layers, strict=True):
        for states, name in (
            (layer.keys, "rotated_key_moment"),
            (layer.values, "value_moment_about_mean"),
        ):
            for head in range(GROUPS):
                covariance = states[:, head].flatten(0, 1).mT.cov(correction=0)
                torch.testing.assert_close(
                    found[name][head].double(), covariance, rtol=1e-4, atol=1e-3
                )


def test_rotated_statistics_of_heads_that_rotate_in_part() -> None:
    """Interleaved pairs, then channels that stand still: canonical order of the cached keys."""
    model, windows = tiny_model("glm", dtype=torch.float64), random_tokens(3, 16)
    shape = rap_shape(model)
    assert 0 < shape.geometry.num_free < shape.head_dim
    found = rap.calibrate(model, windows, {"rotated"}).layers[0]["rotated_key_moment"]
    with torch.no_grad():
        keys = model(windows, use_cache=True).past_key_values.layers[0].keys
    for head, own in enumerate(found):
        states = keys[:, head, :, shape.geometry.canonical_order()].flatten(0, 1)
        covariance = states.mT.cov(correction=0)
        torch.testing.assert_close(own.double(), covariance, rtol=1e-4, atol=1e-3)


def test_rotated_statistics_beside_large_biases() -> None:
    """Values that vary by a thousandth of their mean, as Qwen's biases make them."""
    model, windows = tiny_model("qwen2", dtype=torch.float32), random_tokens(4, 64)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.bias.fill_(300.0)
        found = rap.calibrate(model, windows, {"rotated"}).layers[0]
        values = model.double()(windows, use_cache=True).past_key_values.layers[0].values
    for head in range(values.shape[1]):
        covariance = values[:, head].flatten(0, 1).mT.cov(correction=0)
        own = found["value_moment_about_mean"][head].double()
        torch.testing.assert_close(own, covariance, rtol=1e-2, atol=float(covariance.norm()) / 1e3)
        mean = values[:, head].flatten(0, 1).mean(0)
        torch.testing.assert_close(found["value_mean"][head].double(), mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("retain", [0.75, 0.5])
def test_matryoshka_keeps_the_most_variance(calibrated: tuple, retain: float) -> None:
    """Coordinates in the cache miss the least that any basis of that width can."""
    model, windows, statistics = calibrated
    method = METHODS["matryoshka"](retain=retain)
    small = method.apply(model, method.plan(model, statistics))
    width = round(retain * DIM)
    with torch.no_grad():
        dense = model(windows, use_cache=True).past_key_values.layers[0]
        found = small(windows, use_cache=True).past_key_values.layers[0]
    attention = small.model.layers[0].self_attn
    for name, states, cached in (
        ("key_down", dense.keys, found.keys),
        ("value_down", dense.values, found.values),
    ):
        assert cached.shape == (*states.shape[:-1], width)
        for head in range(GROUPS):
            x = states[:, head].flatten(0, 1)
            basis = getattr(attention, name)[head].weight.detach()
            torch.testing.assert_close(basis @ basis.mT, torch.eye(width, dtype=x.dtype))
            centred = x - x.mean(0)
            missed = (centred - centred @ basis.mT @ basis).square().sum(-1).mean()
            tail = torch.linalg.eigvalsh(x.mT.cov(correction=0))[: DIM - width].sum()
            torch.testing.assert_close(missed, tail, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def projected() -> tuple[Any, Any, Tensor]:
    """A float32 model, its projected form at half the width, and windows to train on."""
    model = tiny_model(dtype=torch.float32, heads=HEADS, kv_heads=GROUPS, head_dim=DIM, hidden=48)
    method = METHODS["matryoshka"](retain=0.5)
    windows = random_tokens(8, 32)
    statistics = rap.calibrate(model, windows, method.needs)
    return model, method.apply(model, method.plan(model, statistics)), windows


def test_training_turns_bases_and_nothing_else(projected: tuple) -> None:
    model, small, windows = projected
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    dense = rap.fingerprint_model(model)
    settings = replace(SETTINGS, steps=12, warmup_steps=1, global_batch=8, learning_rate=2e-2)
    trained = train_projections(small, model, windows, settings)
    assert rap.fingerprint_model(model) == dense
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    for name, tensor in trained.state_dict().items():
        turned = "_down" in name or "self_attn.o_proj" in name
        assert torch.equal(tensor, before[name]) != turned, name
        if name.endswith("key_down.0.weight"):
            torch.testing.assert_close(tensor @ tensor.mT, torch.eye(DIM // 2), rtol=0, atol=1e-5)

    def nats(candidate: Any) -> float:
        return rap.perplexity(candidate, windows.flatten(), window=32).nats_per_token

    assert nats(trained) < nats(small) - 0.02


def test_training_starts_at_the_bases_it_is_given(projected: tuple) -> None:
    model, small, windows = projected
    settings = replace(SETTINGS, steps=1, learning_rate=1e-12)
    same = train_projections(small, model, windows, settings)
    ids = random_tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(same(ids).logits, small(ids).logits, rtol=0, atol=1e-3)


def test_the_stage_trains_them_and_keeps_the_better() -> None:
    model = tiny_model(dtype=torch.float32, vocab_size=4096, hidden=48, layers=1)
    method = METHODS["matryoshka"](retain=0.25)
    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs)
    small = method.apply(model, method.plan(model, statistics))
    sizes = {"window": 32, "num_windows": 8, "validation_windows": 4}
    kept_as_it_was = []
    # A rate that helps this random model, and one that throws its bases about.
    for steps, rate in ((4, 1e-2), (6, 1e-1)):
        settings = replace(SETTINGS, steps=steps, warmup_steps=1, learning_rate=rate, **sizes)
        found, report = recover_stage(
            small, model, reference_tokenizer(), "projections", config=settings
        )
        figures = [report["perplexity_before"], report["perplexity_trained"]]
        assert report["perplexity_after"] == min(figures)
        assert (found is small) == (figures[0] <= figures[1])
        kept_as_it_was.append(found is small)
        assert "perplexity_refitted" not in report
    assert kept_as_it_was == [False, True]


def test_projections_are_a_recovery_of_their_method_alone(projected: tuple) -> None:
    model, small, windows = projected
    for setting in ({"tune": "full"}, {"rank": 4}, {"schedule": "plateau"}):
        with pytest.raises(rap.RapError, match=f"does not read {next(iter(setting))}"):
            train_projections(small, model, windows, replace(SETTINGS, **setting))
    other = METHODS["random"](retain=0.5)
    plain = other.apply(model, other.plan(model, rap.calibrate(model, windows, other.needs)))
    with pytest.raises(rap.RapError, match="this model has none"):
        train_projections(plain, model, windows)
    touched = METHODS["matryoshka"](retain=0.5)
    touched = touched.apply(model, touched.plan(model, rap.calibrate(model, windows, {"rotated"})))
    with torch.no_grad():
        touched.model.layers[0].self_attn.v_proj.weight.mul_(1.1)
    with pytest.raises(rap.RapError, match="these were trained"):
        train_projections(touched, model, windows)
