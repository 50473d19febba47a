"""Merged heads in the real vLLM engine: layers with numbers of cached heads of their own.

The reference is the pruned model in transformers, itself compared with the dense one elsewhere.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from cases.family_cases import Case
from cases.merged_plans import MERGE, MERGED, merged_layer, merged_plan
from cases.models import tiny_model
from cases.plans import plan_of, random_plan
from cases.served import (
    SERVED,
    TOLERANCE,
    assert_agrees,
    assert_served,
    eager,
    marked,
    prompts_of,
    run_divided,
    run_tiny,
    serve_all,
    sized,
)
from rap.methods.dense import dense_layers
from rap.model.kinds.factored import FactoredPlan
from rap.model.layers import attention_layers
from rap.serving.engine import EngineError, Round
from rap.serving.verify import agreement
from rap.surgery.apply import apply

pytestmark = [pytest.mark.serve, pytest.mark.timeout(3600)]


def can_map(case: Case) -> bool:
    """Whether a family's heads can be merged with maps of every head."""
    return any(not layer.mapped_limit for layer in dense_layers(case.model()).present)


def divides(case: Case) -> bool:
    """Whether two ranks can divide its merged heads, or share the one that there is."""
    shapes = [layer.shape for layer in attention_layers(case.model()) if layer.shape is not None]
    merged = max(shape.num_kv_heads for shape in shapes) // MERGE
    return merged == 1 or merged % 2 == 0


FAMILIES = [case for case in SERVED if case.name in {one.name for one in MERGED}]
# One of each: q, k and v of one linear, channels that do not rotate, experts, sinks, windows.
FEW = ("gemma2", "glm4", "gpt_oss", "llama", "mixtral", "phi3", "qwen2")
FACTORED = [case for case in SERVED if can_map(case)]
# Of each: q, k and v of one linear, norms of a head and of all heads, gates, free channels.
FEW_FACTORED = ("afmoe", "glm4", "llama", "olmo2", "phi3", "qwen3")
LENGTHS = (3, 40, 140)


def several(path: Path, *, kv_heads: int = 4) -> Any:
    """Layers with one head of 96 channels of all, half of the heads, all heads, and a dense one."""
    heads = {"heads": 2 * kv_heads, "kv_heads": kv_heads}
    model = tiny_model("llama", head_dim=64, hidden=96, layers=4, **heads)
    generator = torch.Generator().manual_seed(0)
    made = [
        merged_layer(kv_heads, 64, 64, generator, merge=merge, slots=slots, width=width)
        for merge, slots, width in ((kv_heads, 48, 96), (2, 20, 50))
    ]
    apart = random_plan(model, [None, None, None, (16, 32)]).layers[3]
    small = eager(apply(model, plan_of(model, [*made, None, apart])))
    small.save_pretrained(path)
    return small


def test_layers_cache_numbers_of_heads_of_their_own(tmp_path):
    """Chunks of 64 tokens, and a second round from the cache of prefixes."""
    small = several(tmp_path)
    prompts = prompts_of(*LENGTHS)
    rounds = [Round(prompts, max_tokens=8, prompt_logprobs=True), Round(prompts, max_tokens=8)]
    run = run_tiny(tmp_path, *rounds, max_num_batched_tokens=64, enable_prefix_caching=True)
    assert_agrees(small, run.rounds[0])
    assert_agrees(small, run.rounds[1])
    assert sum(one.cached_tokens for one in run.rounds[1]) >= 128
    # Each token of each layer, in float32: what vLLM pads to 64, and the heads it holds.
    held = 2 * 4 * (1 * 96 + 2 * 64 + 4 * 64 + 4 * 32)
    assert run.capacity_tokens == pytest.approx(2**27 / held, rel=0.02)


def test_merged_heads_on_two_ranks(tmp_path):
    """Four, two and one cached head: the first two are divided, the last is on both ranks."""
    assert_agrees(several(tmp_path), run_divided(tmp_path, *LENGTHS))


def test_frequencies_of_the_other_rank_are_noticed(damaged, tmp_path):
    """The negative control: two merged heads, which are on two ranks, swap their frequencies."""

    def swap(tensors):
        name = "model.layers.1.self_attn.frequency_index"
        tensors[name] = tensors[name].flip(0).contiguous()

    small = several(tmp_path)
    found = agreement(small, run_divided(damaged(tmp_path, tensors=swap), 40, 140))
    assert found.max_logprob_error > 100 * TOLERANCE


def test_maps_of_a_dense_head_that_two_ranks_share(tmp_path):
    """Three query heads a rank, two to a dense head: the second head's map is on both ranks."""
    model = tiny_model("llama", head_dim=64, hidden=96, layers=2, heads=6, kv_heads=3)
    generator = torch.Generator().manual_seed(0)
    layer = merged_layer(3, 64, 64, generator, merge=3, slots=48, width=96)
    whole = FactoredPlan.of(layer, queries=True, outputs=True)
    half = FactoredPlan.of(layer, queries=False, outputs=True)
    small = eager(apply(model, plan_of(model, [whole, half])))
    small.save_pretrained(tmp_path)
    assert_agrees(small, run_divided(tmp_path, *LENGTHS))


def test_heads_that_devices_cannot_divide_are_refused_in_a_sentence(tmp_path):
    several(tmp_path, kv_heads=6)
    with pytest.raises(EngineError, match="layer 1 caches 3 heads, which 2 devices cannot divide"):
        run_divided(tmp_path, 3)


def served(request: Any, folders: Any, test: str, *, mapped: bool, ranks: int = 1) -> Any:
    """The families that a test was asked for with pairs of heads merged, in one engine process."""
    cases = [
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "originalname", None) == test
    ]
    models = {}
    for case in cases:
        model = sized(case)
        models[case.name, None] = eager(apply(model, merged_plan(model, case, mapped=mapped)))
    return serve_all(models, folders, ranks=ranks)


@pytest.fixture(scope="module")
def families(request, tmp_path_factory):
    """Queries absorbed."""
    return served(request, tmp_path_factory, "test_a_family_with_merged_heads", mapped=False)


@pytest.mark.parametrize("case", marked(FAMILIES, FEW))
def test_a_family_with_merged_heads(families, case):
    assert_served(families[case.name, None])


@pytest.fixture(scope="module")
def factored(request, tmp_path_factory):
    """Queries factored, keys behind their norm where there is one."""
    return served(request, tmp_path_factory, "test_a_family_with_factored_queries", mapped=True)


@pytest.mark.parametrize("case", marked(FACTORED, FEW_FACTORED))
def test_a_family_with_factored_queries(factored, case):
    assert_served(factored[case.name, None])


@pytest.fixture(scope="module")
def divided(request, tmp_path_factory):
    """The same on two ranks: one cached head, on both of them, and a dense head's maps on each."""
    test = "test_factored_queries_on_two_ranks"
    return served(request, tmp_path_factory, test, mapped=True, ranks=2)


@pytest.mark.parametrize("case", marked([*filter(divides, FACTORED)], FEW_FACTORED))
def test_factored_queries_on_two_ranks(divided, case):
    assert_served(divided[case.name, None])
