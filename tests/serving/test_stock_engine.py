"""The stock export in unmodified vLLM: a process in which this package cannot be imported."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

from cases.plans import plan_of, zeroed
from rap.model.layers import attention_layers
from rap.planning.plan import PairPlan
from rap.serving.engine import Transcript, engine_environment
from rap.serving.stock import export_stock
from rap.serving.verify import agreement
from rap.surgery.apply import apply

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

_RUN = """
import json, sys
sys.modules["rap"] = None
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
llm = LLM(job["model"], dtype="float32", enforce_eager=True, max_model_len=512,
          kv_cache_memory_bytes=2**30)
settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1,
                          prompt_logprobs=0)
rows = []
for request in llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], settings):
    output = request.outputs[0]
    tokens, prompt = list(output.token_ids), request.prompt_token_ids
    rows.append([
        list(prompt), tokens, [row[t].logprob for t, row in zip(tokens, output.logprobs)],
        [row[t].logprob for t, row in zip(prompt[1:], request.prompt_logprobs[1:])],
    ])
cache = llm.llm_engine.vllm_config.cache_config
json.dump([rows, cache.num_gpu_blocks * cache.block_size], open(sys.argv[1], "w"))
"""


def test_stock_export_in_unmodified_vllm(reference_model, tokenizer, prompts, tmp_path):
    model = copy.deepcopy(reference_model)
    generator = torch.Generator().manual_seed(5)
    pairs = sorted(torch.randperm(32, generator=generator)[:16].tolist())
    layers = [
        PairPlan.of_indices(
            [pairs, pairs],
            [sorted(torch.randperm(64, generator=generator)[:32].tolist()) for _ in range(2)],
        )
        for _ in attention_layers(model)
    ]
    plan = plan_of(model, layers)
    apply(model, plan).save_pretrained(tmp_path / "pruned")
    tokenizer.save_pretrained(tmp_path / "pruned")
    export_stock(tmp_path / "pruned", tmp_path / "plain")
    job = tmp_path / "job"
    job.write_text(json.dumps({"model": str(tmp_path / "plain"), "prompts": prompts}))
    environment = engine_environment({"VLLM_PLUGINS": ""})
    code = [sys.executable, "-c", _RUN, str(job)]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, cwd=os.sep)
    assert done.returncode == 0, done.stderr[-3000:]
    rows, capacity = json.loads(job.read_text())
    found = agreement(zeroed(model, plan), [Transcript(*row) for row in rows])
    print(f"{found.num_tokens} tokens, max |delta logprob| {found.max_logprob_error:.2e}")
    assert found.mismatched_tokens == 0
    # As in tests/serving/test_vllm.py: rounding of float32 in two engines.
    assert found.max_logprob_error <= 5e-5
    # 2 layers' worth of heads and channels: 6 layers x 2 heads x (32 + 32) channels x 4 bytes.
    assert capacity == pytest.approx(2**30 / (6 * 2 * 64 * 4), rel=0.01)
