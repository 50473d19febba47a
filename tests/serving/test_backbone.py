"""Every family that vLLM's transformers backend runs, pruned, in the real engine.

The reference is the pruned model in transformers, itself compared with the dense one elsewhere.
"""

import dataclasses

import pytest
import torch

from cases.family_cases import CASES, Case, random_case_plan
from cases.several_engines import run_several, transcripts
from rap.serving.agreement import agreement
from rap.serving.paths import family_path
from rap.surgery.apply import apply

pytestmark = [pytest.mark.serve, pytest.mark.timeout(3600)]

SERVED = [case for case in CASES if family_path(case.model_type) == "transformers"]
# As in test_vllm: other kernels, other order of sums. Logits of these models are ten times as wide.
TOLERANCE = 1e-4
TOKENS = 8
# Kernels for experts take multiples of 32.
SIZES = {"hidden": 96, "intermediate_size": 192}
EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(120, (n,), generator=generator).tolist() for n in (3, 40, 90)]


def _pruned(case: Case):
    experts = dict.fromkeys(set(EXPERTS) & case.fields.keys(), 32)
    model = case.model(dtype=torch.float32, **SIZES, **experts)
    plan = random_case_plan(model, case)
    if case.norms and not case.name.startswith("stablelm"):
        plan = dataclasses.replace(plan, qk_norm="constant")
    small = apply(model, plan)
    small.set_attn_implementation("eager")
    return small


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """The transcripts of all selected families, by the names of their cases, and their models."""
    wanted = {
        item.callspec.params["case"].name
        for item in request.session.items
        if "case" in getattr(getattr(item, "callspec", None), "params", {})
    }
    models = {case.name: _pruned(case) for case in SERVED if case.name in wanted}
    jobs = {}
    for name, small in models.items():
        path = tmp_path_factory.mktemp("family")
        small.save_pretrained(path)
        jobs[name] = {
            "engine": {
                "model": str(path),
                "dtype": "float32",
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "max_model_len": 256,
                "kv_cache_memory_bytes": 2**27,
            },
            "rounds": [{"prompts": _prompts(), "max_tokens": TOKENS, "prompt_logprobs": True}],
        }
    return models, run_several(jobs, timeout=3600)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_a_family_agrees_with_transformers(served, case):
    models, results = served
    found = agreement(models[case.name], transcripts(results[case.name]))
    print(f"{case.name}: {found}")
    assert found.mismatched_tokens == 0
    assert found.max_logprob_error <= TOLERANCE
