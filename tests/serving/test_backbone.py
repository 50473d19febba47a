"""Every family that vLLM's transformers backend runs, pruned, in the real engine.

The reference is the pruned model in transformers, itself compared with the dense one elsewhere.
"""

import dataclasses

import pytest
import torch

from cases.family_cases import CASES, Case, random_case_plan
from cases.models import VOCABULARY
from cases.plans import random_plan
from cases.several_engines import run_several, transcripts
from rap.model.families import FAMILIES
from rap.serving.agreement import agreement
from rap.serving.engine import EngineError, Round, run_vllm
from rap.serving.paths import family_path, is_divisible
from rap.surgery.apply import apply

pytestmark = [pytest.mark.serve, pytest.mark.timeout(3600)]

SERVED = [case for case in CASES if family_path(case.model_type) == "transformers"]
DIVISIBLE = [case for case in SERVED if is_divisible(FAMILIES[case.model_type].norm)]
# One for each thing that the path does for a family: `make test-families` runs all.
FEW = ("gemma3_text", "gpt_oss", "granite", "olmo2", "phi3", "qwen3_moe")
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


def _prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def _pruned(case: Case):
    experts = dict.fromkeys(set(EXPERTS) & case.fields.keys(), 32)
    model = case.model(dtype=torch.float32, **SIZES, **experts)
    _bias_choices(model)
    plan = random_case_plan(model, case)
    if case.norms and not case.name.startswith("stablelm"):
        plan = dataclasses.replace(plan, qk_norm="constant")
    return _eager(apply(model, plan))


def _bias_choices(model) -> None:
    """Give biases on the choice of experts, which are zeros in a new model, values that matter."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def _eager(small):
    small.set_attn_implementation("eager")
    return small


def _selected(session, argument: str) -> set[str]:
    """The cases that this run of pytest asks for as this argument."""
    calls = (getattr(item, "callspec", None) for item in session.items)
    return {call.params[argument].name for call in calls if call and argument in call.params}


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """The selected families' models, and what the engine made of each, by names of cases."""
    models, jobs = _saved(_selected(request.session, "case"), tmp_path_factory)
    return models, run_several(jobs, timeout=3600)


@pytest.fixture(scope="module")
def divided(request, tmp_path_factory):
    """The same of engines whose heads are on two ranks."""
    models, jobs = _saved(_selected(request.session, "divisible"), tmp_path_factory)
    return models, run_several(jobs, timeout=3600, ranks=2)


def _saved(wanted: set[str], folders):
    """The wanted families' models, and a job for each."""
    models = {case.name: _pruned(case) for case in SERVED if case.name in wanted}
    jobs = {}
    for name, small in models.items():
        path = folders.mktemp("family")
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
            "rounds": [{"prompts": _prompts(3, 40, 90), "max_tokens": 8, "prompt_logprobs": True}],
        }
    return models, jobs


def assert_agrees(reference, found):
    compared = agreement(reference, found)
    print(f"{compared.num_tokens} tokens, max |delta logprob| {compared.max_logprob_error:.2e}")
    assert compared.mismatched_tokens == 0
    assert compared.max_logprob_error <= TOLERANCE


def _marked(case: Case):
    marks = [] if case.name in FEW else [pytest.mark.families]
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in SERVED])
def test_a_family_agrees_with_transformers(served, case):
    models, results = served
    assert_agrees(models[case.name], transcripts(results[case.name]))


@pytest.mark.parametrize("divisible", [_marked(case) for case in DIVISIBLE])
def test_a_family_agrees_on_two_ranks(divided, divisible):
    models, results = divided
    assert_agrees(models[divisible.name], transcripts(results[divisible.name]))


@pytest.fixture(scope="module")
def sizes(tiny, tmp_path_factory):
    """A pruned mixture of experts whose layers have sizes of their own."""
    model = tiny("qwen3_moe", **EXPERT_FIELDS)
    small = _eager(apply(model, random_plan(model, WIDTHS)))
    path = tmp_path_factory.mktemp("sizes")
    small.save_pretrained(path)
    return small, path


def _run(path, *rounds, **engine):
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 2**27, **engine}
    return run_vllm(path, rounds, skip_tokenizer_init=True, **settings)


def test_sizes_by_layer_chunks_and_prefix_cache(sizes):
    small, path = sizes
    prompts = _prompts(3, 40, 140)
    again = Round(prompts, max_tokens=8)
    run = _run(
        path,
        Round(prompts, max_tokens=8, prompt_logprobs=True),
        again,
        again,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    assert_agrees(small, run.rounds[0])
    assert sum(one.cached_tokens for one in run.rounds[2]) >= 128
    assert_agrees(small, run.rounds[2])
    # Two KV heads of float32 keys and values: 32, 40 as 64, 64 and 64 channels.
    assert run.capacity_tokens == pytest.approx(2**27 / (2 * 4 * 2 * (32 + 3 * 64)), rel=0.01)


@pytest.mark.parametrize("kv_heads", [2, 1], ids=["divided", "replicated"])
def test_heads_on_two_ranks(tiny, tmp_path, kv_heads):
    model = tiny("qwen3_moe", kv_heads=kv_heads, **EXPERT_FIELDS)
    small = _eager(apply(model, random_plan(model, WIDTHS)))
    small.save_pretrained(tmp_path)
    run = _run(
        tmp_path,
        Round(_prompts(3, 40, 140), max_tokens=8, prompt_logprobs=True),
        environment=TWO_RANKS,
        tensor_parallel_size=2,
    )
    assert_agrees(small, run.rounds[0])


@pytest.mark.families
def test_a_router_and_older_names_of_weights_on_two_ranks(tmp_path):
    """Workers are sent the config; the router of Phi-3.5-MoE is whole on both."""
    small = _pruned(next(case for case in SERVED if case.name == "phimoe"))
    small.save_pretrained(tmp_path)
    run = _run(
        tmp_path,
        Round(_prompts(3, 40), max_tokens=8, prompt_logprobs=True),
        environment=TWO_RANKS,
        tensor_parallel_size=2,
    )
    assert_agrees(small, run.rounds[0])


def test_swapped_indices_are_noticed(sizes, damaged):
    """The negative control: one layer's two KV heads read each other's frequencies."""

    def swap(tensors):
        name = "model.layers.1.self_attn.frequency_index"
        tensors[name] = tensors[name].flip(0).contiguous()

    small, path = sizes
    prompts = Round(_prompts(40, 140), max_tokens=4, prompt_logprobs=True)
    found = agreement(small, _run(damaged(path, tensors=swap), prompts).rounds[0])
    assert found.max_logprob_error > 100 * TOLERANCE


def _out_of_range(tensors):
    tensors["model.layers.0.self_attn.frequency_index"][0, -1] = 32


def _without(tensors):
    del tensors["model.layers.0.self_attn.frequency_index"]


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (_out_of_range, "names pairs [0-9]+ to 32, a head has pairs 0 to 31"),
        (_without, "layers.0.self_attn.frequency_index is missing: the checkpoint is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_a_sentence(sizes, damaged, edit, sentence):
    with pytest.raises(EngineError, match=sentence):
        _run(damaged(sizes[1], tensors=edit))
