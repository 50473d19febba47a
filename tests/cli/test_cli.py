"""Every command as a user runs it, on the bundled model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rap
from cases.command import error_violations, run
from cases.models import tiny_model
from cases.plans import random_plan
from rap import assets
from rap.checkpoint.card import comparison, interval_text
from rap.cli import demo
from rap.cli.inspect import alike
from rap.model.fingerprint import fingerprint_model
from rap.planning.plan import Plan

SMALL = ("--windows", "2", "--window", "128")
# The defaults cut so little that a greedy text may stay the dense one.
PLAIN = ("--keys", "pairs", "--values", "channels", "--budget", "uniform")
PROMPT = "It was a dark evening, and the old man"
WORDS = "The rain fell on the old house all night. "


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A held-out text of a little more than one window of 2048 tokens."""
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(WORDS * 240)
    return path


@pytest.fixture(scope="module")
def compressed(tmp_path_factory, text) -> tuple[Path, dict]:
    """The output of `rap compress --json`, and what it printed."""
    out = tmp_path_factory.mktemp("compress") / "out"
    settings = ("--retain", 0.7, *PLAIN, *SMALL, "--evaluate", text)
    result = run("compress", "bundled", "-o", out, *settings, "--json")
    assert result.code == 0, result.err
    return out, result.json


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    """The output of `rap plan`."""
    path = tmp_path_factory.mktemp("plan") / "new" / "p.rap"
    result = run("plan", "bundled", "-o", path, *SMALL, "--keys", "pairs", "--seed", 5)
    assert (result.code, result.out) == (0, "")
    assert result.err.splitlines()[-1] == f"wrote {path}: keeps 70.8% of the KV cache"
    return path


def test_installed_script_prints_the_version():
    script = Path(sys.executable).parent / "rap"
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"rap {rap.__version__}\n"


def test_without_a_command_the_help_is_shown():
    result = run()
    assert result.code == 2
    assert all(f"\n  {name} " in result.err for name in ("compress", "plan", "apply", "inspect"))


def test_doctor_names_what_is_missing_and_the_remedy():
    found = run("doctor", "--json").json
    assert found["packages"]["torch"] == torch.__version__
    printed = run("doctor").out
    assert torch.__version__ in printed
    for feature in found["features"]:
        assert feature["feature"] in printed
        assert (feature["remedy"] in printed) == (feature["version"] is None)


def test_inspect_shows_every_layer_of_a_model(compressed):
    dense = run("inspect", "bundled")
    assert dense.out.startswith("bundled: llama, dense, 3,072 KV bytes per token\n")
    assert dense.out.count("default, theta 500000") == 1, "six layers alike share a row"
    assert re.search(r"^\W+0-5\W+default, theta 500000", dense.out, re.MULTILINE)
    # 64 channels of K and of V in 2 heads of 6 layers, half of them, 2 bytes each.
    half = run("inspect", "bundled", "--retain", "0.5").out
    line = "\nat retain 0.5, with equal widths in all layers: 1,536 KV bytes per token\n"
    assert half.endswith(line), half
    assert len(run("inspect", "bundled", "--json").json["layers"]) == 6
    report = run("inspect", compressed[0], "--json").json
    assert [layer["eligible"] for layer in report["layers"]] == ["pruned"] * 6
    assert report["kv_bytes_per_token"] == compressed[1]["pruned"]["kv_bytes_per_token"]
    assert report["dense_kv_bytes_per_token"] == 3072


def test_inspect_plan_takes_a_file_or_a_checkpoint(compressed, plan_file):
    of_folder = run("inspect", "plan", compressed[0], "--json").json
    assert of_folder["kept_fraction"] == compressed[1]["kept_fraction"]
    assert of_folder["dense_fingerprint"] == compressed[1]["dense"]["fingerprint"]
    printed = run("inspect", "plan", plan_file).out
    plan = Plan.load(plan_file)
    assert f"asked 0.7, keeps {plan.kept_fraction:.4f}" in printed
    assert len(run("inspect", "plan", plan_file, "--json").json["layers"]) == 6
    widths = [(layer.key_width, layer.value_width) for layer in plan.layers]
    assert len(re.findall(r"\d+/64\D+\d+/64", printed)) == len(set(widths)) < 6
    alone = next(i for i, width in enumerate(widths) if widths.count(width) == 1)
    kept = plan.layers[alone].frequency_GM[0].tolist()
    (shown,) = re.findall(rf"^\W+{alone} .*head 0: ([\d -]+)", printed, re.MULTILINE)
    spans = [[int(end) for end in part.split("-")] for part in shown.split()]
    assert [i for span in spans for i in range(span[0], span[-1] + 1)] == kept


