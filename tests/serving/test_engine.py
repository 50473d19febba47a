"""What the package says when a serving engine fails: read from logs, without an engine."""

import pytest

from rap.serving.engine import failure

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
