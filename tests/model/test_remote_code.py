"""A saved directory carries its own code: it loads where the package is not installed."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.calibration.run import calibrate
from rap.methods import Rap
from rap.surgery.apply import apply

WIDTHS = [(3, 5), None, (5, 9)]

# Isolated from this interpreter's paths, and any import of the package fails as if it were absent.
_PRELUDE = """
import sys, json
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "rap" or name.startswith("rap."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
try:
    import rap
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the package can be imported: this would test nothing")
import torch
torch.set_num_threads(1)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
source, folder = sys.argv[1:]
"""
_LOADED = """
tokens = load_file(f"{folder}/tokens.safetensors")["tokens"]
results = {}
for name in ("first", "second"):
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    capped = getattr(model.config, "attn_logit_softcapping", None)  # which SDPA leaves out
    assert model.config._attn_implementation == ("eager" if capped else "sdpa")
    with torch.no_grad():
        results[f"{name}.logits"] = model(tokens).logits
    results[f"{name}.tokens"] = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False,
        pad_token_id=0,
    )
    model.save_pretrained(f"{folder}/again")
    source = f"{folder}/again"
save_file(results, f"{folder}/results.safetensors")
print(json.dumps([type(model).__name__, type(model).__module__, model.config.model_type]))
"""
_REFUSED = "AutoModelForCausalLM.from_pretrained(source)"


def _run(code: str, source, folder) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules")}
    return subprocess.run(
        [sys.executable, "-I", "-c", _PRELUDE + code, str(source), str(folder)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def _factored(model):
    """A plan with maps, of heads that are merged behind their norm."""
    method = Rap(retain=0.5, merge=2)
    statistics = calibrate(model, random_tokens(4, 24), method.needs_for(model))
    return method.plan(model, statistics)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_loads_generates_and_saves_without_the_package(tmp_path, model_type):
    fields = {"attn_logit_softcapping": 2.0} if model_type == "gemma2" else {}
    model = tiny_model(model_type, heads=6, kv_heads=2, hidden=36, layers=3, **fields)
    if fields:
        model.set_attn_implementation("eager")
    plan = _factored(model) if model_type == "qwen3" else random_plan(model, WIDTHS)
    small = apply(model, plan)
    small.save_pretrained(tmp_path / "saved")
    tokens = random_tokens(2, 7)
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")

    result = _run(_LOADED, tmp_path / "saved", tmp_path)

    assert result.returncode == 0, result.stderr
    name, module, loaded_type = json.loads(result.stdout.splitlines()[-1])
    assert (name, loaded_type) == (type(small).__name__, f"rap_{model_type}")
    assert module.startswith("transformers_modules.")
    found = load_file(tmp_path / "results.safetensors")
    with torch.no_grad():
        logits = small(tokens).logits
    generated = small.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    for load_number in ("first", "second"):
        # One thread there, several here: sums in another order, as in test_identity.
        difference = (found[f"{load_number}.logits"] - logits).abs().max()
        assert difference < 1e-5 * logits.abs().max()
        assert torch.equal(found[f"{load_number}.tokens"], generated)
    # Saved from remote code, it loads with the package again, unchanged.
    again = type(small).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in small.state_dict().items())


def test_without_trust_it_is_refused_clearly(tmp_path):
    model = tiny_model(layers=3)
    apply(model, random_plan(model, WIDTHS)).save_pretrained(tmp_path / "saved")
    result = _run(_REFUSED, tmp_path / "saved", tmp_path)
    assert result.returncode != 0
    assert "trust_remote_code=True" in result.stderr.splitlines()[-1]


def test_saved_directory_holds_code_and_no_pickle(tmp_path):
    model = tiny_model(layers=3)
    apply(model, random_plan(model, WIDTHS)).save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"modeling.py", "rope.py", "families.py", "config.json", "model.safetensors"} <= names
    assert {path.suffix for path in tmp_path.iterdir()} <= {".py", ".json", ".safetensors"}
    automatic = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert automatic == {
        "AutoConfig": "modeling.RapLlamaConfig",
        "AutoModelForCausalLM": "modeling.RapLlamaForCausalLM",
    }
