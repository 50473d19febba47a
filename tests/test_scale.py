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
        ("Llama-3-8B", 8_030_261_248, 2 * 32 * 8 * 128 * 2),
        ("Qwen3-8B", 8_190_735_360, 2 * 36 * 8 * 128 * 2),
        ("Mistral-7B", 7_248_023_552, 2 * 32 * 8 * 128 * 2),
        ("Llama-3-70B", 70_553_706_496, 2 * 80 * 8 * 128 * 2),
    ],
)
def test_published_sizes_are_counted(scale, name, parameters, cache):
    model = scale.scaled(name, 1.0)
    assert model.counted.total_parameters == parameters
    assert model.kv_bytes == cache


def test_half_of_the_cache_is_half_of_attention(scale):
    dense, half = (scale.scaled("Mistral-7B", retain) for retain in (1.0, 0.5))
    assert half.kv_bytes / dense.kv_bytes == 0.5
    attention = dense.counted.attention_parameters
    assert dense.counted.total_parameters - half.counted.total_parameters == attention // 2
    assert half.counted.attention_flops(8192) / dense.counted.attention_flops(8192) == 0.5


def test_capacity_is_what_the_weights_leave(scale):
    model = scale.scaled("Llama-3-8B", 1.0)
    left = 0.9 * 24 * GIB - 2 * 8_030_261_248
    assert model.capacity(24) == int(left // (128 * 1024))
    assert model.capacity(16) == 0


def test_a_step_reads_weights_once_and_every_cache(scale):
    model = scale.scaled("Llama-3-8B", 1.0)
    one, two = model.decode_bytes(1, 100), model.decode_bytes(2, 100)
    assert two - one == 100 * model.kv_bytes
    assert one - 100 * model.kv_bytes == 2 * (8_030_261_248 - 128256 * 4096)


def test_a_prompt_costs_two_flops_a_weight_and_token(scale):
    model = scale.scaled("Llama-3-8B", 1.0)
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert model.prefill_flops(1) == weights + model.counted.mixing_flops
    # Scores and their product with values: 32 layers x 32 heads x 128 channels, twice two FLOPs.
    assert model.counted.mixing_flops == 4 * 32 * 32 * 128


def test_the_fit_is_in_proportion_to_the_measured_layer(scale):
    layer = {"shape": "Llama-3-8B", "rest": 8.0, "step": 2.0, "window": 1.0, "peak": GIB}
    measured = {"rows": [layer], "settings": {"steps": 10, "num_windows": 4}}
    rows = {row["model"]: row for row in scale.fit_rows(measured)}
    assert rows["Llama-3-8B"]["layer_seconds"] == 32
    assert rows["Llama-3-8B"]["core_hours"] == pytest.approx(32 * 32 / 3600)
    # Layers of 218,112,000 and 855,654,400 parameters.
    share = rows["Llama-3-70B"]["layer_seconds"] / 32
    assert share == pytest.approx(855_654_400 / 218_112_000, rel=1e-3)