def test_inspect_puts_layers_together_that_are_alike():
    def row(layer: int, keys: str, kept: str, note: str | None = None) -> dict:
        return {"layer": layer, "keys": keys, "kept_pairs": kept, "key_limit": note}

    same = [
        row(0, "8/16", "head 0: 0-3"),
        row(1, "6/16", "head 0: 0-2"),
        row(2, "8/16", "head 0: 0-3"),
    ]
    assert alike(same) == [{**same[0], "layer": "0 2"}, {**same[1], "layer": "1"}]
    # Which pairs are kept, or what a note says, does not tell layers apart.
    other = [same[0], row(1, "8/16", "head 0: 2-4 7\nhead 1: 3 5-7", "a note")]
    (found,) = alike(other)
    assert found["layer"] == "0-1"
    assert found["kept_pairs"] == "every head: 3\nsome heads: 0-2 4-7"
    apart = [row(0, "2/16", "head 0: 0"), row(1, "2/16", "head 0: 1")]
    assert alike(apart)[0]["kept_pairs"] == "every head: -\nsome heads: 0-1"
    assert alike([row(4, "dense", "")])[0]["layer"] == "4"


# Counts the cache by hand: bytes of every tensor that holds the prompt, over its tokens.
_NEW_PROCESS = """
import json, sys
import rap
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")
cache = DynamicCache()
model(**inputs, past_key_values=cache)
held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist()
print(json.dumps({"tokens": tokens, "bytes": held / inputs.input_ids.shape[1]}))
"""


