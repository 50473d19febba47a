"""A pruned checkpoint in the real vLLM engine, against the stock model with zeroed weights."""

import pytest
import torch

from cases.family_cases import CASES
from cases.plans import random_plan
from cases.served import in_mode, run_tiny
from rap import assets
from rap.serving.engine import EngineError, Round, run_vllm
from rap.serving.verify import agreement, verify
from rap.surgery.apply import apply

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

# The same stock model in vLLM and in transformers differs by 4e-6 to 1e-5 in float32: other
# kernels, other order of sums. A wrong pair or channel costs 0.1 and more.
TOLERANCE = 5e-5


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


def test_cache_holds_one_over_retain_tokens(aligned, prompts):
    """`rap verify` of the pruned model, and the dense one as the engine itself sizes its cache."""
    short = [Round(prompts[:3], max_tokens=4, prompt_logprobs=True)]
    dense = run_vllm(assets.reference_path(), short, max_model_len=512)
    assert_agrees(aligned.dense, dense.rounds[0])
    found = verify(aligned.path, "vllm")
    print(found)
    assert found.passed
    assert found.max_logprob_error <= TOLERANCE
    assert aligned.plan.kept_fraction == found.kept_fraction == 0.75
    assert found.dense_tokens_per_gib == pytest.approx(dense.capacity_tokens, rel=0.01)
    assert found.tokens_per_gib / dense.capacity_tokens == pytest.approx(1 / 0.75, rel=0.01)


def test_biases_and_kv_heads_sharded_over_two_ranks(prune, tiny, tiny_prompts):
    model = tiny("qwen2")
    checkpoint = prune(model, [(16, 32), (20, 40), None, (12, 64)])
    assert model.model.layers[0].self_attn.k_proj.bias is not None
    found = _run_tiny(checkpoint.path, tiny_prompts, ranks=2)
    assert_agrees(checkpoint.reference, found)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("mistral", {"sliding_window": None})],
    ids=["llama", "mistral"],
)
def test_one_kv_head_replicated_over_two_ranks(prune, tiny, tiny_prompts, family, fields):
    model = tiny(family, kv_heads=1, rope="llama3", **fields)
    checkpoint = prune(model, [(16, 32), (32, 24), (28, 28), None])
    found = _run_tiny(checkpoint.path, tiny_prompts, ranks=2)
    assert_agrees(checkpoint.reference, found)


@pytest.mark.parametrize(("mode", "ranks"), [("exact", 1), ("rows", 1), ("constant", 2)])
def test_qk_norm(tiny, tiny_prompts, tmp_path, mode, ranks):
    """Against the pruned model in transformers, itself compared with the dense one elsewhere."""
    model = tiny("qwen3")
    plan = random_plan(model, [(16, 32), (20, 40), None, (12, 64)])
    small = apply(model, in_mode(plan, mode))
    small.save_pretrained(tmp_path)
    assert_agrees(small, _run_tiny(tmp_path, tiny_prompts, ranks=ranks))


def test_longrope_up_to_its_short_table(prune, tiny, tiny_prompts):
    """Frequencies that depend on the length of the text, as GGUF files with llama3 scaling have."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256}
    rope |= {"short_factor": [1.0 + i / 8 for i in range(32)], "long_factor": [8.0] * 32}
    model = tiny("llama", rope_parameters=rope | {"factor": 1.0})
    checkpoint = prune(model, [(16, 32), (20, 40), None, (12, 64)])
    assert_agrees(checkpoint.reference, _run_tiny(checkpoint.path, tiny_prompts, ranks=1))


def _run_tiny(path, prompts, *, ranks):
    asked = Round(prompts, max_tokens=8, prompt_logprobs=True)
    return run_tiny(path, asked, tensor_parallel_size=ranks).rounds[0]


def test_swapped_indices_are_noticed(mixed, damaged, prompts):
    """The negative control: one layer's two KV heads read each other's frequencies."""

    def swap(tensors):
        name = "model.layers.1.self_attn.frequency_index"
        tensors[name] = tensors[name].flip(0).contiguous()

    path = damaged(mixed.path, tensors=swap)
    run = run_vllm(path, [Round(prompts, max_tokens=4, prompt_logprobs=True)], max_model_len=512)
    found = agreement(mixed.reference, run.rounds[0])
    print(f"max |delta logprob| {found.max_logprob_error:.3f}")
    assert found.max_logprob_error > 1000 * TOLERANCE


def test_a_short_list_of_widths_is_refused_in_a_sentence(mixed, damaged):
    """test_layout tries every wrong `rap` section, without an engine."""
    path = damaged(mixed.path, section=lambda rap: rap["layers"].pop())
    with pytest.raises(EngineError, match="lists widths for 5 layers, the model has 6"):
        run_vllm(path, [], max_model_len=512)


def test_a_pruned_gpt_oss_chats_in_the_format_of_the_dense_one(tmp_path):
    """Of the config alone: the vocabulary of harmony is fetched at the first request."""
    from vllm.engine.arg_utils import EngineArgs

    case = next(case for case in CASES if case.name == "gpt_oss")
    model = case.model(dtype=torch.float32)
    pruned = apply(model, random_plan(model, [(8, 16)] * model.config.num_hidden_layers))
    formats = []
    for name, saved in (("dense", model), ("pruned", pruned)):
        saved.save_pretrained(tmp_path / name)
        made = EngineArgs(
            model=str(tmp_path / name), skip_tokenizer_init=True, max_model_len=64
        ).create_engine_config()
        parser = made.structured_outputs_config.reasoning_parser
        formats.append((made.model_config.hf_config.model_type, parser))
    assert formats == [("gpt_oss", "openai_gptoss")] * 2
