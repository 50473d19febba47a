"""What the package says when a serving engine fails: read from logs, without an engine."""

import json

import pytest

from rap.serving import engine
from rap.serving.engine import EngineError, failure

WORKER = "(VllmWorker-0 pid=7) ERROR 11-20 20:14:21 [multiproc_executor.py:953] "
NOISE = "(APIServer pid=6) WARNING 11-20 [system_utils.py:255] such as `OSError: [Errno 24]`\n"


@pytest.mark.parametrize(
    ("log", "error", "sentence"),
    [
        (
            f"{NOISE}{WORKER}ValueError: no memory\nRuntimeError: Engine core failed\n",
            "RuntimeError: Engine core failed",
            "vLLM failed: ValueError: no memory",
        ),
        (
            f"{WORKER}RuntimeError: late\nrap.errors.CheckpointError: layer 3 is wrong\n",
            "",
            "vLLM refused the model: layer 3 is wrong",
        ),
        (NOISE, "KeyError: 'x'", "vLLM failed: KeyError: 'x'"),
        ("Killed\n", "", "vLLM died without a result; its last lines:\nKilled"),
    ],
)
def test_failure_names_the_cause(log, error, sentence):
    assert str(failure(log, error)) == sentence


def test_an_engine_has_the_environment_of_this_process(monkeypatch):
    """Two ranks on one machine need one, which only the tests of real engines would miss."""
    started = {}

    def run_engine(command, name, timeout, surroundings):
        with open(command[-2], encoding="utf-8") as job:
            started.update(surroundings=surroundings, job=json.load(job))
        return "Killed\n"

    monkeypatch.setenv("RANKS", "2")
    monkeypatch.setattr(engine, "require_vllm", lambda: None)
    monkeypatch.setattr(engine, "run_engine", run_engine)
    with pytest.raises(EngineError, match="died without a result"):
        engine.run_vllm("model", [], tensor_parallel_size=2)
    assert started["surroundings"]["RANKS"] == "2"
    assert started["job"]["engine"]["tensor_parallel_size"] == 2
