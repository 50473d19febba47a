"""The plan as data: exact round trip, and a named error for everything that cannot be cut."""

import dataclasses
import errno
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cases.models import tiny_model
from cases.plans import plan_of, random_plan
from rap.checkpoint import tensor_file
from rap.model.errors import CheckpointError, PlanError
from rap.model.rope import AttentionShape, HeadGeometry
from rap.planning.plan import PairPlan, Plan
from rap.surgery.apply import apply

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, hidden_size=8, geometry=HeadGeometry(8, 6))
PAIRS = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
FREE = torch.tensor([[1], [0]], dtype=torch.int32)
CHANNELS = torch.tensor([[0, 3, 7], [1, 2, 5]], dtype=torch.int32)
LAYER = PairPlan(PAIRS, FREE, CHANNELS)
MIX = torch.randn(2, 2, 3, 2, generator=torch.Generator().manual_seed(0))
DOWN, UP = torch.randn(2, 3, 8), torch.randn(2, 8, 3)
MIXED = PairPlan(PAIRS, FREE, None, MIX, MIX, DOWN, UP)


def _plan(*layers: PairPlan | None) -> Plan:
    return Plan(
        layers=layers,
        shapes=(SHAPE,) * len(layers),
        model_type="llama",
        retain=0.7,
        dense_fingerprint="a" * 64,
        method={"name": "rap", "align": 8},
    )


def test_widths_of_a_layer():
    assert (LAYER.num_pairs, LAYER.num_free, LAYER.key_width, LAYER.value_width) == (2, 1, 5, 3)
    assert MIXED.value_width == 3
    assert PairPlan.of_indices(PAIRS.tolist(), CHANNELS.tolist(), FREE.tolist()) == LAYER


def test_kept_channels_are_those_of_the_dense_head():
    assert LAYER.kept_channels(SHAPE).tolist() == [[0, 2, 3, 5, 7], [1, 2, 4, 5, 6]]
    interleaved = dataclasses.replace(SHAPE, geometry=HeadGeometry(8, 6, "interleaved"))
    assert LAYER.kept_channels(interleaved).tolist() == [[0, 4, 1, 5, 7], [2, 4, 3, 5, 6]]


def test_kept_fraction_counts_channels_of_every_layer_with_attention():
    plan = dataclasses.replace(
        _plan(LAYER, None, None), shapes=(SHAPE, SHAPE, None), layers=(LAYER, None, None)
    )
    assert plan.kept_fraction == (2 * (5 + 3) + 2 * 16) / (2 * 2 * 16)


@st.composite
def plans(draw):
    """A plan of one to three layers, plain, mixed or dense."""
    kinds = draw(st.lists(st.sampled_from([LAYER, MIXED, None]), min_size=1, max_size=3))
    retain = draw(st.floats(0, 1, exclude_min=True))
    method = draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)))
    mode = draw(st.sampled_from(["constant", "exact", "rows"]))
    return dataclasses.replace(_plan(*kinds), retain=retain, method=method, qk_norm=mode)


