"""As a user would: `rap compress` of a family's checkpoint, then requests over HTTP."""

import json
import urllib.request

import pytest
import torch

from cases.command import run
from cases.family_cases import CASES
from rap.checkpoint.load import load
from rap.serving.engine import Transcript
from rap.serving.serve import Server, complete, free_port, running
from rap.serving.verify import agreement

pytestmark = [pytest.mark.serve, pytest.mark.families, pytest.mark.timeout(1800)]

FLAGS = ["--max-model-len", "256", "--dtype", "float32", "--enforce-eager"]
SMALL_CACHE = ["--kv-cache-memory-bytes", "100M"]
WORDS = ["--retain", "0.75", "--windows", "2", "--window", "64", "--evaluate", "none"]
READY = 1500  # seconds: on two cores that other work shares, a server needs some
TOLERANCE = 1e-4  # as in test_backbone
SIZES = {"hidden": 96, "intermediate_size": 192, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 32}  # kernels for experts take multiples of 32
FIELDS = {
    "qwen3_moe": EXPERTS,
    "gemma3_text": {},
    "gpt_oss": {},
    "gemma4_text": {"global_head_dim": 128},
}


def _dense(name, tokenizer, path):
    """A random checkpoint of a family for the texts of the bundled tokenizer."""
    case = next(case for case in CASES if case.name == name)
    fields = SIZES | {"vocab_size": len(tokenizer)} | FIELDS[name]
    if "vocab_size_per_layer_input" in case.fields:
        fields["vocab_size_per_layer_input"] = len(tokenizer)
    case.model(dtype=torch.float32, **fields).save_pretrained(path)
    tokenizer.save_pretrained(path)


def _ask(server, prompt):
    body = {"model": server.source, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)["choices"][0]
    return Transcript(prompt, answer["token_ids"], answer["logprobs"]["token_logprobs"], [])


@pytest.mark.parametrize("name", FIELDS)
def test_a_compressed_checkpoint_answers_over_http(
    name, tokenizer, test_tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr("rap.serving.serve.READY_SECONDS", READY)
    dense, out = tmp_path / "dense", tmp_path / "out"
    _dense(name, tokenizer, dense)
    compressed = run("compress", dense, "-o", out, *WORDS)
    assert compressed.code == 0, compressed.err
    assert "vLLM on a CPU" in compressed.out
    prompts = [test_tokens[1000 * n : 1000 * n + n].tolist() for n in (1, 40, 100)]
    server = Server(str(out), port=free_port(), arguments=[*FLAGS, *SMALL_CACHE])
    with running(server):
        found = agreement(
            load(out, dtype="float32", attn_implementation="eager"),
            [_ask(server, prompt) for prompt in prompts],
        )
        assert complete(server, "It was")["choices"][0]["text"]
    assert (found.num_tokens, found.mismatched_tokens) == (8 * len(prompts), 0)
    assert found.max_logprob_error <= TOLERANCE
