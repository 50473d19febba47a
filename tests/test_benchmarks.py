"""Scripts of benchmarks/ at tiny sizes: that they run, and what their result files hold."""

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from cases.models import random_tokens
from cases.scripts import REPOSITORY, load_script
from rap import calibrate, footprint
from rap.evaluation.cost.latency import weight_bytes
from rap.evaluation.cost.random_models import random_model
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
    dense = random_model(config, dtype=torch.float32, device="cpu")
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
        model = random_model(made, dtype=torch.float32, device="cpu")
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
    # Shared parts count for every model that reads them.
    roofline, layouts = (load_script(f"benchmarks/{name}.py") for name in ("roofline", "layouts"))
    config = LlamaConfig(**roofline.SHAPES["smollm2"] | roofline.TINY)
    for name in ("dense", "rap@0.5", "rap:profile=stock:merge=auto@0.7", "palu@0.7"):
        made = layouts.pruned_config(config, name)
        whole = random_model(made, dtype=torch.float32, device="cpu")
        row = rows[name, 16]
        assert row["read_bytes"] - row["kv_bytes"] == weight_bytes(whole), name
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


@pytest.mark.slow
def test_all_runs_each_and_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What takes minutes on a GPU, at tiny sizes; one that runs out of time stops no other."""
    script = load_script("benchmarks/all.py")
    monkeypatch.setitem(script.SHARE, "roofline", 1e-9)
    options = ["--device", "cpu", "--quick", "--minutes", "60", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [script.__file__, *options])
    with pytest.raises(SystemExit, match=r"^not done: roofline \(out of time\)$"):
        script.main()
    assert "fit: done in" in capsys.readouterr().out
    rows = json.loads((tmp_path / "fit.json").read_text("utf-8"))["rows"]
    assert [(row["shape"], row["layers"]) for row in rows] == [
        ("SmolLM2-135M", 1),
        ("Llama-3-8B", 1),
    ]
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["tests", "roofline", "rope", "fit"])
def test_only_scripts_that_have_tiny_sizes_are_asked_for_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("benchmarks/all.py")
    ran: list[list[str]] = []
    monkeypatch.setattr(script, "exit_code", lambda command, *_: ran.append(command) or 0)
    monkeypatch.setattr(
        sys, "argv", [script.__file__, "--device", "cpu", "--quick", "--only", name]
    )
    script.main()
    (command,) = ran
    text = "" if name == "tests" else Path(command[1]).read_text("utf-8")
    assert ("--quick" in command) == ('"--quick"' in text)


def test_the_fit_at_tiny_sizes_is_the_whole_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "fit.json"
    options = ["--quick", "--shapes", "SmolLM2-135M", "--output", str(output)]
    run(monkeypatch, "fit", "--device", "cpu", *options)
    result = json.loads(output.read_text("utf-8"))
    assert [row["layers"] for row in result["rows"]] == [1]
    assert result["table"]["title"].startswith("The whole fit")


def test_the_computed_time_of_a_fit_has_the_steps_of_discarded_rates() -> None:
    script = load_script("benchmarks/fit.py")
    config = script.FitConfig(steps=80, rate_choices=3)
    assert script.most_steps(config) == 80 + 2 * script.TRIAL_STEPS
    assert script.most_steps(replace(config, rate_choices=1)) == 80
    assert script.most_steps(replace(config, steps=script.TRIAL_STEPS)) == script.TRIAL_STEPS
    found = {"shape": "SmolLM2-135M", "step": 1.0, "window": 0.0, "rest": 0.0, "peak": 0}
    assert script.row(found, config)[-2] == "100 s"


def test_what_runs_out_of_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    script = load_script("benchmarks/all.py")
    note = tmp_path / "process"
    code = (
        f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write"
    )
    command = [sys.executable, "-c", f"{code}(str(p.pid)); p.wait()"]
    assert script.exit_code(command, dict(os.environ), 5) is None
    started = Path("/proc") / note.read_text("utf-8") / "stat"
    for _ in range(300):
        if not started.exists() or started.read_text("utf-8").split(")")[1].split()[0] in "XZ":
            break
        time.sleep(0.1)
    else:
        pytest.fail("what the command started still runs")
    assert script.exit_code([sys.executable, "-c", "raise SystemExit(3)"], {}, None) == 3


def test_all_on_a_gpu_is_what_ten_minutes_suffice_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("benchmarks/all.py")
    ran: list[tuple[list[str], float, str | None]] = []

    def noted(command: list[str], environment: dict[str, str], timeout: float) -> int:
        ran.append((command[1:], timeout, environment.get("TRITON_INTERPRET")))
        return 0

    monkeypatch.setattr(script, "exit_code", noted)
    monkeypatch.setattr(sys, "argv", [script.__file__, "--device", "cuda"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script.main()
    tests, roofline, fit = ran
    assert (tests[0][-1], tests[2]) == (str(REPOSITORY / "tests" / "gpu"), "0")
    assert Path(roofline[0][0]).name == "roofline.py"
    assert roofline[0][1:] == ["--device", "cuda", "--minutes", "3.2"]
    assert fit[0][1:] == ["--whole", "--device", "cuda"]
    assert [tests[1], roofline[1]] == [240, 240]
    assert 590 < fit[1] <= 600


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("dense", (3, 64)),
        ("48", (3, 48)),
        ("rap:merge=all:profile=stock@0.5", (1, 96)),
        ("rap:merge=all:profile=stock@0.67", (1, 128)),
    ],
)
def test_llamacpp_measures_plain_shapes(name: str, heads: tuple[int, int]) -> None:
    script = load_script("benchmarks/llamacpp.py")
    found = script.shaped(LlamaConfig(**WIDE | SMALL), name)
    assert (found.num_key_value_heads, found.head_dim) == heads
    assert not hasattr(found, "rap")


def test_a_layout_is_named_by_its_heads() -> None:
    layouts = load_script("benchmarks/layouts.py")
    found = layouts.pruned_config(LlamaConfig(**WIDE | SMALL), "8x2x96")
    heads = found.num_attention_heads, found.num_key_value_heads, found.head_dim
    assert heads == (8, 2, 96)
    assert found.hidden_size == LlamaConfig(**WIDE | SMALL).hidden_size


def test_serving_steps_are_compared_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of ratios, not the ratio of medians: a slow round slows both."""
    script = load_script("benchmarks/serving_steps.py")
    monkeypatch.setattr(sys, "argv", ["serving_steps.py", "--points", "1x8", "--layers", "1"])
    rounds = {  # seconds of each engine, in the order they are started; the second round is slow
        "dense": iter([2.0, 40.0, 2.2]),
        "rap:merge=1@0.5": iter([1.0, 10.0, 1.0]),
    }
    methods = dict(zip(map(str, range(2)), rounds, strict=True))

    def timed(job: dict[str, Any], *_: Any) -> list[dict[str, float]]:
        seconds = next(rounds[methods[Path(job["model"]).name]])
        return [{"prefill": 3 * seconds, "decode_step": seconds}]

    monkeypatch.setattr(script, "run_worker", timed)
    arguments = script.parse()
    arguments.methods = list(rounds)
    with tempfile.TemporaryDirectory() as folder:
        rows = script.compare(arguments, Path(folder))
    assert [(row["method"], row["decode_step"], row["prefill"]) for row in rows] == [
        ("dense", 1.0, 1.0),
        ("rap:merge=1@0.5", 2.2, pytest.approx(2.2)),
    ]
    table = script.table(rows, "vLLM", arguments)["rows"]
    assert table[1] == ["eager", "1 x 8", "rap:merge=1@0.5", "3,000.0 (2.20)", "1,000.0 (2.20)"]


