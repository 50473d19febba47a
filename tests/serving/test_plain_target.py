"""Merged heads as plain checkpoints: the same logits, fewer KV heads, no package to load them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rap
from cases.command import run
from cases.models import random_tokens, tiny_model
from cases.plans import plan_of
from rap.planning.plan import PairPlan
from rap.serving.stock import export_stock, stock_model

SIZES: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 32, "hidden": 48, "layers": 3}
# The scale of W_q is rounded once, and the frequencies come from factors of float32.
ALIKE = {"rtol": 0, "atol": 2e-4}


def made(family: str, retain: float, **settings: Any) -> tuple[Any, Any]:
    model = tiny_model(family, **SIZES)
    method = rap.Rap(retain=retain, profile="stock", **settings)
    plan = method.plan(model, rap.calibrate(model, random_tokens(6, 48), method.needs))
    return model, rap.apply(model, plan)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(("retain", "merge"), [(0.5, 2), (0.5, 4), (0.25, 4), (0.75, 2)])
def test_the_plain_checkpoint_computes_the_same(
    family: str, retain: float, merge: int, tmp_path: Path
) -> None:
    _, small = made(family, retain, merge=merge)
    export_stock(small, tmp_path / "plain")
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), random_tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, small(ids).logits, **ALIKE)
    config = loaded.config
    assert (config.num_key_value_heads, config.head_dim) == (4 // merge, int(32 * merge * retain))
    assert config.model_type == {"qwen2": "llama"}.get(family, family)


def test_with_every_frequency_once_only_the_number_of_heads_differs() -> None:
    model = tiny_model(**SIZES)
    pairs, generator = 16, torch.Generator().manual_seed(0)
    unit = torch.eye(pairs, dtype=torch.float64).expand(4, -1, -1)
    mixes = torch.stack([unit, torch.zeros_like(unit)], -1)
    mixes = mixes * torch.rand(4, pairs, 1, 1, generator=generator, dtype=torch.float64)
    layer = PairPlan(
        frequency_GM=torch.arange(pairs, dtype=torch.int32).expand(2, -1).contiguous(),
        free_GN=torch.zeros(2, 0, dtype=torch.int32),
        key_mix_GMP2=mixes,
        query_mix_GMP2=mixes.clone(),
        value_down_GCD=torch.randn(4, 32, 32, generator=generator, dtype=torch.float64),
        value_up_GDC=torch.randn(4, 32, 32, generator=generator, dtype=torch.float64),
    )
    small = rap.apply(model, plan_of(model, [layer] * 3))
    plain = stock_model(small)
    found, dense = plain.config.to_dict(), model.config.to_dict()
    differ = {name for name in dense if found.get(name) != dense[name]}
    assert differ - {"dtype", "transformers_version"} == {"num_key_value_heads"}
    assert plain.config.num_key_value_heads == 2
    ids = random_tokens(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, small(ids).logits, rtol=0, atol=1e-5)


def test_one_command_writes_what_loads_without_the_package(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("compress", "bundled", "--retain", 0.5, "--target", "plain", "--evaluate", "none")
    result = run(*given, "--windows", 4, "--window", 128, "-o", out)
    assert result.code == 0, result.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"]) == ("llama", 1)
    report = json.loads((out / "rap_report.json").read_text())
    assert report["kept_fraction"] == 0.5
    assert "import rap" not in (out / "README.md").read_text()
    code = (
        "import sys; sys.modules['rap'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('It was', return_tensors='pt').input_ids\n"
        "print(model.generate(ids, max_new_tokens=4).shape[1] - ids.shape[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0
    again = run(*given, "--windows", 4, "--window", 128, "-o", out)
    assert "already exists" in again.err or "--force" in again.err


def test_methods_without_merging_are_refused_for_the_target(tmp_path: Path) -> None:
    given = ("compress", "bundled", "--retain", 0.5, "--target", "plain", "-o", tmp_path / "out")
    assert "needs a method with" in run(*given, "--method", "palu").err
    assert "decides merge" in run(*given, "--method", "rap:merge=2").err
