"""`rap serve`: vLLM's OpenAI-compatible server over HTTP, with the client that users have."""

import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rap.serving.engine import Transcript, engine_environment
from rap.serving.serve import Server, free_port
from rap.serving.verify import agreement

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

FLAGS = ["--max-model-len", "512", "--dtype", "float32", "--enforce-eager"]
SMALL_CACHE = ["--kv-cache-memory-bytes", "200M"]
KEY = "a-test-key"


@pytest.fixture(scope="module")
def server(aligned, tmp_path_factory):
    """`rap serve` as a user runs it, in the default process layout of vLLM."""
    target = Server(str(aligned.path), port=free_port(), api_key=KEY)
    log = tmp_path_factory.mktemp("server") / "log"
    command = [str(Path(sys.executable).with_name("rap")), "serve", str(aligned.path)]
    command += ["--port", str(target.port), "--api-key", KEY, "--", *FLAGS, *SMALL_CACHE]
    environment = engine_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "COLUMNS": "200"})
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            _wait(target, process, log)
            yield target, log
        finally:
            process.terminate()
            process.wait(60)


def _wait(target, process, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{target.url}/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail("the server is not ready after five minutes")


@pytest.fixture(scope="module")
def client(server):
    import openai

    return openai.OpenAI(base_url=f"{server[0].url}/v1", api_key=KEY, max_retries=0)


def test_flags_are_printed_first_and_hold_no_secret(server):
    first = server[1].read_text().splitlines()[0]
    assert f"--host 127.0.0.1 --port {server[0].port} --max-model-len 512" in first
    assert KEY not in server[1].read_text()
    assert os.environ.get("VLLM_API_KEY") is None


def test_concurrent_requests_agree_with_the_reference(server, client, aligned, prompts):
    def ask(prompt):
        answer = client.completions.create(
            model=server[0].source,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]
        return Transcript(prompt, answer.token_ids, answer.logprobs.token_logprobs, [])

    with ThreadPoolExecutor(8) as pool:
        found = agreement(aligned.reference, pool.map(ask, [*prompts, *prompts]))
    assert (found.num_tokens, found.mismatched_tokens) == (8 * 2 * len(prompts), 0)
    assert found.max_logprob_error <= 5e-5


def test_streamed_text_is_the_whole_text(server, client):
    request = {"model": server[0].source, "prompt": "It was", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**request).choices[0].text
    parts = [part.choices[0].text for part in client.completions.create(**request, stream=True)]
    assert len(parts) > 2
    assert "".join(parts) == whole


def test_bad_requests_are_answered_and_the_server_lives_on(server, client):
    import openai

    source = server[0].source
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=source, prompt=[5] * 600, max_tokens=8)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="It", max_tokens=1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(model=source, prompt="It")
    assert client.completions.create(model=source, prompt="It", max_tokens=1).choices[0].text