@settings(max_examples=30, derandomize=True)
@given(plan=plans())
def test_round_trip_is_exact(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.rap"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    for mine, theirs in zip(plan.layers, again.layers, strict=True):
        if mine is not None:
            kinds = {name: tensor.dtype for name, tensor in mine.tensors().items()}
            assert kinds == {name: tensor.dtype for name, tensor in theirs.tensors().items()}


def test_a_plan_appears_whole_and_with_its_folder(tmp_path, monkeypatch):
    path = tmp_path / "new" / "folder" / "plan.rap"
    _plan(LAYER).save(path)

    def full(tensors, partial, metadata):
        Path(partial).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(CheckpointError, match="no space left"):
        _plan(LAYER, MIXED).save(path)
    assert Plan.load(path) == _plan(LAYER)
    assert [file.name for file in path.parent.iterdir()] == ["plan.rap"]


def test_equality_sees_every_field():
    changed = [
        _plan(LAYER, MIXED),
        _plan(dataclasses.replace(LAYER, channels_GC=CHANNELS + torch.tensor([[0], [1]]))),
        _plan(None),
        dataclasses.replace(_plan(LAYER), retain=0.6),
        dataclasses.replace(_plan(LAYER), dense_fingerprint="b" * 64),
        dataclasses.replace(_plan(LAYER), method={}),
        dataclasses.replace(_plan(LAYER), qk_norm="exact"),
        _plan(dataclasses.replace(LAYER, query_mix_GMP2=MIX, key_mix_GMP2=MIX)),
    ]
    assert _plan(LAYER) == _plan(LAYER)
    assert all(other != _plan(LAYER) != other for other in changed)
    assert _plan(LAYER) != "a plan"
    assert LAYER != "a layer"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frequency_GM": PAIRS[:1]}, "layer 1: frequency_GM has 1 KV heads, the model has 2"),
        ({"channels_GC": CHANNELS.repeat(2, 1)}, "channels_GC has 4 KV heads, the model has 2"),
        ({"frequency_GM": PAIRS + 1}, r"layer 1: pair 3 is outside 0\.\.2"),
        ({"frequency_GM": PAIRS - 1}, r"layer 1: pair -1 is outside 0\.\.2"),
        ({"channels_GC": CHANNELS + 1}, r"layer 1: value channel 8 is outside 0\.\.7"),
        ({"free_GN": FREE + 1}, r"layer 1: free channel 2 is outside 0\.\.1"),
        (
            {"frequency_GM": torch.tensor([[0, 2], [1, 1]])},
            "layer 1, KV head 1: pair 1 is kept twice",
        ),
        ({"channels_GC": torch.tensor([[0, 0], [1, 2]])}, "KV head 0: value channel 0 is kept twi"),
        (
            {"frequency_GM": torch.tensor([[2, 0], [1, 2]])},
            "layer 1: pair indices must ascend within a head",
        ),
        ({"channels_GC": torch.tensor([[3, 0], [1, 2]])}, "value channel indices must ascend"),
        ({"frequency_GM": PAIRS[:, :0], "free_GN": FREE[:, :0]}, "at least one channel of K"),
        ({"channels_GC": CHANNELS[:, :0]}, "at least one channel of K and of V"),
        ({"channels_GC": None}, "values need either channels or a subspace"),
        ({"channels_GC": None, "value_down_GCD": DOWN}, "values need either channels or a subspa"),
        ({"value_down_GCD": DOWN}, "values need either channels or a subspace"),
        ({"value_down_GCD": DOWN, "value_up_GDC": UP}, "either channels or a subspace"),
        (
            {"channels_GC": None, "value_down_GCD": DOWN, "value_up_GDC": UP[:, :, :2]},
            "value_up_GDC folds 2 channels back, value_down_GCD keeps 3",
        ),
        (
            {"channels_GC": None, "value_down_GCD": DOWN[..., :5], "value_up_GDC": UP},
            r"value_down_GCD is \[2, 3, 5\], expected \[2, -1, 8\]",
        ),
        ({"key_mix_GMP2": MIX}, "key and query mixing must come together"),
        ({"query_mix_GMP2": MIX}, "key and query mixing must come together"),
        (
            {"key_mix_GMP2": MIX, "query_mix_GMP2": MIX[:, :1]},
            r"query_mix_GMP2 is \[2, 1, 3, 2\], expected \[2, 2, 3, 2\]",
        ),
        (
            {
                "key_mix_GMP2": MIX,
                "query_mix_GMP2": MIX,
                "frequency_GM": torch.tensor([[2, 0], [1, 1]]),
            },
            "pair indices must ascend",
        ),
        ({"frequency_GM": PAIRS.float()}, "pair indices must be integers"),
        ({"query_ratio_H": torch.ones(2)}, r"query_ratio_H is \[2\], expected \[4\]"),
        ({"key_ratio_G": torch.ones(4)}, "key_ratio_G has 4 KV heads, the model has 2"),
        ({"key_ratio_G": torch.ones(2, 1)}, r"key_ratio_G is \[2, 1\], expected \[2\]"),
        ({"frequency_GM": PAIRS[0]}, r"frequency_GM is \[2\], expected \[2, -1\]"),
    ],
)
def test_malformed_layer_is_refused_by_name(change, message):
    with pytest.raises(PlanError, match=message):
        _plan(LAYER, dataclasses.replace(LAYER, **change))