def test_cache_bits_counts_bytes_and_compares_round_by_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output, plain = tmp_path / "bits.json", "rap:merge=all:profile=stock@0.5"
    options = ["--contexts", "8", "16", "--layers", "1", "--rounds", "3", "--output", str(output)]
    run(monkeypatch, "cache_bits", "--device", "cpu", *options, "--entries", "dense", plain)
    result = json.loads(output.read_text("utf-8"))
    rows = {(row["entry"], row["context"]): row for row in result["rows"]}
    assert rows["dense", 16]["cache_bytes"] == 16 * 2 * 3 * 64 * 2  # bfloat16
    assert rows[plain, 16]["times_smaller"] == 2
    ratios = [
        mine / dense
        for mine, dense in zip(rows[plain, 8]["seconds"], rows["dense", 8]["seconds"], strict=True)
    ]
    assert rows[plain, 8]["over_dense"] == sorted(ratios)[1]
    assert result["table"]["rows"][1][:2] == [plain, "2.0x"]


def test_cache_bits_times_quantized_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the name of a model is the kind of its cache."""
    script = load_script("benchmarks/cache_bits.py")
    asked = []

    def quantized(model: Any, bits: str) -> Any:
        asked.append(bits)
        return script.DynamicCache(config=model.config)

    monkeypatch.setattr(script, "quantized_cache", quantized)
    config = LlamaConfig(**WIDE | SMALL)
    model = random_model(config, dtype=torch.float32, device="cpu")
    entries = ["dense", "dense+hqq4"]
    rows = script.measure({"dense": model}, entries, 8, 1, time.perf_counter)
    assert asked == ["hqq4"]
    assert [row["entry"] for row in rows] == entries
