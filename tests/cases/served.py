"""Pruned families in vLLM: what to run, many engines in one process, and what must come out.

The reference is the pruned model in transformers, itself compared with the dense one elsewhere.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cases.family_cases import CASES, Case, random_case_plan
from cases.models import VOCABULARY
from cases.plans import random_plan
from cases.several_engines import run_several, transcripts
from rap.model.families import FAMILIES
from rap.planning.plan import Plan
from rap.serving.engine import EngineRun, Round, Transcript, run_vllm
from rap.serving.families import support
from rap.serving.verify import agreement
from rap.surgery.apply import apply

SERVED = [case for case in CASES if not support(case.model_type).unserved]
NORMALISED = [
    case for case in SERVED if case.norms and not FAMILIES[case.model_type].norm.one_module_per_head
]
# As in test_vllm: other kernels, other order of sums. A wrong pair or channel costs 0.1 and more.
# Experts and norms of all heads sum more of them: up to 4e-5 was seen.
TOLERANCE = 1e-4
# Kernels for experts take multiples of 32.
SIZES = {"hidden": 96, "intermediate_size": 192}
EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
EXPERT_FIELDS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Sizes that the CPU backend takes, and 40 and 24 channels, which it does not; one layer dense.
WIDTHS = [(16, 32), (20, 40), None, (12, 64)]
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
TINY = {"max_model_len": 256, "kv_cache_memory_bytes": 2**27, "skip_tokenizer_init": True}
NORM_ROWS = 2


def prompts_of(*lengths: int) -> list[list[int]]:
    """Prompts of random tokens of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def sized(case: Case) -> Any:
    """A tiny random model of a family in float32, of sizes that vLLM's kernels take."""
    experts = dict.fromkeys(set(EXPERTS) & case.fields.keys(), 32)
    model = case.model(dtype=torch.float32, **SIZES, **experts)
    _bias_choices(model)
    return model


def pruned(case: Case, mode: str | None = None) -> Any:
    """A tiny random model of a family, pruned; its QK-norm in the default's mode or in `mode`."""
    model = sized(case)
    plan = random_case_plan(model, case)
    if mode is not None:
        plan = in_mode(plan, mode)
    elif case.norms and not FAMILIES[case.model_type].norm.one_module_per_head:
        plan = dataclasses.replace(plan, qk_norm="constant")
    return eager(apply(model, plan))


def in_mode(plan: Plan, mode: str) -> Plan:
    """A plan in a mode of QK-norm, every head with a ratio and rows for the norm of its own."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for planned, shape in zip(plan.layers, plan.shapes, strict=True):
        if planned is None:
            made.append(None)
            continue
        heads = {"query": shape.num_heads, "key": shape.num_kv_heads}
        fields = {
            f"{name}_ratio_{axis}": 1 + torch.rand(heads[name], generator=generator)
            for name, axis in (("query", "H"), ("key", "G"))
        }
        if mode == "rows":
            fields |= {
                f"{name}_sketch_{axis}SD": torch.randn(
                    heads[name], NORM_ROWS, shape.head_dim, generator=generator
                )
                for name, axis in (("query", "H"), ("key", "G"))
            }
        made.append(dataclasses.replace(planned, **fields))
    return dataclasses.replace(plan, layers=tuple(made), qk_norm=mode)


def _bias_choices(model: Any) -> None:
    """Give biases on the choice of experts, which are zeros in a new model, values that matter."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def eager(small: Any) -> Any:
    """The model with attention written out: the reference."""
    small.set_attn_implementation("eager")
    return small


def marked(cases: list[Case], few: tuple[str, ...] = ()) -> list[Any]:
    """Parameters of a test; all but those named `few` are left to `make test-families`."""
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in few else [pytest.mark.families])
        for case in cases
    ]


def serve_selected(
    session: Any, test: str, folders: Any, *, ranks: int = 1
) -> dict[tuple[str, str | None], tuple[Any, Any]]:
    """`serve_all` of what this run of pytest asks a test for, by the case's name and its mode."""
    items = (item for item in session.items if getattr(item, "originalname", None) == test)
    asked = [(item.callspec.params["case"], item.callspec.params.get("mode")) for item in items]
    models = {(case.name, mode): pruned(case, mode) for case, mode in asked}
    return serve_all(models, folders, ranks=ranks)


def save_mixture(tiny: Any, path: Path, **fields: Any) -> Any:
    """A pruned mixture of experts whose layers have sizes of their own, saved."""
    model = tiny("qwen3_moe", **EXPERT_FIELDS, **fields)
    small = eager(apply(model, random_plan(model, WIDTHS)))
    small.save_pretrained(path)
    return small


def serve_all(
    models: dict[tuple[str, str | None], Any], folders: Any, *, ranks: int = 1
) -> dict[tuple[str, str | None], tuple[Any, Any]]:
    """Every model and what an engine made of it, by the key of the model."""
    jobs = {}
    for key, small in models.items():
        path = folders.mktemp("family")
        small.save_pretrained(path)
        engine = {"model": str(path), "dtype": "float32", "enforce_eager": True, **TINY}
        asked = {"prompts": prompts_of(3, 40, 90), "max_tokens": 8, "prompt_logprobs": True}
        jobs[str(key)] = {"engine": engine, "rounds": [asked]}
    results = run_several(jobs, timeout=3600, ranks=ranks)
    return {key: (small, results[str(key)]) for key, small in models.items()}


def assert_served(served: tuple[Any, Any]) -> None:
    """Of one of `serve_all`: the engine's tokens and log-probabilities are those of the model."""
    model, result = served
    assert_agrees(model, transcripts(result))


def assert_agrees(reference: Any, found: list[Transcript]) -> None:
    """The engine's tokens and log-probabilities are those of the model."""
    compared = agreement(reference, found)
    print(f"{compared.num_tokens} tokens, max |delta logprob| {compared.max_logprob_error:.2e}")
    assert compared.mismatched_tokens == 0
    assert compared.max_logprob_error <= TOLERANCE


def run_tiny(path: Path, *rounds: Round, **engine: Any) -> EngineRun:
    """One engine of a tiny checkpoint."""
    ranks = engine.get("tensor_parallel_size", 1)
    with mock.patch.dict(os.environ, TWO_RANKS if ranks > 1 else {}):
        return run_vllm(path, rounds, **(TINY | engine))


def run_divided(path: Path, *lengths: int) -> list[Transcript]:
    """What an engine on two ranks makes of random prompts."""
    asked = Round(prompts_of(*lengths), max_tokens=8, prompt_logprobs=True)
    return run_tiny(path, asked, tensor_parallel_size=2).rounds[0]
