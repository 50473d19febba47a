"""Recovery in processes of their own: killed with SIGKILL, and shared by two of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from accelerate import PartialState
from cases.models import tiny_model, random_tokens
from cases.plans import random_plan
from rap import apply
from rap.model.fingerprint import fingerprint_model
from rap.recovery import trainer
from rap.recovery.config import RecoveryConfig
from rap.recovery.distillation import distill

settings = json.loads(sys.argv[1])
if settings["slow"]:
    import time
    step = trainer.DistillationTrainer.compute_loss
    def compute_loss(self, *args, **kwargs):
        Path(settings["work"], f"step-{self.state.global_step}").touch()
        time.sleep(settings["slow"])
        return step(self, *args, **kwargs)
    trainer.DistillationTrainer.compute_loss = compute_loss

dense = tiny_model()
small = apply(dense, random_plan(dense, ((4, 8), (4, 8))))
windows, validation = random_tokens(16, 24, seed=1), random_tokens(4, 24, seed=2)
config = RecoveryConfig(
    steps=8, global_batch=8, micro_batch=2, evaluate_every=2, learning_rate=5e-3,
    schedule="cosine", dropout=settings["dropout"],
)
work = Path(settings["work"]) if settings["work"] else None
found = distill(small, dense, windows, config, validation=validation, work=work)
report = {k: v for k, v in found.report.items() if k != "seconds"}
report["rank"] = PartialState().process_index
line = json.dumps(report | {"fingerprint": fingerprint_model(found.model)})
Path(settings["out"] + f".{report['rank']}").write_text(line)
"""
FITTING = """
import json, os, sys
from pathlib import Path
import rap, torch
from accelerate import PartialState
from cases.models import tiny_model
from cases.plans import random_plan
from rap.model.fingerprint import fingerprint_model
from rap.recovery import stages
from rap.recovery.config import RecoveryConfig
from rap.recovery.layer_fit import FitConfig

rank = PartialState(cpu=True).process_index
fit = stages.fit_layers
def of_another_device(model, *args, **kwargs):
    found = fit(model, *args, **kwargs)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1 + rank * 1e-6)
    return found
stages.fit_layers = of_another_device

dense = tiny_model(vocab_size=4096)
small = rap.apply(dense, random_plan(dense, ((4, 8), (4, 8))))
sizes = {"window": 32, "num_windows": 12, "validation_windows": 4}
config = RecoveryConfig(
    **sizes, steps=2, global_batch=4, micro_batch=2, evaluate_every=2, schedule="cosine",
    products="float32",
)
found, report = stages.recover_stage(
    small, dense, rap.load_tokenizer("bundled"), "fit+fast", config=config,
    fit=FitConfig(**sizes, steps=4, batch=2), output=Path(sys.argv[1], "out"),
)
kept = {"before": report["distillation"]["fingerprint_before"], "after": fingerprint_model(found)}
Path(sys.argv[1], f"rank-{rank}").write_text(json.dumps(kept))
"""
TESTS = Path(__file__).parents[1]


def _environment(**more):
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def _settings(out, work=None, slow=0.0, dropout=0.05):
    return json.dumps(
        {"out": str(out), "work": str(work) if work else "", "slow": slow, "dropout": dropout}
    )


def _start(settings, script=SCRIPT, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", script, settings],
        env=_environment(**environment),
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process):
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors


def _result(out, rank=0):
    return json.loads(Path(f"{out}.{rank}").read_text())


def _wait_for(path, process):
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_weights(tmp_path):
    whole = _start(_settings(tmp_path / "whole"))
    work = tmp_path / "work"
    work.mkdir()
    killed = _start(_settings(tmp_path / "killed", work, slow=0.2))
    _wait_for(work / "step-5", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("killed*"))
    assert list(work.glob("checkpoint-*"))
    again = _start(_settings(tmp_path / "again", work))
    _finish(whole)
    _finish(again)
    assert _result(tmp_path / "again") == _result(tmp_path / "whole")


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _start_two(settings, script=SCRIPT):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [_start(settings, script, **shared, **rank) for rank in ranks]


@pytest.mark.slow
def test_two_processes_follow_the_loss_of_one(tmp_path):
    # Dropout draws other numbers in another process: the comparison is without it.
    one = _start(_settings(tmp_path / "one", dropout=0.0))
    two = _start_two(_settings(tmp_path / "two", dropout=0.0))
    for process in (one, *two):
        _finish(process)
    first, second = _result(tmp_path / "one"), _result(tmp_path / "two")
    assert (first["processes"], second["processes"]) == (1, 2)
    assert _result(tmp_path / "two", rank=1)["fingerprint"] == second["fingerprint"]
    curve = [[entry["loss"] for entry in r["history"] if "loss" in entry] for r in (first, second)]
    assert len(curve[0]) == len(curve[1]) == 8
    assert max(abs(a - b) for a, b in zip(*curve, strict=True)) < 1e-5 * max(curve[0])
    # The curve moves by far more than that, so the comparison can fail.
    assert max(curve[0]) - min(curve[0]) > 1e-2


@pytest.mark.slow
def test_two_processes_distil_what_the_main_one_fitted(tmp_path):
    """Devices round differently, and a student of its own would be another run to the second."""
    for process in _start_two(str(tmp_path), FITTING):
        _finish(process)
    first, second = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first["before"] != first["after"]
