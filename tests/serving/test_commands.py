"""`rap verify`, `rap serve` and `rap export stock` as far as they go without a serving engine."""

import importlib.util
import json
import math
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.command import error_violations, run
from cases.family_cases import CASES, random_case_plan
from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap import assets
from rap.calibration.run import calibrate
from rap.checkpoint.files import PLAN_FILE
from rap.checkpoint.load import load, load_config
from rap.cli import serving as command_line
from rap.evaluation.cost.footprint import footprint
from rap.methods import METHODS, parse_method
from rap.model.cache_layout import CacheLayout
from rap.model.errors import RapError
from rap.serving import serve as serving
from rap.serving.engine import EngineError, run_engine
from rap.serving.llamacpp.verify import agreement as gguf_agreement
from rap.serving.llamacpp.verify import verify_llamacpp
from rap.serving.serve import Server, complete
from rap.serving.stock import export_stock
from rap.serving.verify import (
    agreement,
    bundled_prompts,
    channels,
    dense_caches,
    kept_fraction,
    transcribe,
    verify,
)
from rap.surgery.apply import apply


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A tiny checkpoint with a layer of its own width, one of another, and no tokenizer."""
    path = tmp_path_factory.mktemp("pruned")
    model = tiny_model("llama")
    apply(model, random_plan(model, [(3, 8), (5, 4)])).save_pretrained(path)
    return path


def test_verify_passes_and_reports(pruned):
    result = run("verify", pruned, "--json")
    assert result.code == 0
    found = result.json
    assert found["passed"]
    assert found["mismatched_tokens"] == 0
    assert found["num_tokens"] == 435 + 5 * 16
    assert found["kept_fraction"] == (6 + 8 + 10 + 4) / (2 * 2 * 16)
    # 2 KV heads x (6 + 8 + 10 + 4) channels x 4 bytes a token, against 2 x 64 x 4 of the dense.
    assert found["tokens_per_gib"] == 2**30 // (2 * 28 * 4)
    assert found["dense_tokens_per_gib"] == 2**30 // (2 * 64 * 4)
    assert found["provenance"]["settings"]["model"] == str(pruned)


def test_verify_fails_with_exit_code_1(pruned):
    result = run("verify", pruned, "--tolerance", "0")
    assert result.code == 1
    assert "FAILED" in result.err


def test_verify_notices_a_changed_cache(pruned, monkeypatch):
    """An engine that computes from other frequencies than the reference does not pass."""
    real = transcribe

    def wrong(model, prompt, max_tokens):
        for layer in model.model.layers:
            layer.self_attn.frequency_index.copy_(layer.self_attn.frequency_index.flip(1))
        return real(model, prompt, max_tokens)

    monkeypatch.setattr("rap.serving.verify.transcribe", wrong)
    found = verify(pruned)
    assert not found.passed
    assert found.max_logprob_error > 100 * found.tolerance


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_model_that_computes_nan_is_not_verified(tmp_path, dtype):
    """Greedy tokens agree there, and a maximum of errors leaves out what is no number."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    result = run("verify", tmp_path, "--dtype", dtype)
    assert error_violations(result) == []
    assert "log-probabilities are NaN" in result.err


def test_an_engine_that_answers_nan_does_not_agree(pruned):
    model = load(pruned)
    one = transcribe(model, [1, 2, 3], 4)
    assert agreement(model, [one]).max_logprob_error < 1e-5
    for field in ("logprobs", "prompt_logprobs"):
        values = [*getattr(one, field)]
        values[0] = float("nan")
        assert agreement(model, [replace(one, **{field: values})]).max_logprob_error == math.inf
    hidden = [[[float("nan")] * model.config.hidden_size] * 3]
    assert gguf_agreement(model, [[1, 2, 3]], hidden, []).max_logprob_error == math.inf


def test_dense_model_keeps_everything():
    config = tiny_model("llama").config
    assert kept_fraction(config, dense_caches("nowhere", config)) == 1.0
    found = verify(assets.reference_path())
    assert found.passed
    assert found.capacity_ratio == 1.0


