"""Which pruned checkpoints vLLM serves, and the sentence where it does not."""

import json

import pytest
import torch

from cases.command import error_violations, run
from cases.family_cases import CASES, random_case_plan
from cases.models import tiny_model
from cases.plans import random_plan
from cases.served import SERVED
from rap.model.errors import CheckpointError, UnsupportedModelError
from rap.model.families import FAMILIES, WRAPPERS
from rap.serving.families import SUPPORT, support
from rap.serving.refusals import check_precision, check_served
from rap.serving.vllm import GENERAL, architectures
from rap.surgery.apply import apply

BY_NAME = {case.name: case for case in CASES}


def config_of(name: str):
    case = BY_NAME[name]
    model = case.model()
    return apply(model, random_case_plan(model, case)).config


def test_every_family_runs_in_vllm_or_has_a_reason():
    """`SERVED` are the cases that the tests of vLLM run."""
    unserved = {name for name, row in SUPPORT.items() if row.unserved}
    assert unserved <= {*SUPPORT} <= {*FAMILIES, *WRAPPERS}
    assert {case.model_type for case in SERVED} == {*FAMILIES} - unserved


@pytest.mark.parametrize("name", ["llama", "mixtral", "glm4", "gemma3n_text", "gemma4_text"])
def test_a_served_family_is_checked_without_an_error(name):
    check_served(config_of(name))


def test_a_family_that_overflows_is_not_served_in_float16():
    config = config_of("glm4")
    check_precision(config, torch.bfloat16)
    check_precision(config_of("llama"), torch.float16)
    with pytest.raises(UnsupportedModelError, match="glm4 is numerically unstable in float16"):
        check_precision(config, torch.float16)


def test_every_served_architecture_names_a_class_of_the_backend():
    """Checkpoints name `Rap<Family>ForCausalLM`, and `--hf-overrides` may name the classes."""
    places = architectures()
    assert {f"Rap{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")} <= {*places}
    assert places["RapLlamaForCausalLM"] == places["RapForCausalLM"] == "backbone:RapForCausalLM"
    assert places["RapMixtralForCausalLM"] == "backbone:RapMoEForCausalLM"
    assert {*places.values()} == {f"backbone:{name}" for name in GENERAL}


@pytest.mark.parametrize("name", ["lfm2", "llama4_text"])
def test_a_family_that_is_not_served_is_refused_with_the_reason(name):
    with pytest.raises(UnsupportedModelError, match="vLLM does not serve pruned") as refused:
        check_served(config_of(name))
    assert support(name).unserved in str(refused.value)


def test_widths_beyond_the_dense_head_are_refused():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = tiny_model("llama", rope_parameters=rope)
    config = apply(model, random_plan(model, [(3, 10), None])).config
    config.rap["layers"][0] |= {"pairs": 3, "free": 2}
    check_served(config)
    config.rap["layers"][0]["values"] = 17
    with pytest.raises(CheckpointError, match="8 key and 17 value channels"):
        check_served(config)


def test_experts_beside_the_feed_forward_of_gemma4_are_refused():
    config = config_of("gemma4_text")
    config.enable_moe_block = True
    with pytest.raises(UnsupportedModelError, match=r"with experts.*top_k_experts"):
        check_served(config)


def test_serve_prints_what_runs_the_model_before_it_becomes_the_server(tmp_path, monkeypatch):
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
    assert "layers with a state" in " ".join(result.err.split())
