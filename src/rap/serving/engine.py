"""Running vLLM from the core's side: always in a subprocess of this Python, never imported."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model.errors import RapError

GIB = 2**30
TIMEOUT = 1200  # seconds
_LOG_LINES = 30


class EngineError(RapError):
    """A serving engine that is missing, rejected the model, or died."""


@dataclass(frozen=True)
class Transcript:
    """What an engine made of one prompt: greedy tokens, and log-probabilities (natural log).

    `logprobs` belong to `tokens`, `prompt_logprobs` to the prompt from its second token on (empty
    if they were not asked for). `cached_tokens` of the prompt came from the prefix cache.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    cached_tokens: int = 0


@dataclass(frozen=True)
class Round:
    """Prompts that an engine runs together."""

    prompts: Sequence[Sequence[int]]
    max_tokens: int = 16
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class EngineRun:
    """Transcripts of every round, and how many tokens the engine's KV cache holds."""

    rounds: list[list[Transcript]]
    capacity_tokens: int
    start_seconds: float
    version: str


def require_vllm() -> None:
    """Raise EngineError unless vLLM is installed (looked for, not imported)."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed: pip install vllm")


def engine_environment(
    settings: Mapping[str, str] | None = None, *, eager: bool = True
) -> dict[str, str]:
    """The environment of an engine that is only checked: quiet and, if eager, compiling nothing."""
    # Without this, the sampler of an eager engine alone compiles for half a minute.
    compiling = {"TORCHDYNAMO_DISABLE": "1"} if eager else {}
    return {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **compiling,
        **(settings or {}),
    }


def run_vllm(source: str | Path, rounds: Sequence[Round], **engine: Any) -> EngineRun:
    """Start vLLM on a checkpoint, run the rounds, and stop it.

    `engine` goes to `vllm.LLM` (eager, float32 and a cache of 1 GiB unless told otherwise). Raises
    EngineError with vLLM's own message.
    """
    require_vllm()
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": GIB,
        "disable_log_stats": True,
    }
    job: dict[str, Any] = {
        "engine": {"model": str(source), **defaults, **engine},
        "rounds": [vars(each) for each in rounds],
    }
    surroundings = engine_environment(eager=job["engine"]["enforce_eager"])
    result, log = run_worker(["-m", "rap.serving.vllm.worker"], job, "vLLM", surroundings)
    if "error" in result or not result:
        raise failure(log, result.get("error", ""))
    return EngineRun(
        rounds=[[Transcript(**each) for each in one] for one in result["rounds"]],
        capacity_tokens=result["capacity_tokens"],
        start_seconds=result["start_seconds"],
        version=result["vllm"],
    )


def run_worker(
    worker: Sequence[str],
    job: Mapping[str, Any],
    name: str,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], str]:
    """Run a job in an engine's worker: what it answered, nothing if it ended before, and its log.

    `worker` are this Python's arguments; it takes the paths of two JSON files, JOB and RESULT.
    Raises EngineError as `run_engine`.
    """
    with tempfile.TemporaryDirectory(prefix="rap-engine-") as folder:
        paths = [Path(folder) / file for file in ("job.json", "result.json")]
        paths[0].write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, *worker, *map(str, paths)]
        log = run_engine(command, name, TIMEOUT, environment)
        result = json.loads(paths[1].read_text(encoding="utf-8")) if paths[1].exists() else {}
    return result, log


def run_engine(
    command: Sequence[str],
    name: str,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run an engine's process to its end; all it printed.

    Raises EngineError if that takes more than `timeout` seconds. Whatever ends the wait ends the
    processes that the engine started too.
    """
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=timeout)[0]
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise EngineError(
                f"{name} did not answer in {timeout:,.0f} seconds: try a smaller model, or fewer "
                "and shorter prompts"
            ) from error


def failure(log: str, error: str = "") -> EngineError:
    """Why vLLM failed: this package's own sentence if the log has one, else its first error."""
    serious = [line for line in log.splitlines() if " WARNING " not in line]
    errors = [match[1] for line in serious if (match := re.search(r"\b(\w+Error: .*)", line))]
    for line in errors:
        if line.startswith(("CheckpointError: ", "UnsupportedModelError: ")):
            return EngineError(f"vLLM refused the model: {line.partition(': ')[2]}")
    if errors or error:
        return EngineError(f"vLLM failed: {(errors or [error])[0]}")
    return EngineError(f"vLLM died without a result; its last lines:\n{last_lines(log)}")


def last_lines(log: str) -> str:
    """The end of an engine's log, for people."""
    return "\n".join(log.strip().splitlines()[-_LOG_LINES:])
