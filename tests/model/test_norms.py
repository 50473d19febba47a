"""QK-norm: importance of normalised keys, and norm rows that stand for what was dropped."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.family_cases import CASES, HEAD_DIM, Case, masked_by_hooks, random_case_plan
from cases.models import random_tokens
from cases.plans import plan_of
from rap.calibration.run import calibrate
from rap.checkpoint.load import load
from rap.methods import Rap
from rap.methods.dense import dense_layers
from rap.model.attention import RapAttention
from rap.model.errors import RapError
from rap.model.layers import attention_layers
from rap.model.norms import normalise_dense
from rap.model.rope import AttentionShape, HeadGeometry
from rap.model.specs import QKNorm
from rap.planning.norms import row_sizes, with_denominators
from rap.planning.plan import PairPlan, Plan
from rap.planning.scores import score_layers
from rap.surgery.apply import apply

TOKENS = random_tokens(2, 11)
# One norm per head, over all heads, LayerNorm, after the rotation, fused, shared by q and k.
NAMES = ["qwen3", "qwen3_next", "olmo2", "phi:norm", "persimmon:norm", "hunyuan_v1_dense"]
NAMES += ["olmoe", "cohere:norm", "llama4_text", "nanochat", "gemma3_text"]


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _with_rows(model: Any, plan: Plan, num_rows: int) -> Plan:
    found = calibrate(model, random_tokens(4, 32), {"energy", "norms"}).layers
    layers = [
        planned and with_denominators(planned, layer.shape, statistics, num_rows)
        for planned, layer, statistics in zip(
            plan.layers, attention_layers(model), found, strict=True
        )
    ]
    return dataclasses.replace(
        plan, layers=tuple(layers), qk_norm="rows" if num_rows else "constant"
    )


def _error(small: Any, dense: Any) -> float:
    found, expected = small(TOKENS).logits, dense(TOKENS).logits
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_row_for_every_dropped_channel_is_exact(name: str):
    case = _case(name)
    model = case.model()
    plan = random_case_plan(model, case)
    dense = masked_by_hooks(model, plan, case)
    # Energies and rows are float32: their ratio is one up to its rounding.
    rows = _with_rows(model, plan, HEAD_DIM)
    # More rows than channels were dropped carry nothing.
    kept = [layer for layer in rows.layers if layer is not None and layer.norm_rows]
    assert kept
    assert all(layer.norm_rows == HEAD_DIM - layer.key_width for layer in kept)
    full = _error(apply(model, rows), dense)
    assert full < 1e-5
    few = _error(apply(model, _with_rows(model, plan, 3)), dense)
    constant = _error(apply(model, _with_rows(model, plan, 0)), dense)
    assert 3 * full < few < constant


@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "nanochat"])
@torch.no_grad()
def test_whole_keys_rotate_on_the_kernel_before_their_norm(name: str, monkeypatch):
    """It takes an index for each KV head; the reference would spread one of all."""
    triton = pytest.importorskip("rap.model.kernels.rope_pairs.triton")
    case = _case(name)
    model = case.model()
    plan = dataclasses.replace(random_case_plan(model, case), qk_norm="exact")
    small = apply(model, plan)
    expected, launched = small(TOKENS).logits, []

    def launch(module, q, k, tables, index=None):
        launched.append(index is not None)
        own = module.frequency_index if index is None else index
        given = module._pair_tables(tables), module.spec.clockwise
        return triton.rotate(q, k, *given[0], own, given[1])

    monkeypatch.setattr(RapAttention, "rotate", launch)
    torch.testing.assert_close(small(TOKENS).logits, expected, rtol=0, atol=1e-4)
    assert any(launched)


@torch.no_grad()
def test_ratios_are_all_energy_over_what_is_kept():
    """Of the projections' own outputs, head by head; heads of a group keep the same channels."""
    case = _case("qwen3")
    model = case.model()
    plan = _with_rows(model, random_case_plan(model, case), 0)
    attention, kept, seen = model.model.layers[1].self_attn, plan.layers[1], {}
    for projection in "qk":
        getattr(attention, f"{projection}_proj").register_forward_hook(
            lambda module, inputs, output, projection=projection: seen.update({projection: output})
        )
    model(random_tokens(4, 32))
    for projection, ratio in (("q", kept.query_ratio_H), ("k", kept.key_ratio_G)):
        energy = seen[projection].unflatten(-1, (-1, HEAD_DIM)).square().sum((0, 1))
        for head, own in enumerate(energy):
            group = head * len(kept.frequency_GM) // len(energy)
            channels = kept.kept_channels(plan.shapes[1])[group]
            expected = float(own.sum() / own[channels].sum())
            assert float(ratio[head]) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_rows_of_another_head_are_seen():
    case = _case("qwen3")
    model = case.model()
    plan = random_case_plan(model, case)
    dense = masked_by_hooks(model, plan, case)
    full = _with_rows(model, plan, HEAD_DIM)
    layers = [
        item and dataclasses.replace(item, query_sketch_HSD=item.query_sketch_HSD.flip(0))
        for item in full.layers
    ]
    assert _error(apply(model, dataclasses.replace(full, layers=tuple(layers))), dense) > 1e-2


