"""A pruned checkpoint in the real vLLM engine, against the stock dense model with zeroed weights."""

import pytest

from rap.serving.agreement import agreement
from rap.serving.engine import Round, run_vllm

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

# The same stock model in vLLM and in transformers differs by 4e-6 to 1e-5 in float32: other
# kernels, other order of sums. A wrong pair or channel costs 0.1 and more.
TOLERANCE = 5e-5
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def mixed_run(mixed, prompts):
    """One engine, chunks of 64 tokens, prefix cache: log-probabilities, then two equal rounds."""
    again = Round(prompts, max_tokens=8)
    return run_vllm(
        mixed.path,
        [Round(prompts, max_tokens=16, prompt_logprobs=True), again, again],
        max_model_len=512,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )


def assert_agrees(reference, transcripts):
    found = agreement(reference, transcripts)
    assert found.mismatched_tokens == 0
    assert found.max_logprob_error <= TOLERANCE
    print(f"{found.num_tokens} tokens, max |delta logprob| {found.max_logprob_error:.2e}")


def test_mixed_and_padded_sizes_in_chunks(mixed, mixed_run):
    assert_agrees(mixed.reference, mixed_run.rounds[0])


def test_prefix_cache(mixed, mixed_run):
    assert sum(one.cached_tokens for one in mixed_run.rounds[2]) >= 256
    assert_agrees(mixed.reference, mixed_run.rounds[2])
    tokens = [[one.tokens for one in found] for found in mixed_run.rounds[1:]]
    assert tokens[0] == tokens[1]
