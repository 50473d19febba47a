"""What is counted and computed of large models, beside figures that are known of them."""

from typing import Any

import pytest

from cases.scripts import load_script

GIB = 2**30


@pytest.fixture(scope="module")
def scale() -> Any:
    """The script."""
    return load_script("experiments/scale/scale.py")


@pytest.mark.parametrize(
    ("name", "parameters", "cache"),
    [
        ("Llama-3.2-1B", 1_235_814_400, 2 * 16 * 8 * 64 * 2),
        ("Qwen2.5-7B", 7_615_616_512, 2 * 28 * 4 * 128 * 2),
        ("Llama-3-8B", 8_030_261_248, 2 * 32 * 8 * 128 * 2),
        ("Qwen3-8B", 8_190_735_360, 2 * 36 * 8 * 128 * 2),
        ("Mistral-7B", 7_248_023_552, 2 * 32 * 8 * 128 * 2),
        ("Llama-3-70B", 70_553_706_496, 2 * 80 * 8 * 128 * 2),
    ],
)
def test_published_sizes_are_counted(scale, name, parameters, cache):
    model = scale.scaled(name)
    assert model.counted.total_parameters == parameters
    assert model.kv_bytes == cache


def test_half_of_the_cache_of_separate_heads_is_half_of_attention(scale):
    dense, half = scale.scaled("Mistral-7B"), scale.scaled("Mistral-7B", _variant(scale, 1))
    assert half.kv_bytes / dense.kv_bytes == 0.5
    attention = dense.counted.attention_parameters
    assert dense.counted.total_parameters - half.counted.total_parameters == attention // 2
    assert half.counted.attention_flops(8192) / dense.counted.attention_flops(8192) == 0.5


def _variant(scale: Any, merge: Any, **more: Any) -> Any:
    return scale.Variant("", 0.5, (("merge", merge), *more.items()))


def test_merged_heads_halve_keys_and_values_alone(scale):
    """A pair of heads in one of the dense width: W_q and W_o stay, and so do the products."""
    dense, pair = scale.scaled("Mistral-7B"), scale.scaled("Mistral-7B", _variant(scale, 2))
    assert (dense.heads, pair.heads) == (8, 4)
    assert pair.kv_bytes / dense.kv_bytes == 0.5
    saved = dense.counted.total_parameters - pair.counted.total_parameters
    assert saved == 32 * 2 * 4096 * 4 * 128
    assert pair.counted.mixing_flops == dense.counted.mixing_flops
    assert scale.break_even(pair, dense) == 0


def test_absorbed_maps_of_wide_heads_pay_from_a_context_on(scale):
    dense = scale.scaled("Mistral-7B")
    wide = scale.scaled("Mistral-7B", _variant(scale, 4, queries="absorbed"))
    start = scale.break_even(wide, dense)
    assert start > 0
    assert wide.decode_bytes(1, start) <= dense.decode_bytes(1, start)
    assert wide.decode_bytes(1, start - 1) > dense.decode_bytes(1, start - 1)


def test_heads_behind_a_norm_have_no_absorbed_form(scale):
    assert scale.scaled("Qwen3-8B", _variant(scale, "auto", queries="absorbed")) is None
    assert scale.scaled("Qwen3-8B", _variant(scale, "auto")).heads == 2


def test_a_table_that_is_the_output_layer_is_read(scale):
    tied = scale.scaled("Llama-3.2-1B")
    assert tied.decode_bytes(1, 0) == 2 * tied.counted.total_parameters
    assert tied.layer_parameters == 2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 2 * 2048 + 2048 / 16


def test_capacity_is_what_the_weights_leave(scale):
    model = scale.scaled("Llama-3-8B")
    left = 0.9 * 24 * GIB - 2 * 8_030_261_248
    assert model.capacity(24) == int(left // (128 * 1024))
    assert model.capacity(16) == 0


def test_a_step_reads_weights_once_and_every_cache(scale):
    model = scale.scaled("Llama-3-8B")
    one, two = model.decode_bytes(1, 100), model.decode_bytes(2, 100)
    assert two - one == 100 * model.kv_bytes
    assert one - 100 * model.kv_bytes == 2 * (8_030_261_248 - 128256 * 4096)


def test_a_prompt_costs_two_flops_a_weight_and_token(scale):
    model = scale.scaled("Llama-3-8B")
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert model.prefill_flops(1) == weights + model.counted.mixing_flops
    # Scores and their product with values: 32 layers x 32 heads x 128 channels, twice two FLOPs.
    assert model.counted.mixing_flops == 4 * 32 * 32 * 128


def test_the_fit_is_in_proportion_to_the_measured_layer(scale):
    layer = {"shape": "Llama-3-8B", "layers": 2, "seconds": 64.0, "peak": GIB}
    rows = {row["model"]: row for row in scale.fit_rows({"rows": [layer]})}
    assert rows["Llama-3-8B"]["layer_seconds"] == 32
    assert rows["Llama-3-8B"]["minutes"] == pytest.approx(32 * 32 / 60)
    # Layers of 218,112,000 and 855,654,400 parameters.
    share = rows["Llama-3-70B"]["layer_seconds"] / 32
    assert share == pytest.approx(855_654_400 / 218_112_000, rel=1e-3)
