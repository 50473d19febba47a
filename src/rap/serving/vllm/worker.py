"""A vLLM engine in a separate process: `python -m rap.serving.vllm.worker JOB RESULT`.

JOB is a JSON file: `engine`, the arguments of `vllm.LLM`, and `rounds`, a list of objects with
`prompts` (token ids), `max_tokens` and `prompt_logprobs`. RESULT receives what was generated in
every round, and the capacity of the KV cache; or `error`, when the engine refuses the model.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams

_BOUNDS = ("sliding_window", "attention_chunk_size")  # what a group keeps at most, in tokens


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, run every round through it, and describe what it did."""
    started = time.monotonic()
    llm = LLM(**job["engine"])
    ready = time.monotonic()
    return {
        "vllm": vllm.__version__,
        "start_seconds": ready - started,
        "capacity_tokens": _capacity(llm.llm_engine),
        "rounds": [_round(llm, each) for each in job["rounds"]],
    }


def _capacity(engine: Any) -> int:
    """Tokens that the KV cache holds of a context far longer than any window.

    Layers with and without a window are groups that draw their blocks from one pool; the former
    give back what has left the window, unless the model has no others.
    """
    cache = engine.engine_core.engine_core.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    growing = [spec for spec in specs if not any(getattr(spec, name, None) for name in _BOUNDS)]
    return int(cache.num_blocks / sum(1 / spec.block_size for spec in growing or specs))


def _round(llm: LLM, job: dict[str, Any]) -> list[dict[str, Any]]:
    # Prompt log-probabilities make vLLM compute the whole prompt: such a round hits no prefix.
    settings = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=0 if job.get("prompt_logprobs") else None,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    return [_transcript(request) for request in llm.generate(prompts, settings, use_tqdm=False)]


def _transcript(request: Any) -> dict[str, Any]:
    prompt, output = list(request.prompt_token_ids), request.outputs[0]
    tokens = list(output.token_ids)
    before = request.prompt_logprobs or []
    return {
        "prompt": prompt,
        "tokens": tokens,
        "logprobs": [
            row[token].logprob for token, row in zip(tokens, output.logprobs, strict=True)
        ],
        "prompt_logprobs": [
            row[token].logprob for token, row in zip(prompt[1:], before[1:], strict=False)
        ],
        "cached_tokens": request.num_cached_tokens or 0,
    }


def main(job: Path, result: Path) -> None:
    """Run the job file; an error of an engine is a result too."""
    try:
        outcome = run(json.loads(job.read_text(encoding="utf-8")))
    except (ValueError, RuntimeError) as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
        result.write_text(json.dumps(outcome), encoding="utf-8")
        raise
    result.write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