def test_mixed_slots_may_repeat_a_frequency():
    repeated = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    assert _plan(dataclasses.replace(MIXED, frequency_GM=repeated)).layers[0].num_pairs == 2


@pytest.mark.parametrize(
    ("pairs", "channels", "message"),
    [
        ([[0, 1], [2]], [[0], [1]], r"different numbers of pairs: \[1, 2\]"),
        ([[0], [2]], [[0], [1, 2, 3]], r"different numbers of value channels: \[1, 3\]"),
    ],
)
def test_ragged_heads_are_refused(pairs, channels, message):
    with pytest.raises(PlanError, match=message):
        PairPlan.of_indices(pairs, channels)


def test_layers_and_shapes_must_agree():
    with pytest.raises(PlanError, match="1 layers planned for 2 shapes"):
        Plan((LAYER,), (SHAPE, SHAPE), "llama", 0.5)
    with pytest.raises(PlanError, match="layer 0 has no attention to prune"):
        Plan((LAYER,), (None,), "llama", 0.5)
    with pytest.raises(PlanError, match="unknown QK-norm mode 'ratio'"):
        Plan((LAYER,), (SHAPE,), "llama", 0.5, qk_norm="ratio")


def _write(path, about: str, **metadata: str) -> None:
    save_file({"x": torch.zeros(1)}, path, metadata={"plan": about} | metadata)


def test_files_that_are_no_plan_are_refused(tmp_path):
    path = tmp_path / "plan.rap"
    with pytest.raises(PlanError, match=r"cannot read a plan from .*plan\.rap"):
        Plan.load(path)
    path.write_bytes(b"no safetensors file")
    with pytest.raises(PlanError, match="cannot read a plan"):
        Plan.load(path)
    _write(path, "{}")
    with pytest.raises(PlanError, match="does not hold a plan: write one with `rap plan`"):
        Plan.load(path)
    for about in ("no json", "{}", "[]", '{"version": 1, "num_layers": 1}'):
        _write(path, about, format="rap-plan")
        with pytest.raises(PlanError, match="is damaged"):
            Plan.load(path)
    _write(path, json.dumps({"version": 3}), format="rap-plan")
    with pytest.raises(PlanError, match="has plan version 3, this release reads up to 2: upgrade"):
        Plan.load(path)


def test_truncated_plan_is_refused(tmp_path):
    path = tmp_path / "plan.rap"
    _plan(LAYER).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PlanError, match="cannot read a plan"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mistral"}, "the plan is for a llama model, this one is mistral"),
        ({"layers": 3}, "the plan has 2 layers, the model 3"),
        ({"kv_heads": 1}, "layer 0 differs: planned for AttentionShape"),
        ({"head_dim": 8}, "layer 0 differs: planned for AttentionShape"),
        ({"hidden": 64}, "layer 0 differs: planned for AttentionShape"),
        ({"seed": 1}, "the plan was made from other weights"),
    ],
)
def test_plan_for_another_model_is_refused(fields, message):
    model = tiny_model()
    plan = random_plan(model, [(3, 5), (2, 7)])
    other = tiny_model(**fields)
    with pytest.raises(PlanError, match=rf"{message}.*: make a new plan for this model$"):
        apply(other, plan)


def test_plan_for_weights_that_changed_in_one_element_is_refused():
    model = tiny_model()
    plan = random_plan(model, [(3, 5), (2, 7)])
    with torch.no_grad():
        model.model.norm.weight[5] += 1
    with pytest.raises(PlanError, match="made from other weights"):
        apply(model, plan)


def test_plan_without_a_fingerprint_fits_any_weights_of_its_shapes():
    plan = dataclasses.replace(random_plan(tiny_model(), [(3, 5), None]), dense_fingerprint="")
    assert apply(tiny_model(seed=1), plan).config.rap["layers"][1] is None


def test_plan_of_dense_layers_only_keeps_everything():
    assert plan_of(tiny_model(), [None, None]).kept_fraction == 1.0
