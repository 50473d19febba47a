"""llama.cpp in a separate process: `python worker.py JOB RESULT`, any Python with xllamacpp.

Nothing of this package is imported, so that what is checked is the engine alone. JOB is a JSON
file: `file`, a GGUF; `context`, `cache` (a type such as f16), `flash_attention`, `threads`; and
what to do: `prompts` (token ids) of which `max_tokens` are continued greedily, each with the
log-probabilities of `alternatives` tokens; `hidden`, prompts whose final hidden states are wanted;
`texts` to tokenize; `chat`, messages to answer. RESULT receives the answers under the same names.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, ask it everything, and describe what it did."""
    server = xllamacpp.Server(_parameters(job))
    answers: dict[str, Any] = {"version": xllamacpp.__version__}
    if job.get("hidden"):
        answers["hidden"] = [_hidden(server, prompt) for prompt in job["hidden"]]
        return answers  # a server of embeddings completes nothing
    answers["completions"] = [_complete(server, job, prompt) for prompt in job.get("prompts", [])]
    answers["texts"] = [_tokenize(server, text) for text in job.get("texts", [])]
    if job.get("chat"):
        body = {"messages": job["chat"], "max_tokens": job["max_tokens"], "temperature": 0}
        answers["chat"] = _post(server, "/v1/chat/completions", body)["choices"][0]["message"]
    return answers


def _parameters(job: dict[str, Any]) -> Any:
    wanted = xllamacpp.CommonParams()
    wanted.model.path = job["file"]
    wanted.n_ctx = job["context"]
    wanted.n_batch = wanted.n_ubatch = job.get("batch", 512)
    wanted.n_parallel = 1
    wanted.n_gpu_layers = 0
    wanted.warmup = False
    wanted.verbosity = 4  # from here on the log says how large the cache is
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = job["threads"]
    cache = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{job['cache'].upper()}")
    wanted.cache_type_k = wanted.cache_type_v = cache
    flash = f"LLAMA_FLASH_ATTN_TYPE_{job['flash_attention'].upper()}"
    wanted.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, flash)
    if job.get("hidden"):
        wanted.embedding = True
        wanted.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
        wanted.embd_normalize = -1
    return wanted


def _complete(server: Any, job: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "n_predict": job["max_tokens"],
        "n_probs": job["alternatives"],
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
        "ignore_eos": True,
    }
    answer = _post(server, "/completion", body)
    rows = answer.get("completion_probabilities", [])
    # The server leaves out tokens that end within a character: then no row is known to be whose.
    rows = rows if len(rows) == len(answer["tokens"]) else []
    return {
        "prompt": prompt,
        "tokens": answer["tokens"],
        "logprobs": [row["logprob"] for row in rows],
        "alternatives": [
            [(each["id"], each["logprob"]) for each in row["top_logprobs"]] for row in rows
        ],
        "timings": answer["timings"],
    }


def _hidden(server: Any, prompt: list[int]) -> list[list[float]]:
    answer = _post(server, "/embeddings", {"content": prompt, "embd_normalize": -1})
    rows: list[list[float]] = answer[0]["embedding"]
    return rows


def _tokenize(server: Any, text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": False}
    tokens: list[int] = _post(server, "/tokenize", body)["tokens"]
    return tokens


def _post(server: Any, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.listening_address + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    # Whatever proxy the environment names, the server is in this process.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request) as response:
        return json.load(response)


def main(job: Path, result: Path) -> None:
    """Run the job file."""
    outcome = run(json.loads(job.read_text(encoding="utf-8")))
    result.write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
