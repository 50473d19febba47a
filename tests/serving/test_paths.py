"""Which way into vLLM a pruned checkpoint takes, and the sentence where there is none."""

import json

import pytest
import torch

from cases.command import error_violations, run
from cases.family_cases import CASES, random_case_plan
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.checkpoint.load import load
from rap.model.errors import CheckpointError, RapError, UnsupportedModelError
from rap.model.families import FAMILIES, WRAPPERS
from rap.serving.paths import NATIVE, REFUSED, family_path, serving_path
from rap.serving.serve import Server, routed
from rap.surgery.apply import apply

BY_NAME = {case.name: case for case in CASES}


def config_of(name: str):
    case = BY_NAME[name]
    model = case.model()
    return apply(model, random_case_plan(model, case)).config


def test_every_family_has_one_way_or_a_reason():
    assert {*NATIVE, *REFUSED} <= {*FAMILIES, *WRAPPERS}
    assert not set(NATIVE) & set(REFUSED)
    assert [name for name in FAMILIES if (family_path(name) is None) != (name in REFUSED)] == []
    assert all(family_path(name) == "native" for name in NATIVE)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "native"),
        ("mixtral", "transformers"),
        ("glm4", "transformers"),
        ("gemma3n_text", "transformers"),
        ("gemma4_text", "transformers"),
    ],
)
def test_a_checkpoint_takes_the_way_of_its_family(name, path):
    assert serving_path(config_of(name)) == path


@pytest.mark.parametrize("name", ["lfm2", "llama4_text"])
def test_a_family_without_a_way_is_refused_with_the_reason(name):
    with pytest.raises(UnsupportedModelError, match="vLLM does not serve pruned") as refused:
        serving_path(config_of(name))
    assert REFUSED[name] in str(refused.value)


def test_channels_that_do_not_rotate_are_refused_by_native_classes_alone():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_model("llama", rope_parameters=rope)
    config = apply(model, random_plan(model, [(3, 10), None])).config
    config.rap["layers"][0] |= {"pairs": 3, "free": 2}
    with pytest.raises(UnsupportedModelError, match="2 key channels that do not rotate"):
        serving_path(config)
    config.rap["layers"][0]["values"] = 17
    with pytest.raises(CheckpointError, match="8 key and 17 value channels"):
        serving_path(config)


def test_frequencies_by_length_take_the_general_way(tmp_path, monkeypatch):
    """vLLM's longrope has two tables, which native classes do not index; engines must be told."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.5] * 8, "long_factor": [1.5] * 8, "factor": 1.0}
    model = tiny_model("llama", rope_parameters=rope)
    model(random_tokens(1, 8))  # which makes two names of one tensor
    small = apply(model, random_plan(model, [(4, 8), (4, 8)]))
    assert serving_path(small.config) == "transformers"
    ids = random_tokens(2, 40)
    small.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(ids).logits, small(ids).logits)
    monkeypatch.setattr("rap.serving.serve.require_vllm", lambda: None)
    command = routed(Server(str(tmp_path))).command
    assert command[-2:] == ["--hf-overrides", '{"architectures": ["RapForCausalLM"]}']
    chosen = Server(str(tmp_path), arguments=("--hf-overrides", "{}"))
    assert routed(chosen) == chosen
    plain = apply(tiny_model(), random_plan(tiny_model(), [(4, 8), (4, 8)]))
    plain.save_pretrained(tmp_path / "plain")
    assert routed(Server(str(tmp_path / "plain"))).arguments == ()


def test_rows_of_a_norm_are_refused_by_native_classes_alone():
    for name in ("qwen3", "qwen3_moe"):
        config = config_of(name)
        config.rap["qk_norm"] = "rows"
        if name == "qwen3":
            with pytest.raises(RapError, match="modes constant and exact"):
                serving_path(config)
        else:
            assert serving_path(config) == "transformers"


def test_experts_beside_the_feed_forward_of_gemma4_are_refused():
    config = config_of("gemma4_text")
    config.enable_moe_block = True
    with pytest.raises(UnsupportedModelError, match=r"with experts.*top_k_experts"):
        serving_path(config)


def test_serve_prints_the_way_before_it_becomes_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr("rap.serving.serve.require_vllm", lambda: None)
    started = []
    monkeypatch.setattr("os.execve", lambda *arguments: started.append(arguments))
    model = BY_NAME["granite"].model()
    apply(model, random_case_plan(model, BY_NAME["granite"])).save_pretrained(tmp_path)
    result = run("serve", tmp_path)
    assert len(started) == 1
    printed = " ".join((result.err + result.out).split())
    assert "vLLM's backend for models of transformers" in printed


def test_serve_refuses_a_family_before_an_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("rap.serving.serve.require_vllm", lambda: None)
    model = BY_NAME["lfm2"].model()
    apply(model, random_case_plan(model, BY_NAME["lfm2"])).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["model_type"] == "rap_lfm2"
    result = run("serve", tmp_path)
    assert error_violations(result) == []
    assert "a state of their own" in result.err
