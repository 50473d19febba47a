"""Starting vLLM's OpenAI-compatible server on a checkpoint, and asking it for one completion."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.load import is_pruned, load_config
from .engine import EngineError, engine_environment, failure, require_vllm
from .refusals import check_served

READY_SECONDS = 600  # vLLM loads and compiles before it answers
POLL_SECONDS = 0.5
# Whatever proxy the environment names, the server is on this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Server:
    """What to serve and where. `arguments` are passed on to vLLM as they are.

    The API key goes through the environment, so that no process list and no log shows it.
    """

    source: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    arguments: Sequence[str] = ()

    @property
    def command(self) -> list[str]:
        """The command line, without any secret."""
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self.source, "--host", self.host, "--port", str(self.port)),
            *self.arguments,
        ]

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Environment of the server process."""
        return {**base, "VLLM_API_KEY": self.api_key} if self.api_key else dict(base)


def runs_in(source: str | Path) -> str:
    """Name the code that runs a checkpoint in vLLM, for people.

    Raises EngineError without vLLM, RapError for a checkpoint that vLLM does not serve.
    """
    require_vllm()
    config = load_config(source)
    if not is_pruned(config):
        return "vLLM, without the plugin"
    check_served(config)
    return "vLLM's backend for models of transformers"


def serve(server: Server) -> None:
    """Become the server: this process is replaced, so signals reach vLLM. Does not return."""
    runs_in(server.source)
    sys.stdout.flush()
    os.execve(sys.executable, server.command, server.environment(os.environ))


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """The server in a subprocess, ready when the block starts and gone when it ends.

    Raises EngineError: with vLLM's own message if it dies, or if it is not ready in READY_SECONDS.
    """
    runs_in(server.source)
    base = engine_environment(
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, eager="--enforce-eager" in server.arguments
    )
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            server.command, env=server.environment(base), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_ready(server, process, time.monotonic() + READY_SECONDS)
            yield server
        except EngineError:
            # One that is still running says itself what is wrong; its sockets end first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            if process.poll() is None:
                raise
            log.seek(0)
            raise failure(log.read()) from None
        finally:
            _stop(process)


def complete(server: Server, prompt: str) -> dict[str, Any]:
    """One greedy completion over HTTP, as the API returns it. Raises EngineError if it fails."""
    try:
        name = _ask(server, "/v1/models")["data"][0]["id"]  # --served-model-name changes it
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return _ask(server, "/v1/completions", body)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise EngineError(f"the server did not complete a prompt: {error}") from error


def _ask(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(server.url + path, data, headers)
    with _DIRECT.open(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: Server, process: subprocess.Popen, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError("the server ended")
        with contextlib.suppress(OSError), _DIRECT.open(f"{server.url}/health", timeout=10):
            return
        time.sleep(POLL_SECONDS)
    raise EngineError("the server is not ready in time: start it without --check, and watch it")


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
