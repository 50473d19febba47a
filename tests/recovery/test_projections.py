"""Training of projections, piece by piece: what bases let through, which widths, which loss."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import rap
from cases.models import random_tokens, tiny_model
from rap.methods import METHODS
from rap.model.errors import RapError
from rap.model.layers import attention_layers
from rap.recovery import projections
from rap.recovery.config import RecoveryConfig
from rap.recovery.projections import SETTINGS, Bases, _loss, _Projecting

HEADS, DIM = 2, 12


def bases_of(model: Any) -> dict[int, Bases]:
    """The bases of a projected model of half the width, turned a little."""
    method = METHODS["matryoshka"](retain=0.5)
    statistics = rap.calibrate(model, random_tokens(4, 32), method.needs)
    small = method.apply(model, method.plan(model, statistics))
    found = {
        layer.index: Bases(layer, statistics.layers[layer.index])
        for layer in attention_layers(small)
    }
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for bases in found.values():
            for skew in bases.skew.values():
                skew.copy_(torch.randn(skew.shape, generator=generator) / 5)
    return found


@pytest.mark.parametrize("model_type", ["llama", "cohere"])
@torch.no_grad()
def test_bases_let_the_leading_directions_through(model_type):
    """Keys in the family's order of channels, values about their mean, a width for every head."""
    model = tiny_model(model_type, dtype=torch.float32, head_dim=DIM)
    bases = bases_of(model)[0]
    order = attention_layers(model)[0].shape.geometry.canonical_order()
    assert (order.tolist() == list(range(DIM))) == (model_type == "llama")
    assert float(bases.mean.abs().max()) > 0.1
    x = torch.randn(3, HEADS, 5, DIM, generator=torch.Generator().manual_seed(1))
    for name, widths in (("k", (3, 7)), ("v", (DIM, 1))):
        found = bases.through(name, x, torch.tensor(widths))
        whole = bases.basis(name)
        for head, width in enumerate(widths):
            basis = whole[head, :, :width]
            torch.testing.assert_close(basis.mT @ basis, torch.eye(width), rtol=0, atol=1e-5)
            own = x[:, head]
            if name == "k":
                expected = torch.empty_like(own)
                expected[..., order] = own[..., order] @ basis @ basis.mT
            else:
                expected = (own - bases.mean[head]) @ basis @ basis.mT + bases.mean[head]
            torch.testing.assert_close(found[:, head], expected, rtol=0, atol=1e-5)


def test_widths_are_eighths_of_a_head_rounded_up(monkeypatch):
    drawn: dict[str, set[int]] = {"k": set(), "v": set()}

    class Recorder:
        def through(self, name, states, width_G):
            drawn[name].update(width_G.tolist())
            return states

    cache = _Projecting({0: Recorder()}, torch.Generator().manual_seed(0))
    for _ in range(200):
        cache.update(torch.zeros(1, HEADS, 3, DIM), torch.zeros(1, HEADS, 3, DIM), 0)
    assert drawn == {"k": {2, 3, 5, 6, 8, 9, 11, 12}, "v": {2, 3, 5, 6, 8, 9, 11, 12}}


def test_the_loss_of_whole_bases_is_the_dense_models_own(monkeypatch):
    """Nothing is projected away, so that teacher and student agree and cross-entropy is left."""
    monkeypatch.setattr(projections, "WIDTH_STEPS", 1)
    model, ids = tiny_model(dtype=torch.float32, head_dim=DIM), random_tokens(2, 15)
    bases = bases_of(model)
    with torch.no_grad():
        found = _loss(bases, model, ids, SETTINGS, torch.Generator().manual_seed(0))
        expected = SETTINGS.ce_weight * model(ids, labels=ids).loss
    assert float(found) == pytest.approx(float(expected), rel=1e-4)


def test_passes_over_the_text_are_steps_where_none_are_given(monkeypatch):
    seen = []
    monkeypatch.setattr(
        projections, "_loss", lambda *_: seen.append(1) or torch.ones((), requires_grad=True)
    )
    model = tiny_model("llama", head_dim=DIM, kv_heads=HEADS)
    config = RecoveryConfig(epochs=3, global_batch=4, micro_batch=4)
    projections._train(bases_of(model), model, random_tokens(10, 16), config, progress=False)
    assert len(seen) == 8  # 30 windows in fours


@pytest.mark.parametrize("spared", [True, False])
def test_layers_that_were_left_dense_stay_so(spared):
    """Those with a sliding window beside one with full attention."""
    fields = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    model = tiny_model("qwen2", layers=3, dtype=torch.float32, **(fields if spared else {}))
    method = METHODS["matryoshka"](retain=0.5)
    windows = random_tokens(8, 32)
    statistics = rap.calibrate(model, windows, method.needs)
    small = method.apply(model, method.plan(model, statistics))
    config = replace(SETTINGS, steps=2, window=32, num_windows=8, global_batch=4)
    with torch.no_grad():  # gradients may be off around it
        trained = projections.train_projections(small, model, windows, config)
    moved = [
        any(
            not torch.equal(x, y)
            for x, y in zip(old.module.parameters(), new.module.parameters(), strict=True)
        )
        for old, new in zip(attention_layers(small), attention_layers(trained), strict=True)
    ]
    assert moved == ([True, False, False] if spared else [True] * 3)


def test_a_setting_that_is_not_read_is_refused():
    with pytest.raises(RapError, match="does not read products"):
        projections.check_read(replace(SETTINGS, products="bfloat16"))
    with pytest.raises(RapError, match="does not read refit"):
        projections.check_read(replace(SETTINGS, refit=False))
