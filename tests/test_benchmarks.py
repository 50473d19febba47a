"""Scripts of benchmarks/ at tiny sizes: that they run, and what their result files hold."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from cases.models import random_tokens
from cases.scripts import load_script
from rap import calibrate, footprint
from rap.methods import parse_method

# All heads merge at both ratios; some do, and maps are larger than what they save.
WIDE = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 96}
NARROW = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "hidden_size": 16}
SMALL = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Run a script's `main` as its command would, threads as they were afterwards."""
    threads = torch.get_num_threads()
    module = load_script(f"benchmarks/{script}.py")
    monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("retain", ["0.7", "0.5"])
def test_layouts_are_what_methods_make(shape: dict[str, int], retain: str) -> None:
    layouts = load_script("benchmarks/layouts.py")
    config = LlamaConfig(**shape | SMALL)
    dense = layouts.random_model(config, dtype=torch.float32, device="cpu")
    for text in ("rap:merge=1:budget=uniform", "rap:budget=uniform", "palu:ranks=uniform"):
        method = parse_method(text, float(retain))
        needs = method.needs_for(dense)
        plan = method.plan(dense, calibrate(dense, random_tokens(4, 32) % 64, needs))
        made = layouts.pruned_config(config, f"{text}@{retain}")
        assert made.rap["layers"] == [layer.entry().fields() for layer in plan.layers], text


@pytest.mark.parametrize("merge", ["1", "2", "4", "auto"])
def test_the_plain_form_of_merged_heads_caches_as_much(merge: str) -> None:
    layouts = load_script("benchmarks/layouts.py")
    config, caches = LlamaConfig(**NARROW | SMALL), set()
    for profile in ("per-head", "stock"):
        name = f"rap:profile={profile}:merge={merge}@0.5"
        made = layouts.pruned_config(config, name)
        model = layouts.random_model(made, dtype=torch.float32, device="cpu")
        caches.add(footprint(model).kv_bytes_per_token)
        assert hasattr(made, "rap") == (profile == "per-head" or merge == "1")
    assert caches == {0.5 * 2 * 8 * 16 * 4}


def test_roofline_writes_every_point_and_where_it_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "roofline.json"
    options = ["--threads", "1", "--shapes", "smollm2", "--dtype", "float32", "--rounds", "5"]
    run(monkeypatch, "roofline", "--device", "cpu", "--quick", *options, "--output", str(output))
    result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    made = result["provenance"]
    assert {"torch", "transformers", "triton"} <= made["packages"].keys()
    assert {"begin", "end"} == made["load_average"].keys()
    assert (made["device"], result["threads"], result["left_out"]) == ("cpu (1 thread)", 1, [])
    rows = {(row["model"], row["context"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * 9
    for row in rows.values():
        dense = rows["dense", row["context"]]
        assert len(row["copy_rounds_ms"]) == 2
        assert row["roofline"] == dense["read_bytes"] / row["read_bytes"]
        seconds = row["milliseconds"] / 1e3
        assert row["share_of_bandwidth"] == pytest.approx(
            row["read_bytes"] / seconds / row["bandwidth"]
        )
        if row["model"].endswith("@0.5"):
            assert row["kv_bytes"] == dense["kv_bytes"] / 2
    assert rows["dense", 16]["rounds_ms"].keys() == {"sdpa", "rap"}
    assert rows["rap@0.5", 16]["rounds_ms"].keys() == {"rap"}
    table = result["tables"][0]
    assert [row[0] for row in table["rows"]] == list(dict.fromkeys(name for name, _ in rows))


def test_roofline_records_what_it_had_no_time_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "roofline.json"
    options = ["--device", "cpu", "--quick", "--minutes", "0", "--output", str(output)]
    run(monkeypatch, "roofline", *options)
    result = json.loads(output.read_text("utf-8"))
    assert result["rows"] == []
    assert len(result["left_out"]) == 3 * 2 * 2
    assert result["left_out"][0] == {
        "shape": "smollm2",
        "dtype": "float32",
        "batch": 1,
        "context": 9,
        "reason": "time",
    }
