"""Running llama.cpp from the core's side: always in a subprocess, never imported."""

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine import LOG_LINES, EngineError, run_engine

WORKER = Path(__file__).with_name("worker.py")
CACHES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0")
_CACHE_LINE = re.compile(
    r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells.*K \(\w+\): +([\d.]+) MiB, "
    r"V \(\w+\): +([\d.]+) MiB"
)

_REASON = re.compile(r"(?:error loading model: |llama_init_from_model: |GGML_ASSERT).*")


@dataclass(frozen=True)
class Completion:
    """Greedy tokens of one prompt; per token its log-probability and the likeliest tokens'.

    Both are empty where a token ended within a character, for which the server reports none.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]
    timings: dict[str, float]


@dataclass(frozen=True)
class Asked:
    """What to ask of the engine. `hidden` excludes all the others: it is another kind of server."""

    prompts: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    chat: Sequence[Mapping[str, str]] = ()
    hidden: Sequence[Sequence[int]] = ()
    max_tokens: int = 16
    alternatives: int = 64


@dataclass(frozen=True)
class Answered:
    """The engine's answers, its version, and what its log says about the cache."""

    version: str
    cache_bytes: float
    cache_cells: int
    completions: list[Completion] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    chat: str = ""
    hidden: list[list[list[float]]] = field(default_factory=list)
    log: str = ""


def require_xllamacpp() -> None:
    """Raise EngineError unless xllamacpp is installed (looked for, not imported)."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise EngineError("llama.cpp is not installed here: pip install xllamacpp")


def run_llamacpp(
    file: str | Path,
    asked: Asked,
    *,
    context: int = 1024,
    cache: str = "f16",
    flash_attention: str = "auto",
    threads: int = 1,
    timeout: float = 1200,
) -> Answered:
    """Start llama.cpp on a GGUF file, ask it, and stop it.

    `cache` is the type of keys and values, one of CACHES. Without flash attention ("disabled") the
    CPU backend computes attention in float32; with it, in half precision. Raises EngineError with
    llama.cpp's own reason if it refuses the file, or ends.
    """
    require_xllamacpp()
    if cache not in CACHES:
        raise EngineError(f"unknown cache type {cache!r}: use one of {', '.join(CACHES)}")
    job = {
        "file": str(file),
        "context": context,
        "cache": cache,
        "flash_attention": flash_attention,
        "threads": threads,
        # One batch, so that a whole prompt of embeddings fits and prefill is not cut up.
        "batch": max(512, *(len(prompt) for prompt in asked.hidden), 0),
        **vars(asked),
    }
    with tempfile.TemporaryDirectory(prefix="rap-llamacpp-") as folder:
        paths = [Path(folder) / name for name in ("job.json", "result.json")]
        paths[0].write_text(json.dumps(job), encoding="utf-8")
        log = run_engine([sys.executable, str(WORKER), *map(str, paths)], "llama.cpp", timeout)
        result = json.loads(paths[1].read_text(encoding="utf-8")) if paths[1].exists() else None
    if result is None:
        raise failure(log)
    return _answered(result, log)


def failure(log: str) -> EngineError:
    """Why llama.cpp ended: its first line about an error, or its last lines."""
    for line in log.splitlines():
        found = _REASON.search(line)
        if found and "failed to initialize" not in line:
            return EngineError(f"llama.cpp refused the file: {found[0].strip()}")
    last = "\n".join(log.strip().splitlines()[-LOG_LINES:])
    return EngineError(f"llama.cpp ended without a result; its last lines:\n{last}")


def _answered(result: dict[str, Any], log: str) -> Answered:
    sizes = _CACHE_LINE.search(log)
    if sizes is None:
        raise EngineError(
            "llama.cpp's log has no line about its KV cache: this version of xllamacpp is not known"
        )
    return Answered(
        version=result["version"],
        # The halves carry two decimals each, as the sum does.
        cache_bytes=(float(sizes[3]) + float(sizes[4])) * 2**20,
        cache_cells=int(sizes[2]),
        completions=[Completion(**each) for each in result.get("completions", [])],
        texts=result.get("texts", []),
        chat=result.get("chat", {}).get("content", ""),
        hidden=result.get("hidden", []),
        log=log,
    )
