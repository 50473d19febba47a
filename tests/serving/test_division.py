"""Every family with its heads on two ranks of the real engine."""

import pytest

from cases.served import (
    NORMALISED,
    SERVED,
    TOLERANCE,
    assert_agrees,
    assert_served,
    marked,
    pruned,
    run_divided,
    save_mixture,
    serve_selected,
)
from rap.model.errors import UnsupportedModelError
from rap.serving.verify import agreement

pytestmark = [pytest.mark.serve, pytest.mark.timeout(3600)]

# One for each thing that vLLM does not divide by itself: `make test-families` runs all.
FEW = ("afmoe", "cohere:norm", "gemma3n_text", "olmo2", "persimmon:norm", "phi3", "qwen3_moe")


@pytest.fixture(scope="module")
def divided(request, tmp_path_factory):
    """The selected families on two ranks."""
    test = "test_a_family_on_two_ranks"
    return serve_selected(request.session, test, tmp_path_factory, ranks=2)


@pytest.mark.parametrize("case", marked(SERVED, FEW))
def test_a_family_on_two_ranks(divided, case):
    assert_served(divided[case.name, None])


@pytest.fixture(scope="module")
def modes(request, tmp_path_factory):
    """The same of families with QK-norm, by mode."""
    test = "test_a_mode_of_norms_on_two_ranks"
    return serve_selected(request.session, test, tmp_path_factory, ranks=2)


@pytest.mark.parametrize("mode", ["constant", "exact", "rows"])
@pytest.mark.parametrize("case", marked(NORMALISED))
def test_a_mode_of_norms_on_two_ranks(modes, case, mode):
    assert_served(modes[case.name, mode])


@pytest.mark.parametrize("kv_heads", [2, 1], ids=["divided", "replicated"])
def test_heads_on_two_ranks(tiny, tmp_path, kv_heads):
    """As a user starts it: vLLM starts the ranks, and sends them the config."""
    small = save_mixture(tiny, tmp_path, kv_heads=kv_heads)
    assert_agrees(small, run_divided(tmp_path, 3, 40, 140))


@pytest.mark.families
def test_a_router_and_older_names_of_weights_on_two_ranks(tmp_path):
    """Workers are sent the config; the router of Phi-3.5-MoE is whole on both."""
    small = pruned(next(case for case in SERVED if case.name == "phimoe"))
    small.save_pretrained(tmp_path)
    assert_agrees(small, run_divided(tmp_path, 3, 40))


def test_heads_of_the_other_rank_are_noticed(tiny, damaged, tmp_path):
    """The negative control: values of one layer's two KV heads, which are on two ranks, change."""

    def swap(tensors):
        name = "model.layers.1.self_attn.v_proj.weight"
        tensors[name] = tensors[name].unflatten(0, (2, -1)).flip(0).flatten(0, 1).contiguous()

    small = save_mixture(tiny, tmp_path)
    found = agreement(small, run_divided(damaged(tmp_path, tensors=swap), 40, 140))
    assert found.max_logprob_error > 100 * TOLERANCE


def test_quantized_layers_that_cannot_be_divided_are_refused():
    """vLLM is imported here for once: what it quantizes by has no kernels on a CPU."""
    from rap.serving.vllm.backbone import WholeLayers

    small = pruned(next(case for case in SERVED if case.name == "phi3"))
    with pytest.raises(UnsupportedModelError, match="layer 0 was left dense, and vLLM cannot"):
        WholeLayers(small.model, quantized=True)
