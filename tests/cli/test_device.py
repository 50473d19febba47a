"""One `--device` in every command that runs a model: where it loads, what is printed, kept."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
import typer

from cases.command import run
from cases.models import tiny_model
from rap import RapError
from rap.checkpoint import device as devices
from rap.checkpoint import load as loading
from rap.checkpoint.device import placement, say_device, working_device
from rap.cli import app
from rap.evaluation.cache.compressed import CacheCompression
from rap.pipeline import compress
from rap.runtime import sources

# Commands that run no model, or leave the device to another program.
NO_MODEL = {
    *("rap fetch", "rap inspect", "rap report", "rap doctor", "rap completion", "rap serve"),
    *("rap export stock", "rap export gguf"),
}
COMMANDS = [
    "compress bundled -o out",
    "plan bundled -o out.rap",
    "analyze probe bundled -o out",
    "compare bundled --methods rap -o out",
    "demo bundled -o out",
    "sample bundled -o out.jsonl",
    "bench bundled --retain 0.5",
    "verify bundled",
    "evaluate perplexity bundled",
    "evaluate fidelity bundled --dense bundled",
    "evaluate retrieval bundled",
    "evaluate cache bundled --bits hqq4",
    "evaluate zero-shot bundled",
    "evaluate generation bundled --dense bundled",
    "apply bundled plan.rap -o out",
    "recover pruned --teacher bundled -o out",
]


def _leaves(command, path=""):
    """Every command that can be run, by its words."""
    path = f"{path} {command.name}".strip()
    for child in getattr(command, "commands", {}).values():
        yield from _leaves(child, path)
    if not hasattr(command, "commands"):
        yield path, command


def _options(command):
    return {flag: one for one in command.params for flag in one.opts}


LEAVES = {
    f"rap {name}".replace("rap rap", "rap"): one
    for name, one in _leaves(typer.main.get_command(app))
}


def test_every_command_that_runs_a_model_has_the_same_device():
    assert LEAVES.keys() >= NO_MODEL
    run_models = LEAVES.keys() - NO_MODEL
    tried = {next(n for n in LEAVES if f"rap {one}".startswith(f"{n} ")) for one in COMMANDS}
    assert tried == run_models, "each of them is tried below"
    helps = set()
    for name in run_models:
        option = _options(LEAVES[name])["--device"]
        assert option.default == "auto", name
        helps.add(option.help)
    assert len(helps) == 1
    maps = {n: _options(one).get("--device-map") for n, one in LEAVES.items()}
    assert all(one.default is None for one in maps.values() if one is not None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan and a pruned checkpoint of the bundled model."""
    folder = tmp_path_factory.mktemp("made")
    small = ("--windows", 2, "--window", 64)
    assert run("plan", "bundled", "-o", folder / "plan.rap", *small).code == 0
    words = ("compress", "bundled", "-o", folder / "pruned", "--evaluate", "none", *small)
    assert run(*words).code == 0
    return folder


@pytest.fixture
def loads(monkeypatch, made):
    """A machine with a GPU, on which loading a model ends in an error that says where."""

    def refuse(source, config, **kwargs):
        raise RapError(f"loads on {kwargs.get('device_map')}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    monkeypatch.setattr(loading, "_load", refuse)
    monkeypatch.setattr(CacheCompression, "check", lambda _: None)  # of what is not installed
    monkeypatch.chdir(made)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_loads_where_it_is_told_and_on_the_gpu_by_default(loads, command):
    words = shlex.split(command)
    for asked, where in ((), "cuda"), (("--device", "cpu"), "None"):
        result = run(*words, *asked)
        assert result.err == f"error: loads on {where}\n", (asked, result.err)
    if "--device-map" in _options(LEAVES[_name(command)]):
        # Of recovery the teacher alone is spread; the pruned model loads first.
        where = "cuda" if words[0] == "recover" else "auto"
        assert run(*words, "--device-map", "auto").err == f"error: loads on {where}\n"
        both = run(*words, "--device", "cpu", "--device-map", "auto")
        assert "--device cpu and --device-map auto exclude each other" in both.err
        assert len(both.err.splitlines()) == 1
    nowhere = run(*words, "--device", "nowhere")
    assert "no device 'nowhere' on this machine; use auto, cpu or cuda" in nowhere.err


def _name(command):
    return next(name for name in LEAVES if f"rap {command}".startswith(f"{name} "))


def test_a_command_prints_its_device_and_records_it(made, monkeypatch):
    monkeypatch.chdir(made)
    words = ("evaluate", "perplexity", "pruned", "--window", 64, "--max-windows", 1, "-o", "r.json")
    result = run(*words)
    assert result.code == 0, result.err
    assert result.err.splitlines()[0] == f"device: {devices.device_name('cpu')}"
    assert json.loads((made / "r.json").read_text())["provenance"]["settings"]["device"] == "cpu"
    report = json.loads((made / "pruned" / "rap_report.json").read_text())
    assert report["provenance"]["settings"]["device"] == "cpu"


def test_a_model_on_several_devices_is_said_to_be_spread(capsys):
    say_device(SimpleNamespace(hf_device_map={"a": 1, "b": 0, "c": 1}))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "device: spread over 0, 1\n")


def test_layer_by_layer_has_the_same_default(tmp_path, monkeypatch):
    """The layers of `--stream` run on the GPU too; `meta` stands for it."""
    used = []

    def remember(self, weights, device="cpu", **_):
        used.append(str(device))
        raise RapError("enough")

    monkeypatch.setattr(sources.StoredLayers, "__init__", remember)
    words = ("compress", "bundled", "--stream", "-o", tmp_path / "out")
    assert run(*words).err == "error: enough\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run(*words).err == "error: enough\n"
    assert run(*words, "--device", "cpu").err == "error: enough\n"
    assert used == ["cpu", "cuda", "cpu"]


def test_the_functions_have_it_too(monkeypatch):
    assert working_device() == torch.device("cpu")
    assert (placement(), placement(device_map="auto")) == ({}, {"device_map": "auto"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert placement() == {"device_map": "cuda"}
    monkeypatch.setattr(loading, "_load", lambda *_, **given: 1 / 0 if given["device_map"] else 0)
    with pytest.raises(ZeroDivisionError):
        compress("bundled")


def test_a_live_model_stays_where_it_is(tokenizer, monkeypatch):
    model = tiny_model(vocab_size=4096)
    asked = {"num_windows": 2, "window": 32, "evaluate": None, "tokenizer": tokenizer}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("rap.checkpoint.provenance.device_used", lambda: "GPU")
    assert compress(model, 0.5, **asked).model.device.type == "cpu"
    with pytest.raises(RapError, match="model in memory runs where it is"):
        compress(model, 0.5, device="cpu", **asked)