def test_rows_are_projected_but_not_cached(tmp_path):
    model = _case("qwen3").model(dtype=torch.float32)
    method = Rap(retain=0.5, qk_norm="rows", norm_rows=2)
    statistics = calibrate(model, random_tokens(4, 16), method.needs_for(model))
    plan = method.plan(model, statistics)
    plan.save(tmp_path / "plan.rap")
    assert Plan.load(tmp_path / "plan.rap") == plan
    apply(model, plan).save_pretrained(tmp_path / "small")
    small = load(tmp_path / "small")
    attention = small.model.layers[1].self_attn
    assert attention.k_proj.out_features == 2 * (attention.key_width + 2)
    assert attention.q_proj.out_features == 6 * (attention.key_width + 2)
    with torch.no_grad():
        cache = small(TOKENS, use_cache=True).past_key_values
        assert torch.equal(small(TOKENS).logits, apply(model, plan)(TOKENS).logits)
    assert cache.layers[1].keys.shape[-1] == attention.key_width


def _whole(model: Any) -> Plan:
    """A plan that keeps everything, in mode `constant`."""
    layers = []
    for layer in attention_layers(model):
        shape = layer.shape
        kept = shape and (shape.geometry.num_pairs, shape.head_dim, shape.geometry.num_free)
        layers.append(
            kept and PairPlan.of_indices(*([list(range(n))] * shape.num_kv_heads for n in kept))
        )
    return dataclasses.replace(plan_of(model, layers), qk_norm="constant")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3", "olmo2"])
@torch.no_grad()
def test_a_cut_norm_rounds_once_as_the_dense_one(name: str, dtype: torch.dtype):
    """1 + w is one in float32 there, of a stored w. Signs have a mean square that is exactly 1."""
    model = _case(name).model(dtype=dtype)
    small = apply(model, _whole(model))
    dense, cut = attention_layers(model)[-1], attention_layers(small)[-1]
    signs = torch.randint(2, (1, 6, 64, HEAD_DIM), generator=torch.Generator().manual_seed(0))
    x_BHTD = (2 * signs - 1).to(dtype)
    expected = normalise_dense(dense.norm, getattr(dense.module, dense.norm.names[0]), x_BHTD)
    found = getattr(cut.module, dense.norm.names[0])(x_BHTD)
    # Families without an offset round before the weight as well, the cut norm only at the end.
    exact = dtype == torch.float32 or dense.norm.weight_offset
    bound = 0.0 if exact else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=bound, atol=0)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3"])
@torch.no_grad()
def test_checkpoints_of_the_first_format_load_as_before(tmp_path: Path, name: str):
    """They store 1 + w where the dense model stores w."""
    model = _case(name).model(dtype=torch.float32)
    small = apply(model, _with_rows(model, random_case_plan(model, _case(name)), 0))
    small.config.rap["version"] = 1
    stored = small.state_dict()
    for layer in attention_layers(small)[1:]:
        for name in (f"{layer.path}.{norm}.weight" for norm in layer.norm.names):
            stored[name] = stored[name] + layer.norm.weight_offset
    small.save_pretrained(tmp_path, state_dict=stored)
    assert torch.equal(load(tmp_path)(TOKENS).logits, small(TOKENS).logits)


def test_needs_follow_the_mode():
    normed, plain = (_case(name).model(dtype=torch.float32) for name in ("qwen3", "llama"))
    assert "norms" in Rap(qk_norm="rows").needs_for(normed)
    assert "norms" not in Rap(qk_norm="rows").needs_for(plain)
    assert "norms" not in Rap(qk_norm="constant").needs_for(normed)
    with pytest.raises(RapError, match="norm_rows cannot be 0: it should be greater"):
        Rap(qk_norm="rows", norm_rows=0)


