"""What engines hold of a plan's widths, told when it is made."""

import pytest
import torch

from cases.command import run
from cases.merged_plans import merged_layer
from cases.models import tiny_model
from cases.plans import plan_of, random_plan
from rap.serving.capacity import held_by_engines
from rap.surgery.apply import apply


def held(*widths, head_dim=64, family="llama", **fields):
    model = tiny_model(family, head_dim=head_dim, hidden=64, layers=len(widths), **fields)
    found = held_by_engines(apply(model, random_plan(model, widths)).config)
    return {row.backend: row for row in found}


def test_padding_of_a_cpu_is_told_with_the_target_without_it():
    """The widths that `--target vllm` chose once: 48 and 16 of 64, for a retain of 0.7."""
    rows = held((24, 48), (24, 48), (24, 48), None, (8, 16))
    kept = (3 * 48 + 64 + 16) / (5 * 64)
    cpu = rows["vLLM on a CPU"]
    assert cpu.ratio == pytest.approx(5 * 64 / (3 * 64 + 64 + 32))
    assert (cpu.widths, cpu.advice) == ("16 as 32, 48 as 64", "--target cpu")
    flash = rows["vLLM, FlashAttention"]
    assert flash.ratio == pytest.approx(1 / kept)
    assert (flash.widths, flash.advice) == ("unpadded", "")
    assert rows["vLLM, FlashInfer"].ratio == 1.0
    assert rows["vLLM, FlashInfer"].advice == ""  # heads of 64 have no other width for it
    assert (rows["llama.cpp, MLX"].ratio, rows["llama.cpp, MLX"].advice) == (
        None,
        "--target llamacpp",
    )


@pytest.mark.parametrize(("pairs", "advice"), [(16, ""), (24, "--target llamacpp")])
def test_one_width_runs_in_plain_engines(pairs, advice):
    row = held((pairs, 2 * pairs), (pairs, 2 * pairs))["llama.cpp, MLX"]
    assert row.ratio == pytest.approx(32 / pairs)
    assert row.advice == advice


def test_unequal_keys_and_values_are_held_at_the_wider():
    row = held((8, 32))["vLLM on a CPU"]
    assert row.ratio == 2.0
    assert row.advice == "--target cpu"


def test_advice_that_would_change_nothing_is_not_given():
    """Heads no wider than a step leave no width to choose; multiples of it are what was asked."""
    rows = held((16, 32), (24, 48))
    assert (rows["vLLM, FlashInfer"].ratio, rows["vLLM, FlashInfer"].advice) == (1.0, "")
    assert rows["vLLM on a CPU"].advice == "--target cpu"
    wide = held((40, 80), (64, 128), (12, 24), head_dim=128)
    assert wide["vLLM, FlashInfer"].advice == "--align 64"
    assert wide["vLLM, Triton"].advice == ("--align 32" if wide["vLLM, Triton"].widths else "")


def test_layers_of_both_kinds_have_pages_of_one_size():
    """Of heads of 64, a layer with 32 has pages twice as long, and one with 48 as long as with 64.

    Layers with a window hold what fits into it, whatever the context is: they are not counted.
    """
    kinds = {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}
    rows = held((16, 32), (24, 48), None, family="gemma3_text", **kinds)
    flash = rows["vLLM, FlashAttention"]
    assert flash.ratio == pytest.approx(2 * 64 / (32 + 64))
    assert flash.advice == "--layers all"
    halves = held((16, 32), (16, 32), None, family="gemma3_text", **kinds)
    assert halves["vLLM, FlashAttention"].ratio == 2
    assert halves["vLLM, FlashAttention"].advice == ""
    uneven = held((16, 32), (24, 48), (24, 48), family="gemma3_text", **kinds)
    assert uneven["vLLM, FlashAttention"].ratio == pytest.approx(2 * 64 / (48 + 48))
    assert uneven["vLLM, FlashAttention"].advice == "--budget uniform"
    alike = held((24, 48), (24, 48), (24, 48), family="gemma3_text", **kinds)
    assert alike["vLLM, FlashAttention"].ratio == pytest.approx(4 / 3)
    assert alike["vLLM, FlashAttention"].advice == ""
    kinds = {"layer_types": ["sliding_attention"] * 3}
    one_kind = held((16, 32), (24, 48), None, family="gemma3_text", **kinds)
    assert one_kind["vLLM, FlashAttention"].ratio == pytest.approx(3 * 64 / (32 + 48 + 64))


