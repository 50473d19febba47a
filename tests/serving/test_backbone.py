"""Every served family, pruned, in the real engine.

On two ranks: test_division.
"""

import pytest

from cases.served import (
    SERVED,
    TOLERANCE,
    assert_agrees,
    assert_served,
    marked,
    prompts_of,
    run_tiny,
    save_mixture,
    serve_selected,
)
from rap.serving.engine import EngineError, Round
from rap.serving.verify import agreement

pytestmark = [pytest.mark.serve, pytest.mark.timeout(3600)]

# One for each thing that the path does for a family: `make test-families` runs all.
FEW = ("gemma3_text", "gpt_oss", "granite", "mistral", "olmo2", "phi3", "qwen3_moe")


@pytest.fixture(scope="module")
def served(request, tmp_path_factory):
    """The selected families' models, and what the engine made of each."""
    test = "test_a_family_agrees_with_transformers"
    return serve_selected(request.session, test, tmp_path_factory)


@pytest.mark.parametrize("case", marked(SERVED, FEW))
def test_a_family_agrees_with_transformers(served, case):
    assert_served(served[case.name, None])


@pytest.fixture(scope="module")
def sizes(tiny, tmp_path_factory):
    """A pruned mixture of experts whose layers have sizes of their own, and where it is."""
    path = tmp_path_factory.mktemp("sizes")
    return save_mixture(tiny, path), path


def test_sizes_by_layer_chunks_and_prefix_cache(sizes):
    small, path = sizes
    prompts = prompts_of(3, 40, 140)
    again = Round(prompts, max_tokens=8)
    run = run_tiny(
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


def test_swapped_indices_are_noticed(sizes, damaged):
    """The negative control: one layer's two KV heads read each other's frequencies."""

    def swap(tensors):
        name = "model.layers.1.self_attn.frequency_index"
        tensors[name] = tensors[name].flip(0).contiguous()

    small, path = sizes
    prompts = Round(prompts_of(40, 140), max_tokens=4, prompt_logprobs=True)
    found = agreement(small, run_tiny(damaged(path, tensors=swap), prompts).rounds[0])
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
        run_tiny(damaged(sizes[1], tensors=edit))
