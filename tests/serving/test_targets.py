"""Targets: widths an engine serves without padding, and what cannot be combined."""

import pytest

from cases.command import error_violations, run
from cases.models import tiny_model
from rap.cli.groups import PruningOptions
from rap.model.errors import RapError
from rap.serving.targets import MAX_WIDTHS, TARGETS, target_settings

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
# Head sizes vLLM 0.32 declares for CPUs.
CPU_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_few_widths_where_layers_differ(target: str, head_dim: int) -> None:
    settings = target_settings(target, head_dim, "error")
    align = settings["align"]
    # A plain checkpoint has one width for all layers, whatever there is to choose.
    assert head_dim // align <= MAX_WIDTHS or settings.get("merge") == "auto"
    assert align % 8 == 0


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("budget", ["uniform", "error"])
def test_cpu_widths_are_declared(head_dim: int, budget: str) -> None:
    align = target_settings("cpu", head_dim, budget)["align"]
    assert set(range(align, head_dim, align)) <= CPU_SIZES


@pytest.mark.parametrize("target", ["llamacpp", "mlx", "stock"])
@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("seed_oss", {"rope_parameters": PARTIAL}, "only 0.5 of every head rotates"),
        ("olmo", {"clip_qkv": 1.0}, "olmo with clip_qkv has no plain form"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
            "Qwen2 with a sliding window has no plain form",
        ),
        ("qwen2_moe", {"num_experts": 4}, "(engines derive its head size from the hidden size)"),
        (
            "gemma3_text",
            {},
            "gemma3_text has no plain form (QK-norm divides by the norm of whole dense heads, "
            "layers rotate at different bases)",
        ),
        ("llama", {"rope_parameters": DYNAMIC}, "'dynamic' has frequencies that depend"),
        (
            "mistral",
            {"sliding_window": 24},
            "a sliding window of 24 tokens has no form in llama.cpp",
        ),
    ],
)
def test_a_model_without_such_a_form_is_refused_before_it_is_read(
    tmp_path, target: str, family: str, fields: dict, said: str
) -> None:
    tiny_model(family, head_dim=64, **fields).save_pretrained(tmp_path / "dense")
    given = ("--target", target, "--retain", "0.5", "--windows", "2", "--window", "32")
    result = run("compress", tmp_path / "dense", "-o", tmp_path / "out", *given, "--dry-run")
    if family == "mistral" and target != "llamacpp":
        assert result.code == 0, result.err
        assert said not in result.err
        return
    assert error_violations(result) == []
    assert said in result.err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mlx", "mlx-lm reads a list of frequencies of llama and mistral alone, not of gemma"),
        ("llamacpp", "gemma has no GGUF form"),
        ("stock", ""),
    ],
)
def test_a_plain_form_that_an_engine_does_not_read_is_refused(tmp_path, target, said) -> None:
    tiny_model("gemma", head_dim=64).save_pretrained(tmp_path / "dense")
    given = ("--target", target, "--retain", "0.5", "--windows", "2", "--window", "32")
    result = run("compress", tmp_path / "dense", "-o", tmp_path / "out", *given, "--dry-run")
    assert said in result.err
    assert (error_violations(result) == []) == bool(said)


@pytest.mark.parametrize(
    ("target", "budget", "align"),
    [("flash", None, 8), ("vllm", None, 16), ("cpu", None, 32), ("flash", "error", 64)],
)
def test_widths_of_merged_heads_are_those_that_their_budget_needs(
    tmp_path, target: str, budget: str | None, align: int
) -> None:
    # Merged by default, layers have one width, and a cached head up to 256 channels of its two.
    tiny_model("llama", heads=4, kv_heads=2, head_dim=128).save_pretrained(tmp_path)
    options = PruningOptions(retain=0.7, budget=budget, target=target)
    assert options.build(str(tmp_path), seed=0).align == align


@pytest.mark.parametrize("target", ["llamacpp", "mlx", "plain"])
def test_one_head_of_a_plain_checkpoint_may_have_any_step(tmp_path, target: str) -> None:
    # Without a target its layers would have several widths, and so steps of 64.
    tiny_model("llama", heads=4, kv_heads=1, head_dim=256).save_pretrained(tmp_path)
    assert PruningOptions(retain=0.7, target=target).build(str(tmp_path), seed=0).align == 32


def test_stock_sets_the_profile() -> None:
    assert target_settings("stock", 128, "uniform") == {"align": 16, "profile": "stock"}


@pytest.mark.parametrize("target", ["llamacpp", "mlx"])
@pytest.mark.parametrize(("head_dim", "widths"), [(64, [32]), (128, [32, 64, 96])])
def test_plain_engines_get_multiples_of_32(target: str, head_dim: int, widths: list[int]) -> None:
    settings = target_settings(target, head_dim, "uniform")
    assert settings == {"align": 32, "profile": "stock"}
    assert list(range(32, head_dim, settings["align"])) == widths


def test_a_retain_that_cuts_nothing_is_refused(tmp_path) -> None:
    result = run("compress", "bundled", "-o", tmp_path, "--target", "llamacpp", "--retain", "0.8")
    assert error_violations(result) == []
    assert "rounds to 64, where nothing can be pruned" in result.err


def test_heads_without_any_width_are_not_told_to_try_another(tmp_path) -> None:
    dense = tmp_path / "dense"
    tiny_model("llama", heads=4, kv_heads=2, head_dim=16).save_pretrained(dense)
    call = ("compress", dense, "-o", tmp_path / "out", "--target", "plain", "--retain", "0.5")
    result = run(*call)
    assert error_violations(result) == []
    assert "multiples of 32 below 16: there is none, so remove --target" in result.err


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(RapError, match="unknown target"):
        target_settings("tpu", 128, "uniform")
    with pytest.raises(RapError, match="no smaller width"):
        target_settings("vllm", 16, "uniform")
