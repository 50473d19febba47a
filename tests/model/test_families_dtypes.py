"""Saved in any type and loaded in any way, a QK-norm model is the one that was saved."""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from cases.family_cases import CASES
from cases.models import random_tokens
from rap.calibration.run import calibrate
from rap.checkpoint.load import load
from rap.methods import Rap
from rap.model import modeling
from rap.model.specs import NORM_MODES
from rap.surgery.apply import apply
from rap.surgery.write import apply_streamed

TOKENS = random_tokens(2, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Saved:
    """A pruned Qwen3 in memory, the same saved, and the same as streamed surgery wrote it."""

    small: Any
    folder: Path
    streamed: Path


def _remote(saved: Saved, **kwargs: Any) -> Any:
    """By the code in the checkpoint, as where the package is not installed."""
    name = f"modeling.{type(saved.small).__name__}"
    made = dynamic_module_utils.get_class_from_dynamic_module(name, saved.folder)
    assert made.__module__.startswith("transformers_modules.")
    return made.from_pretrained(saved.folder, **kwargs)


def _auto(saved: Saved, **kwargs: Any) -> Any:
    modeling.register()
    return AutoModelForCausalLM.from_pretrained(saved.folder, **kwargs)


LOADERS: dict[str, Callable[..., Any]] = {
    "rap": lambda saved, **kwargs: load(saved.folder, **kwargs),
    "auto": _auto,
    "remote": _remote,
    "streamed": lambda saved, **kwargs: load(saved.streamed, **kwargs),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype, str], Saved]:
    """Pruned models by saved type and norm mode, each made once."""
    case = next(case for case in CASES if case.name == "qwen3")
    made: dict[tuple[torch.dtype, str], Saved] = {}

    def make(dtype: torch.dtype, mode: str) -> Saved:
        if (dtype, mode) not in made:
            folder = tmp_path_factory.mktemp("saved")
            rows = {"norm_rows": 2} if mode == "rows" else {}
            method = Rap(retain=0.5, score="energy", qk_norm=mode, merge=1, **rows)
            model = case.model(dtype=dtype)
            model.save_pretrained(folder / "dense")
            statistics = calibrate(model, random_tokens(4, 16), method.needs_for(model))
            plan = method.plan(model, statistics)
            small = apply(model, plan)
            small.save_pretrained(folder / "small")
            apply_streamed(folder / "dense", plan, folder / "streamed")
            made[dtype, mode] = Saved(small, folder / "small", folder / "streamed")
        return made[dtype, mode]

    return make


def _ratios(model: Any) -> dict[str, torch.Tensor]:
    return {name: x for name, x in model.named_buffers() if name.endswith(".ratio")}


def _largest_difference(model: Any, other: Any) -> float:
    with torch.no_grad():
        return float((model(TOKENS).logits - other(TOKENS).logits).abs().max())


@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize("mode", NORM_MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loaded_as_it_was_saved(saved, monkeypatch, tmp_path, dtype, mode, how):
    model = saved(dtype, mode)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    again = LOADERS[how](model)
    expected, found = model.small.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    assert {name: x.dtype for name, x in found.items()} == {
        name: x.dtype for name, x in expected.items()
    }
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert bool(_ratios(again)) == (mode != "exact")
    assert _largest_difference(again, model.small) == 0


@pytest.mark.parametrize(
    "cast",
    [
        lambda saved, dtype: load(saved.folder, dtype=dtype),
        lambda saved, dtype: load(saved.folder).to(dtype),
        lambda saved, dtype: load(saved.folder).to(device="meta").to(dtype),
    ],
    ids=["loaded", "moved", "on meta"],
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_energy_ratios_stay_float32_in_every_type(saved, dtype, cast):
    """They are figures of the calibration: three digits of them would move every logit."""
    model = saved(torch.float32, "constant")
    again = cast(model, dtype)
    assert again.dtype == dtype
    expected, found = _ratios(model.small), _ratios(again)
    assert {x.dtype for x in found.values()} == {torch.float32}
    for name, ratio in found.items():
        assert ratio.is_meta or torch.equal(ratio, expected[name])


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What places tensors in vLLM; where that is missing, above stand-ins for its imports."""
    name = "rap.serving.vllm.projections"
    if importlib.util.find_spec("vllm") is not None:
        return importlib.import_module(name)
    engine = ("distributed", "distributed.utils", "model_executor.layers.linear")
    engine += ("model_executor.models.transformers.utils",)
    for part in ("vllm", *(f"vllm.{part}" for part in engine)):
        monkeypatch.setitem(sys.modules, part, mock.MagicMock())
    made = importlib.import_module(name)
    # Made of stand-ins: no other test may find them.
    del sys.modules[name]
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_engine_divides_by_the_same_ratios(saved, projections, dtype):
    """The second of two ranks has the second half of the heads, with their float32 ratios."""
    attention = saved(dtype, "constant").small.model.layers[1].self_attn
    placed, query, key = copy.deepcopy(attention), slice(3, 6), slice(1, 2)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for path, tensor, part in list(
            projections._by_heads(placed, query, key, key, torch.tensor([1]))
        ):
            projections._place(placed, path, tensor, part, path)
    finally:
        torch.set_default_dtype(usual)
    norm, expected = placed.q_norm, attention.q_norm
    for name, stored in expected.state_dict().items():
        own = getattr(norm, name)
        own.weight_loader(own, stored)
    x_BHTW = torch.randn(1, 6, 5, attention.key_width).to(dtype)
    assert (norm.weight.dtype, norm.ratio.dtype) == (dtype, torch.float32)
    assert torch.equal(norm(x_BHTW[:, query]), expected(x_BHTW)[:, query])