def test_changed_weights_are_refused(pruned, tmp_path):
    tensors = load_file(pruned / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((pruned / "config.json").read_text("utf-8"))
    result = run("verify", tmp_path)
    assert error_violations(result) == []
    assert "fingerprint" in result.err


def test_unknown_names_are_refused(pruned):
    assert "use one of transformers, vllm" in run("verify", pruned, "--engine", "tgi").err
    assert "use one of float32" in run("verify", pruned, "--dtype", "int4").err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("command", [["serve"], ["serve", "--check"], ["verify", "--engine=vllm"]])
def test_missing_engine_is_named_with_its_extra(pruned, command):
    result = run(*command, pruned)
    assert result.code == 2
    assert "vLLM is not installed: pip install vllm" in result.err


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is not None, reason="it is installed")
def test_missing_llama_cpp_is_named_with_its_extra(pruned):
    result = run("verify", pruned, "--engine", "llamacpp")
    assert error_violations(result) == []
    assert "llama.cpp is not installed here: pip install xllamacpp" in result.err


def test_a_checkpoint_is_its_own_reference(pruned):
    for engine in ("llamacpp", "transformers", "vllm"):
        result = run("verify", pruned, "--engine", engine, "--reference", pruned)
        assert error_violations(result) == []
        assert "--reference is for a .gguf file" in result.err


def test_verify_refuses_what_it_would_not_read_before_it_loads(pruned, monkeypatch):
    def load(*_, **__):
        pytest.fail("a model was looked for")

    for name in ("verify", "verify_llamacpp", "resolve_source"):
        monkeypatch.setattr(command_line, name, load)
    result = run("verify", "small.gguf", "--reference", pruned)
    assert error_violations(result) == []
    assert "not read by transformers: remove it, or add --engine llamacpp" in result.err
    for engine in ("transformers", "llamacpp"):
        for tolerance in ("nan", "-0.1"):
            result = run("verify", pruned, "--engine", engine, "--tolerance", tolerance)
            assert error_violations(result) == []
            assert f"tolerance {tolerance} passes nothing: give nats, 0 or more" in result.err


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_verify_refuses_options_that_an_engine_does_not_read(pruned, engine):
    result = run("verify", pruned, "--engine", engine, "--tensor-parallel-size", "2")
    assert error_violations(result) == []
    assert f"{engine} works on one device: remove --tensor-parallel-size" in result.err
    result = run("verify", "small.gguf", "--engine", "llamacpp", "--dtype", "bfloat16")
    assert error_violations(result) == []
    assert "compared as it is stored: remove --dtype" in result.err
    assert "greater than or equal to 1" in run("verify", pruned, "--tensor-parallel-size", "0").err


def test_the_library_refuses_a_tolerance_before_it_loads_too():
    for compare in (verify, verify_llamacpp):
        with pytest.raises(RapError, match="tolerance nan passes nothing"):
            compare("nowhere", tolerance=float("nan"))


def test_checkpoint_is_checked_before_an_engine_starts(pruned, tmp_path, monkeypatch):
    monkeypatch.setattr("rap.serving.serve.require_vllm", lambda: None)
    config = json.loads((pruned / "config.json").read_text("utf-8"))
    config["rap"]["layers"].pop()
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("serve", tmp_path, "--check")
    assert result.code == 2
    assert "lists widths for 1 layers, the model has 2" in result.err


def test_server_command_holds_no_secret():
    server = Server("OUT", "0.0.0.0", 8001, "secret", ("--max-model-len", "64"))
    assert "secret" not in " ".join(server.command)
    assert server.environment({})["VLLM_API_KEY"] == "secret"
    assert server.command[-8:] == [
        *("--model", "OUT", "--host", "0.0.0.0", "--port", "8001"),
        *("--max-model-len", "64"),
    ]
    assert server.url == "http://127.0.0.1:8001"