def _in_new_process(folder: Path) -> dict:
    code = [sys.executable, "-c", _NEW_PROCESS, str(folder), PROMPT]
    result = subprocess.run(code, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def test_checkpoint_generates_the_same_tokens_in_a_new_process(compressed):
    folder, report = compressed
    method = rap.Rap.paper(retain=0.7, budget="uniform", align=None)
    in_memory = rap.compress(
        "bundled", method=method, num_windows=2, window=128, evaluate=None
    ).model
    inputs = assets.reference_tokenizer()(PROMPT, return_tensors="pt")
    expected = in_memory.generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist()
    dense = assets.reference_model().generate(**inputs, max_new_tokens=24, do_sample=False)
    found = _in_new_process(folder)
    assert found["tokens"] == expected
    assert found["tokens"] != dense[0].tolist(), "the cut changed nothing: no evidence"
    assert (
        found["bytes"]
        == report["kept_fraction"] * _in_new_process(assets.reference_path())["bytes"]
    )
    # Heads of 64 keep multiples of 8 channels: at most half a step from what was asked.
    assert abs(report["kept_fraction"] - 0.7) <= 4 / 64


def test_retain_is_exact_without_alignment():
    small = rap.compress(
        "bundled", method=rap.Rap(retain=0.5, align=1), num_windows=1, window=64, evaluate=None
    )
    assert small.report["kept_fraction"] == 0.5
    assert 2 * small.report["pruned"]["kv_bytes_per_token"] == 3072


def test_report_carries_what_a_repetition_needs(compressed):
    folder, report = compressed
    made_with = report["provenance"]
    assert made_with["packages"]["torch"] == torch.__version__
    assert made_with["settings"]["num_windows"] == 2
    assert made_with["settings"]["seed"] == report["method"]["seed"] == 0
    assert report["dense"]["fingerprint"] == fingerprint_model(assets.reference_model())
    assert report["pruned"]["fingerprint"] == fingerprint_model(rap.load(folder))
    assert json.loads((folder / "rap_report.json").read_text()) == report
    assert report["pruned"]["perplexity"] != report["dense"]["perplexity"] > 1


def test_model_card_is_for_others(tmp_path, text):
    source = tmp_path / "dense"
    source.symlink_to(assets.reference_path())
    out = tmp_path / "small"
    local = ("--calibration", text, "--evaluate", "none", "--windows", 1, "--window", 64)
    assert run("compress", source, "-o", out, *local).code == 0
    card = (out / "README.md").read_text()
    figures = json.loads((out / "rap_report.json").read_text())["pruned"]
    assert f"| {figures['kv_bytes_per_token']:,} |" in card
    assert "1 windows of 64 tokens from held-out.txt" in card
    assert str(tmp_path) not in card
    assert str(text.parent) not in card
    assert "base_model" not in card
    assert "{" not in card.replace(str(_method_line(card)), "")


def _method_line(card: str) -> str:
    return next(line for line in card.splitlines() if line.startswith("Method: "))


def test_relative_directory_is_no_hub_name(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dense").symlink_to(assets.reference_path())
    monkeypatch.chdir(tmp_path)
    small = ("--evaluate", "none", "--windows", 1, "--window", 64)
    how = ("--method", "rap:merge=1", "--profile", "stock")
    assert run("compress", "runs/dense", "-o", "small", *how, *small).code == 0
    assert "base_model" not in (tmp_path / "small" / "README.md").read_text()
    # Nor where its card is made again from elsewhere.
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert run("export", "stock", "../small", "-o", "plain").code == 0
    assert "base_model" not in (tmp_path / "other" / "plain" / "README.md").read_text()
    (tmp_path / "small" / "rap_report.json").write_text('{"a": 1}')
    damaged = run("export", "stock", "../small", "-o", "damaged")
    assert error_violations(damaged) == []
    assert "rap_report.json is damaged (it lacks 'source')" in damaged.err
    assert not (tmp_path / "other" / "damaged").exists()


def test_apply_gives_the_same_tensors_streamed(tmp_path, plan_file):
    memory, streamed = tmp_path / "memory", tmp_path / "streamed"
    results = [
        run("apply", "bundled", plan_file, "-o", memory, "--json"),
        run("apply", "bundled", plan_file, "-o", streamed, "--stream", "--json"),
    ]
    assert [result.code for result in results] == [0, 0]
    one, other = (load_file(folder / "model.safetensors") for folder in (memory, streamed))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    width = 2 * Plan.load(plan_file).layers[0].num_pairs
    assert width < 64
    assert one["model.layers.0.self_attn.k_proj.weight"].shape == (2 * width, 256)
    fingerprint = fingerprint_model(rap.load(memory))
    assert [result.json["fingerprint"] for result in results] == [fingerprint] * 2
    assert results[0].json["provenance"]["settings"]["plan_file"] == str(plan_file)


def test_apply_takes_the_plan_in_a_pruned_folder(tmp_path, plan_file):
    first, again = tmp_path / "first", tmp_path / "again"
    assert run("apply", "bundled", plan_file, "-o", first).code == 0
    assert run("apply", "bundled", first, "-o", again).code == 0
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_a_plan_of_another_model_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    dense = tiny_model()
    random_plan(dense, [(3, 6), (3, 6)]).save(tmp_path / "other.rap")
    monkeypatch.setattr("rap.cli.compress.load_dense", None)
    result = run("apply", "bundled", tmp_path / "other.rap", "-o", tmp_path / "out")
    assert result.err.endswith("layers, the model 6: make a new plan for this model\n")


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["in memory", "streamed"])
def test_apply_writes_a_card_of_the_small_model(tmp_path, plan_file, stream):
    source, out = tmp_path / "dense", tmp_path / "small"
    shutil.copytree(assets.reference_path(), source)
    (source / "README.md").write_text("Card of the dense model.")
    assert run("apply", source, plan_file, "-o", out, *stream).code == 0
    card = (out / "README.md").read_text()
    assert "Card of the dense model." not in card
    assert "# small\n" in card
    dense, small = (rap.footprint(rap.load(folder)) for folder in (source, out))
    for figure in ("kv_bytes_per_token", "total_parameters"):
        assert f"| {getattr(dense, figure):,} | {getattr(small, figure):,} |" in card
    # Nothing was measured, and the card is for others.
    for absent in ("rap_report.json", "Calibration:", "perplexity", str(tmp_path)):
        assert absent not in card


def test_seed_reaches_the_method(tmp_path, plan_file):
    assert Plan.load(plan_file).method["seed"] == 5
    plans = []
    for seed in (1, 1, 2):
        path = tmp_path / f"{len(plans)}.rap"
        cut = ("--score", "random", "--keys", "pairs", "--values", "channels")
        assert run("plan", "bundled", "-o", path, *SMALL, *cut, "--seed", seed).code == 0
        plans.append(Plan.load(path).layers)
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_config_file_stands_between_defaults_and_flags(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "retain: 0.5\nscore: random\nkey-share: pooled\nkeys: pairs\nvalues: channels\n"
        "windows: 1\nwindow: 64\njson: true\n"
    )
    path = tmp_path / "p.rap"
    call = ("plan", "bundled", "-o", path, "--config", config)
    method = run(*call).json["method"]
    assert (method["retain"], method["score"], method["key_share"]) == (0.5, "random", "pooled")
    assert method["seed"] == 0, "what the file leaves out keeps its default"
    method = run(*call, "--retain", 0.9, "--force").json["method"]
    assert (method["retain"], method["score"]) == (0.9, "random")


def test_one_value_in_a_file_is_enough_for_a_repeatable_option(tmp_path):
    config = tmp_path / "run.yaml"
    for task in ("needle", "[needle]"):
        config.write_text(f"length: 128\ntask: {task}\ndocuments: 1\njson: true\n")
        result = run("evaluate", "retrieval", "bundled", "--config", config)
        assert result.code == 0, result.err
        assert {one["length"] for one in result.json["needle"]} == {128}


def test_evaluate_measures_a_checkpoint(compressed, text, tmp_path):
    folder, report = compressed
    output = tmp_path / "new" / "result.json"
    call = ("evaluate", "perplexity", folder, "--text", text, "-o", output)
    result = run(*call, "--max-windows", 1, "--json")
    assert result.json == json.loads(output.read_text())
    assert result.json["value"] == pytest.approx(report["pruned"]["perplexity"], rel=1e-6)
    assert result.json["fingerprint"] == report["pruned"]["fingerprint"]
    assert "rap" in result.json["provenance"]
    assert result.json["command"].startswith("rap evaluate perplexity")
    assert result.json["table"]["rows"][0][-1] == f"{result.json['value']:.4f}"


def test_compress_says_how_near_the_cut_is(compressed):
    folder, report = compressed
    small = report["pruned"]
    assert not {"kl", "top1"} & report["dense"].keys()
    shown = {name: (dense, cut) for name, dense, cut in comparison(report)}
    kl = interval_text(small["kl"], ".3g")
    assert shown["KL from dense, nats/token"] == ("0", kl)
    assert shown["same most likely token as dense"][1].startswith(f"{small['top1']['value']:.1%}")
    assert f"| KL from dense, nats/token | 0 | {kl} |" in (folder / "README.md").read_text()
    # Cards of checkpoints that were measured before, or recovered since, have no such row.
    older = {**report, "pruned": {k: v for k, v in small.items() if k not in ("kl", "top1")}}
    assert len(comparison(older)) == len(shown) - 2


def test_evaluate_fidelity_compares_a_checkpoint_with_its_dense_model(compressed, text, tmp_path):
    folder, report = compressed
    output = tmp_path / "fidelity.json"
    call = ("evaluate", "fidelity", folder, "--dense", "bundled", "--text", text)
    found = run(*call, "--max-windows", 1, "-o", output, "--json").json
    assert found == json.loads(output.read_text())
    for figure in ("kl", "kl_p99", "top1", "perplexity_ratio", "positions"):
        assert found[figure] == report["pruned"][figure]
    assert found["perplexity"]["value"] == report["pruned"]["perplexity"]
    assert found["dense_perplexity"]["value"] == report["dense"]["perplexity"]
    assert found["fingerprint"] == report["pruned"]["fingerprint"]
    assert found["dense_fingerprint"] == report["dense"]["fingerprint"]
    printed = run(*call, "--window", 200, "--max-windows", 3)
    assert printed.code == 0, printed.err
    assert "fidelity: 600 tokens in" in printed.err
    for row in (
        "KL(dense || pruned)",
        "99th percentile",
        "perplexity, multiple",
        "1-128",
        "129-200",
    ):
        assert row in printed.out, row
    assert re.search(r"nats/token +\S +[\d.e-]+ \([\d.e-]+ to [\d.e-]+\)", printed.out)


_KILLED = """
import os, signal
from rap.cli import main
from rap.planning.plan import Plan
Plan.save = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_kill_during_compress_leaves_no_half_output(tmp_path):
    arguments = ["compress", "bundled", "-o", str(tmp_path / "out"), "--evaluate", "none", *SMALL]
    result = subprocess.run([sys.executable, "-c", _KILLED, *arguments], capture_output=True)
    assert result.returncode == -signal.SIGKILL
    left = os.listdir(tmp_path)
    assert [name.startswith(".out.partial-") for name in left] == [True]
    assert (tmp_path / left[0] / "model.safetensors").is_file(), "it died before it wrote anything"
    assert run(*arguments).code == 0
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.slow
def test_demo_writes_its_table_and_figure(tmp_path, monkeypatch):
    small = {"calibration": (2, 128), "evaluation": (1, 128), "tokens": 4}
    small |= {"retains": (0.7, 0.5), "recovery": "closed-form"}
    monkeypatch.setitem(demo.SHOWS, "bundled", replace(demo.SHOWS["bundled"], **small))
    result = run("demo", "bundled", "-o", tmp_path / "demo")
    assert result.code == 0
    written = json.loads((tmp_path / "demo" / "results.json").read_text())
    kept = {row["retain"]: row["kv_bytes_per_token"] for row in written["rows"]}
    assert kept[1.0] == 2 * kept[0.5]
    assert [row["method"] for row in written["rows"]][-2:] == ["rap", "recovered"]
    for row in written["rows"]:
        assert f"{row['perplexity']:.2f}" in result.out
    assert (tmp_path / "demo" / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert demo.SHOWS["bundled"].prompt in result.err
    assert written["provenance"]["packages"]["torch"] == torch.__version__
