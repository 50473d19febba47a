"""Options of `rap serve` and `rap verify` reach what they are for, without a serving engine."""

import contextlib

import pytest

from cases.command import error_violations, run
from cases.models import tiny_model
from rap.cli import serving as command_line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def started(monkeypatch):
    """The servers that were started: none is, and each completes a prompt."""
    servers = []

    @contextlib.contextmanager
    def running(server):
        servers.append(server)
        yield server

    monkeypatch.setattr(command_line, "runs_in", lambda source: "nothing")
    monkeypatch.setattr(command_line, "running", running)
    answer = {"choices": [{"text": "a time"}]}
    monkeypatch.setattr(command_line, "complete", lambda server, prompt: answer)
    return servers


@pytest.mark.parametrize(
    ("asked", "passed_on"),
    [
        ((), ()),
        (("--tensor-parallel-size", "1"), ()),
        (("--tensor-parallel-size", "2"), ("--tensor-parallel-size", "2")),
        (
            ("--tensor-parallel-size", "2", "--", "--max-model-len", "64"),
            ("--max-model-len", "64", "--tensor-parallel-size", "2"),
        ),
    ],
    ids=["none", "one device", "two devices", "beside others"],
)
def test_the_server_is_told_of_devices(checkpoint, started, asked, passed_on):
    result = run("serve", checkpoint, "--check", *asked)
    assert result.code == 0, result.err
    (server,) = started
    assert tuple(server.arguments) == passed_on
    (printed,) = [line for line in result.err.splitlines() if "api_server" in line]
    words = printed.split()
    assert tuple(words[words.index("--port") + 2 :]) == passed_on
    assert "completed 'a time': the server works" in result.err


def test_llama_cpp_has_types_of_its_own(checkpoint):
    result = run("verify", checkpoint, "--engine", "llamacpp", "--dtype", "int4")
    assert error_violations(result) == []
    assert "'int4': use one of float32, float16, bfloat16" in result.err