class _Answers(BaseHTTPRequestHandler):
    """vLLM's API as far as `rap serve --check` asks it, of a model served under another name."""

    def do_GET(self):
        self._send({"data": [{"id": "mine"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != "mine":
            self.send_error(404)
            return
        self._send({"choices": [{"text": f"to {asked['prompt']}"}]})

    def _send(self, answer):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def answering(monkeypatch):
    """A server on this machine, with a proxy in the environment that reaches nothing."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as found:
        Thread(target=found.serve_forever, daemon=True).start()
        yield Server("OUT", port=found.server_port)
        found.shutdown()


def test_a_server_is_asked_past_a_proxy_by_the_name_it_serves(answering):
    assert complete(answering, "a prompt")["choices"][0]["text"] == "to a prompt"


def test_a_server_that_dies_while_it_answers_is_one_line():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def die():
            connection, _ = listening.accept()
            connection.recv(1)
            connection.close()

        Thread(target=die, daemon=True).start()
        with pytest.raises(EngineError, match="the server did not complete a prompt"):
            complete(Server("OUT", port=listening.getsockname()[1]), "a prompt")


@pytest.mark.parametrize(("ends", "said"), [(False, "not in time"), (True, "last words")])
def test_a_running_server_is_not_said_to_have_died(monkeypatch, answering, ends, said):
    seconds = 0 if ends else 60
    script = f"print('last words', flush=True); import time; time.sleep({seconds})"
    monkeypatch.setattr(Server, "command", property(lambda server: [sys.executable, "-c", script]))
    monkeypatch.setattr(serving, "runs_in", lambda source: "")

    def use():
        with serving.running(answering):
            time.sleep(2 * ends)
            raise EngineError("the server is not in time")

    with pytest.raises(EngineError, match=said):
        use()


def test_export_of_another_profile_is_refused_in_a_sentence(pruned, tmp_path):
    result = run("export", "stock", pruned, "-o", tmp_path / "plain")
    assert error_violations(result) == []
    assert "--profile stock" in result.err
    assert not (tmp_path / "plain").exists()


def test_prompts_fit_a_short_model():
    config = tiny_model("llama", max_position_embeddings=64).config
    prompts = bundled_prompts("/nowhere", config)
    assert [len(prompt) for prompt in prompts] == [1, 7, 32]
    assert max(map(max, prompts)) < config.vocab_size
    assert torch.tensor(prompts[2]).unique().numel() > 8


@pytest.mark.parametrize("method", ["palu", "svdllm", "elitekv", "matryoshka", "kvpruner-indexed"])
def test_every_method_is_verified(tmp_path, method):
    model = tiny_model("llama", dtype=torch.float32)
    chosen = METHODS[method](retain=0.5)
    plan = chosen.plan(model, calibrate(model, random_tokens(4, 32), chosen.needs_for(model)))
    chosen.apply(model, plan).save_pretrained(tmp_path / "small")
    found = verify(tmp_path / "small")
    assert found.passed
    assert found.kept_fraction == pytest.approx(plan.kept_fraction)
    # What these cache is no width of their heads, and inspect counts it as the cache holds it.
    shown = run("inspect", tmp_path / "small", "--json").json
    held = footprint(load(tmp_path / "small")).kv_bytes_per_token
    assert shown["kv_bytes_per_token"] == held < shown["dense_kv_bytes_per_token"]
    assert sum(layer["kv_bytes_per_token"] for layer in shown["layers"]) == held


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "lfm2", "qwen3_next"])
def test_capacity_is_that_of_layers_that_attend(tmp_path, name):
    """Text models inside others, and layers without attention: as footprint counts."""
    (case,) = [case for case in CASES if case.name == name]
    model = case.model()
    small = apply(model, random_case_plan(model, case))
    small.save_pretrained(tmp_path / "small")
    config = load_config(tmp_path / "small")
    assert bundled_prompts(tmp_path / "small", config)
    kept, dense = footprint(small), footprint(model)
    share = kept.kv_bytes_per_token / dense.kv_bytes_per_token
    caches = dense_caches(tmp_path / "small", config)
    assert share == pytest.approx(kept_fraction(config, caches))
    assert channels(caches) * model.dtype.itemsize == dense.kv_bytes_per_token


def test_a_plain_checkpoint_is_compared_with_the_model_it_was_made_from(tmp_path):
    """Its config is that of a smaller dense model: without the plan beside it, nothing is saved."""
    model = tiny_model("llama", heads=4, kv_heads=4, hidden=64)
    method = METHODS["rap"](retain=0.5, merge=2, profile="stock")
    plan = method.plan(model, calibrate(model, random_tokens(4, 32), method.needs_for(model)))
    apply(model, plan).save_pretrained(tmp_path / "small")
    plan.save(tmp_path / "small" / PLAN_FILE)
    export_stock(tmp_path / "small", tmp_path / "plain")
    found = verify(tmp_path / "plain")
    assert found.passed
    assert (found.kept_fraction, found.capacity_ratio) == (0.5, pytest.approx(2, rel=1e-3))
    assert found.dense_tokens_per_gib == verify(tmp_path / "small").dense_tokens_per_gib
    (tmp_path / "plain" / PLAN_FILE).unlink()
    assert verify(tmp_path / "plain").kept_fraction == 1.0


def test_channels_of_several_devices():
    caches = [CacheLayout(4, 16, 8), CacheLayout(1, 6, 6), CacheLayout(0, 6, 6)]
    assert [channels(caches, number) for number in (1, 2, 8)] == [108, 60, 36]


def test_an_engine_that_takes_too_long_is_ended_in_a_line(tmp_path):
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    with pytest.raises(EngineError, match="vLLM did not answer in 3 seconds"):
        run_engine([sys.executable, "-c", code], "vLLM", 3)
    _wait_for(lambda: _gone(child.read_text()), 20)
    assert run_engine([sys.executable, "-c", "print('done')"], "vLLM", 60) == "done\n"


def test_merged_heads_are_inspected_as_many_as_are_cached(tmp_path):
    model = tiny_model("llama", heads=4, kv_heads=2)
    chosen = parse_method("rap:merge=all:queries=absorbed", retain=0.5)
    plan = chosen.plan(model, calibrate(model, random_tokens(4, 32), chosen.needs_for(model)))
    small = chosen.apply(model, plan)
    small.save_pretrained(tmp_path / "small")
    shown = run("inspect", tmp_path / "small", "--json").json
    assert shown["kv_bytes_per_token"] == footprint(small).kv_bytes_per_token
    assert 2 * shown["kv_bytes_per_token"] == shown["dense_kv_bytes_per_token"]


def test_a_model_too_short_for_any_prompt_is_not_verified():
    config = tiny_model("llama", max_position_embeddings=16).config
    with pytest.raises(RapError, match="was made for 16 tokens, too few to compare"):
        bundled_prompts("/nowhere", config)


def test_a_config_that_does_not_say_what_it_keeps_is_refused(pruned, tmp_path):
    shutil.copytree(pruned, tmp_path / "copy")
    config = json.loads((pruned / "config.json").read_text("utf-8"))
    del config["rap"]["kept_fraction"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = run("verify", tmp_path / "copy")
    assert error_violations(result) == []
    assert "no kept_fraction" in result.err


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path, tokenizer):
    tiny_model("llama", vocab_size=50).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = run("verify", tmp_path)
    assert error_violations(result) == []
    assert "has more words than the model" in result.err


@pytest.mark.parametrize("name", ["--port=9000", "--host"])
def test_a_check_has_an_address_of_its_own(pruned, monkeypatch, name):
    monkeypatch.setattr(command_line, "runs_in", lambda source: "nothing")
    result = run("serve", pruned, "--check", "--", name, "1")
    assert error_violations(result) == []
    assert "--check chooses its own address" in result.err


def test_an_address_of_version_six_is_in_brackets():
    assert Server("OUT", "fe80::1", 8001).url == "http://[fe80::1]:8001"


def test_a_terminated_command_ends_its_engine(tmp_path):
    """SIGTERM, as of `timeout` or a cluster: without a handler the engine would go on alone."""
    engine = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    command = (
        "import sys; from unittest import mock; from rap import cli\n"
        "from rap.serving.engine import run_engine\n"
        f"call = lambda *_, **__: run_engine([sys.executable, '-c', {engine!r}], 'vLLM', 60)\n"
        "with mock.patch.object(cli, 'app', call): cli.main()"
    )
    with subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE) as process:
        file = tmp_path / "pid"
        _wait_for(lambda: file.is_file() and file.read_text() != "")
        process.terminate()
        process.wait(20)
    _wait_for(lambda: _gone(file.read_text()), 20)


def _gone(pid: str) -> bool:
    """Whether a process has ended; its parent may have to ask for that yet."""
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "(zombie)" in status.read_text()


def _wait_for(there: Callable[[], bool], seconds: float = 60) -> None:
    """Until it is so: a busy machine takes a while."""
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)
