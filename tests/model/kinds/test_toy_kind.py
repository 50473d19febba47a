"""A kind of attention that is one file and one row does everything that pairs do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rap
from cases import toy_kind
from cases.models import random_tokens, tiny_model
from rap.checkpoint.stored import StoredModel
from rap.methods import METHODS
from rap.model.errors import PlanError, UnsupportedModelError
from rap.model.modeling import KINDS
from rap.pipeline import save
from rap.planning.plan import Plan
from rap.recovery.layer_fit import FitConfig, LayerProblem
from rap.runtime.sources import StoredLayers
from rap.serving.layout import cache_layouts
from rap.serving.stock import slots_of_all_heads
from rap.surgery.write import apply_streamed

RETAIN = 0.5
FIT = FitConfig(window=32, num_windows=16, steps=40, validation_windows=4, rate=0.01)
TEXT: dict[str, Any] = {"num_windows": 4, "window": 48, "evaluate": None}
SCRIPT = """
import sys
from cases import toy_kind
from model.kinds.test_toy_kind import compress_streamed
from rap.methods import METHODS
from rap.model.modeling import KINDS

METHODS["toy"], KINDS["toy"] = toy_kind.Toy, toy_kind.KIND
compress_streamed(*sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one row."""
    monkeypatch.setitem(KINDS, "toy", toy_kind.KIND)
    monkeypatch.setitem(METHODS, "toy", toy_kind.Toy)


@pytest.fixture
def planned() -> tuple[Any, Plan]:
    model = tiny_model(hidden=48, layers=3)
    statistics = rap.calibrate(model, random_tokens(4, 16), {"inputs"})
    return model, METHODS["toy"](retain=RETAIN).plan(model, statistics)


def compress_streamed(dense: str, out: str) -> None:
    """What the process that is killed does, and the one that resumes."""
    options: dict[str, Any] = {"stream": True, "recover": "fit", "fit": FIT, **TEXT}
    rap.compress(dense, RETAIN, out, method="toy", **options)


def test_it_is_planned_applied_measured_and_loaded(planned: tuple, tmp_path: Path) -> None:
    model, plan = planned
    small = rap.apply(model, plan)
    assert plan.kept_fraction == RETAIN
    measured = rap.footprint(small).kv_bytes_per_token / rap.footprint(model).kv_bytes_per_token
    assert measured == RETAIN
    save(small, plan, tmp_path / "small", dense=model)
    assert Plan.load(tmp_path / "small") == plan
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "small"), random_tokens(2, 12)
    with torch.no_grad():
        logits = small(ids).logits
        assert torch.equal(loaded(ids).logits, logits)
        assert not torch.allclose(model(ids).logits, logits)
    whole = METHODS["toy"](retain=1.0)
    full = rap.apply(model, whole.plan(model, rap.calibrate(model, ids, {"inputs"})))
    with torch.no_grad():
        torch.testing.assert_close(full(ids).logits, model(ids).logits, rtol=0, atol=1e-3)


def test_it_streams_the_same_bytes(planned: tuple, tmp_path: Path) -> None:
    model, plan = planned
    model.save_pretrained(tmp_path / "dense")
    apply_streamed(tmp_path / "dense", plan, tmp_path / "streamed")
    save(rap.apply(model, plan), plan, tmp_path / "memory", dense=model)
    found, expected = (tmp_path / name / "model.safetensors" for name in ("streamed", "memory"))
    assert found.read_bytes() == expected.read_bytes()
    source = StoredLayers(StoredModel(tmp_path / "dense"))
    statistics = rap.calibrate(model, random_tokens(4, 16), {"inputs"})
    assert METHODS["toy"](retain=RETAIN).plan_from(source, statistics) == plan


@pytest.mark.parametrize("engine", ["vllm", "plain"])
def test_each_engine_rejects_it_with_its_own_sentence(planned: tuple, engine: str) -> None:
    small = rap.apply(*planned)
    ask = {"vllm": lambda: cache_layouts(small.config), "plain": lambda: slots_of_all_heads(small)}
    with pytest.raises(UnsupportedModelError, match=toy_kind.SENTENCES[engine]):
        ask[engine]()


def test_without_its_row_plans_and_checkpoints_are_refused(
    planned: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = planned
    save(rap.apply(model, plan), plan, tmp_path / "small", dense=model)
    monkeypatch.delitem(KINDS, "toy")
    with pytest.raises(PlanError, match="kind 'toy', which this release does not know"):
        Plan.load(tmp_path / "small")
    with pytest.raises(rap.RapError, match="attention of kind 'toy'"):
        rap.load(tmp_path / "small")


def test_it_is_fitted_and_resumes_after_sigkill(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(hidden=48, layers=3, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    dense, out = str(tmp_path / "dense"), str(tmp_path / "out")
    tests = str(Path(__file__).parents[2])
    paths = os.pathsep.join([str(Path(rap.__file__).parents[1]), tests])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, dense, out], env={**os.environ, "PYTHONPATH": paths}
    )
    first = tmp_path / ".out.recovery" / "fit" / "layer-000.safetensors"
    deadline = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not Path(out).exists()
    solve, solved = LayerProblem.solve, []
    with monkeypatch.context() as watched:
        watched.setattr(LayerProblem, "solve", lambda x: solved.append(x.index) or solve(x))
        compress_streamed(dense, out)
    assert 0 not in solved
    assert 2 in solved
    compress_streamed(dense, str(tmp_path / "whole"))
    found, expected = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.rap["layers"][0] == {"kind": "toy", "keys": 8, "values": 8}