def test_statistics_without_what_rows_are_chosen_by_are_refused():
    model = _case("qwen3").model(dtype=torch.float32)
    statistics = calibrate(model, TOKENS, Rap(qk_norm="constant").needs_for(model))
    Rap(qk_norm="constant").plan(model, statistics)
    with pytest.raises(RapError, match=r"rap needs the statistics norms.*calibrate again with"):
        Rap(qk_norm="rows").plan(model, statistics)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "olmo2", "phi:norm", "stablelm:norm"])
@torch.no_grad()
def test_importance_is_that_of_normalised_keys(name: str):
    """Energies against the outputs of the family's own norms, their biases taken away."""
    case = _case(name)
    model = case.model(dtype=torch.float32)
    windows = random_tokens(3, 16)
    seen: dict[str, Tensor] = {}
    attention = model.model.layers[1].self_attn
    for projection, norm in zip("qk", case.norms, strict=True):
        for part, bias in getattr(attention, norm).named_parameters():
            if part.endswith("bias"):
                bias.zero_()
        getattr(attention, norm).register_forward_hook(
            lambda module, inputs, output, projection=projection: seen.__setitem__(
                projection, output
            )
        )
    found = calibrate(model, windows, {"energy"}).layers[1]
    model(windows)
    order = attention_layers(model)[1].shape.geometry.canonical_order()
    for projection, states in seen.items():
        if case.normed == "BHTD":
            states = states.transpose(1, 2)
        expected = states.reshape(3 * 16, -1, HEAD_DIM).square().mean(0)[:, order]
        torch.testing.assert_close(found[f"energy_{projection}"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "phi:norm"])
@torch.no_grad()
def test_magnitude_is_that_of_normalised_keys(name: str):
    """Whatever a key's row is multiplied by before the norm, its weight after it decides."""
    model = _case(name).model(dtype=torch.float32)
    attention = model.model.layers[1].self_attn
    norm = getattr(attention, _case(name).norms[1])

    def score() -> Tensor:
        dense = dense_layers(model)
        return score_layers("magnitude", [None] * 3, dense.weights, dense.shapes)[1].pairs_GP

    before = score()
    attention.k_proj.weight.mul_(3.0)
    torch.testing.assert_close(score(), before)
    # Pair 2: half of the 16 channels rotate in phi, so that it is (2, 6) there.
    second = 6 if name == "phi:norm" else 10
    norm.weight.view(-1, HEAD_DIM)[:, [2, second]] = 0
    expected = before.clone()
    expected[:, 2] = 0
    torch.testing.assert_close(score(), expected)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("over", ["head", "all"])
def test_sizes_of_rows_are_root_mean_squares_for_white_inputs(over: str, centred: bool):
    """Of the keys that unit vectors give, each head's mean taken away, and of their norm."""
    shape = AttentionShape(4, 2, 12, HeadGeometry(6, 6))
    generator = torch.Generator().manual_seed(0)
    w_k, weight = (torch.randn(12, size, generator=generator) for size in (12, 1))
    weight = weight.view(2, 6)
    found = row_sizes(w_k, shape, QKNorm(over=over, centred=centred), weight)
    keys = [w_k[6 * head : 6 * head + 6] for head in range(2)]
    keys = [rows - rows.mean(0) if centred else rows for rows in keys]
    means = [float(rows.square().sum()) / 6 for rows in keys]
    for head, rows in enumerate(keys):
        mean = sum(means) / 2 if over == "all" else means[head]
        for channel in range(6):
            expected = abs(float(weight[head, channel])) * float(rows[channel].norm()) / mean**0.5
            assert float(found[head, channel]) == pytest.approx(expected, rel=1e-5)


def test_a_head_without_energy_keeps_its_scale():
    model = _case("qwen3").model()
    (shape, *_) = (layer.shape for layer in attention_layers(model) if layer.shape is not None)
    found = dict(
        next(one for one in calibrate(model, random_tokens(2, 16), {"energy"}).layers if one)
    )
    found["raw_energy_k"] = found["raw_energy_k"].clone()
    found["raw_energy_k"][0] = 0.0
    layer = next(one for one in random_case_plan(model, _case("qwen3")).layers if one is not None)
    ratio_G = with_denominators(layer, shape, found).key_ratio_G
    assert ratio_G[0] == 1
    assert ratio_G[1:].gt(1).all()