def test_layers_that_read_the_cache_of_another_hold_nothing():
    fields = {"layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    fields |= {"vocab_size_per_layer_input": 128, "global_head_dim": 128}
    types = ["sliding_attention", "full_attention"] * 2
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in types}
    fields |= {"layer_types": types, "rope_parameters": rope}
    model = tiny_model("gemma4_text", head_dim=64, **fields)
    config = apply(model, random_plan(model, [(16, 32), (32, 64), None, None])).config
    row = next(row for row in held_by_engines(config) if row.backend == "vLLM on a CPU")
    assert (row.ratio, row.widths) == ((64 + 128) / (32 + 64), "unpadded")


def held_merged(*layers, kv_heads=3):
    """Of (KV heads merged into one, width), None for a dense layer; heads of 64."""
    model = tiny_model(
        "llama", head_dim=64, hidden=96, heads=6, kv_heads=kv_heads, layers=len(layers)
    )
    generator = torch.Generator().manual_seed(0)
    plan = [
        layer
        and merged_layer(
            kv_heads, 64, 64, generator, merge=layer[0], slots=layer[1] // 2, width=layer[1]
        )
        for layer in layers
    ]
    found = held_by_engines(apply(model, plan_of(model, plan)).config)
    return {row.backend: row for row in found}


def test_merged_heads_are_counted_as_cached():
    """One head of 96 for three of 64 holds twice the tokens; where it is padded, 1.5 times."""
    rows = held_merged((3, 96), (3, 96))
    cpu, flash = rows["vLLM on a CPU"], rows["vLLM, FlashAttention"]
    assert (cpu.ratio, cpu.widths, cpu.advice) == (2.0, "unpadded", "")
    assert flash.ratio == 2.0
    infer = rows["vLLM, FlashInfer"]
    # Of a merged head a multiple of 64 may be kept, though the dense ones have no more than 64.
    assert (infer.ratio, infer.widths, infer.advice) == (1.5, "96 as 128", "--align 64")
    plain = rows["llama.cpp, MLX"]
    assert (plain.ratio, plain.advice) == (2.0, "")


def test_merged_heads_of_several_kinds_name_the_target_that_plain_engines_need():
    rows = held_merged((3, 96), None, (1, 32))
    assert rows["vLLM on a CPU"].ratio == pytest.approx(3 * 192 / (96 + 192 + 96))
    plain = rows["llama.cpp, MLX"]
    assert (plain.ratio, plain.advice) == (None, "--target plain")
    slow = held_merged((2, 80), (2, 80), kv_heads=2)["llama.cpp, MLX"]
    assert (slow.ratio, slow.advice) == (1.6, "--target plain")
    too_wide = held_merged((3, 192), (3, 192))["vLLM, FlashAttention"]
    assert too_wide.ratio == 1.0


def test_families_without_an_engine_have_no_rows():
    assert held((16, 32), family="llama4_text") == {}
    for family in ("qwen3", "arcee"):  # one without a plain form, one whose form is of its own
        assert "llama.cpp, MLX" not in held((16, 32), family=family)


def test_compress_prints_what_engines_hold(tmp_path):
    words = ("--retain", "0.75", "--windows", "1", "--window", "64", "--metric", "output")
    words += ("--method", "rap:merge=1", "--budget", "uniform", "--evaluate", "none")
    result = run("compress", "bundled", "-o", tmp_path / "out", *words, "--align", "16")
    assert result.code == 0, result.err
    row = next(line for line in result.out.splitlines() if "vLLM on a CPU" in line)
    assert "48 as 64" in row
    assert "1.000x" in row
    assert "--target cpu" in row
