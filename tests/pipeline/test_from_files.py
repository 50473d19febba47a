"""Compressed layer by layer from files: the same checkpoint, with one layer in memory."""

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rap
from cases.command import error_violations, run
from cases.family_cases import CASES
from cases.method_cases import CASES as METHODS
from cases.method_cases import MethodCase
from cases.models import tiny_model
from rap.calibration import dense_context
from rap.calibration.registry import WINDOWS
from rap.checkpoint.load import load, load_dense
from rap.model.errors import RapError
from rap.pipeline import compress, objective
from rap.recovery import stages
from rap.recovery.layer_fit import FitConfig, LayerProblem
from rap.recovery.stages import work_folder
from rap.runtime import sources
from rap.runtime.sources import StoredLayers

FIT = FitConfig(window=32, num_windows=16, steps=8, validation_windows=4, rate=0.01)
TEXT = {"num_windows": 4, "window": 48}
FORWARD = "rap:metric=output"  # needs no gradients, and so no whole model
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "gpt_oss"]
WORDS = "The rain fell on the old house all night. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(WORDS * 120)
    return str(path)


def _dense(folder: Path, tokenizer: Any, name: str = "llama", **fields: Any) -> Path:
    """A checkpoint in several files, which reads real text."""
    case = next(case for case in CASES if case.name == name)
    # Rows of 48 numbers: the products of experts want 16 bytes.
    sizes = {"dtype": torch.bfloat16, "vocab_size": 4096, "max_position_embeddings": 64}
    sizes |= {"hidden": 48}
    model = case.model(**sizes | fields)
    model.save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    return folder


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = (load_file(path) for path in folder.glob("*.safetensors"))
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = stages._Run.fit
    monkeypatch.setattr(stages._Run, "fit", lambda run, config: fit(run, FIT))


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No whole model fits in memory."""
    monkeypatch.setattr(objective, "free_memory", lambda device: 2**20)


@pytest.mark.usefixtures("short_fit")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, FORWARD) for name in FAMILIES),
        *(
            ("llama", method)
            for method in ("rap", "palu", "elitekv", "transmla:freqfold=2", "matryoshka")
        ),
        ("qwen3", "rap"),
    ],
)
def test_the_checkpoint_is_the_one_made_in_memory(
    name: str, method: str, tokenizer: Any, text: str, tmp_path: Path
) -> None:
    dense = _dense(tmp_path / "dense", tokenizer, name)
    common: dict[str, Any] = {"evaluate": text, "recover": "fit", "method": method, **TEXT}
    memory = compress(str(dense), 0.5, tmp_path / "memory", **common)
    report = compress(dense, 0.5, tmp_path / "streamed", fit=FIT, **common, stream=True).report

    found, expected = _tensors(tmp_path / "streamed"), _tensors(tmp_path / "memory")
    assert found.keys() == expected.keys()
    assert [n for n, x in expected.items() if not torch.equal(found[n], x)] == []
    assert [n for n, x in expected.items() if found[n].dtype != x.dtype] == []
    assert any(layer["after"] < layer["before"] for layer in report["recovery"]["fit"]["layers"])
    for key in ("perplexity_before", "perplexity_fitted", "perplexity_after"):
        assert report["recovery"][key] == pytest.approx(memory.report["recovery"][key], rel=1e-6)
    assert report["recovery"]["fit"] == memory.report["recovery"]["fit"]
    for model in ("dense", "pruned"):
        mine, theirs = report[model], memory.report[model]
        assert mine["fingerprint"] == theirs["fingerprint"]
        if (
            name == "llama"
        ):  # the others' windows of 4 tokens are too short to measure it in a cache
            assert mine["kv_bytes_per_token"] == theirs["kv_bytes_per_token"]
        assert mine["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-6)
    assert report["pruned"]["kl"]["value"] == pytest.approx(
        memory.report["pruned"]["kl"]["value"], rel=1e-4
    )
    same = ("source", "model_type", "calibration", "retain", "kept_fraction", "method", "traits")
    assert {key: report[key] for key in same} == {key: memory.report[key] for key in same}
    # It loads, with its weights checked, and tells what it is.
    assert load(tmp_path / "streamed").config.rap == load(tmp_path / "memory").config.rap
    stored = json.loads((tmp_path / "streamed" / "rap_report.json").read_text())
    assert stored == json.loads(json.dumps(report))
    assert "perplexity" in (tmp_path / "streamed" / "README.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "memory", "streamed"}


class _Living:
    """What layer sources hand out, as long as somebody holds it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.layers: list[weakref.ref[Any]] = []
        self.models: list[weakref.ref[Any]] = []
        self.most = {"layers": 0, "models": 0}
        for name, kept in (("working", "layers"), ("outside", "models")):
            monkeypatch.setattr(StoredLayers, name, self._counted(name, kept))

    def _counted(self, name: str, kept: str) -> Any:
        made = getattr(StoredLayers, name)

        def counted(source: StoredLayers, *args: Any, **kwargs: Any) -> Any:
            assert all(parameter.is_meta for parameter in source.model.parameters())
            given = made(source, *args, **kwargs)
            getattr(self, kept).append(weakref.ref(given))
            if self._living(kept) > self.most[kept]:
                gc.collect()  # of what only cycles hold, which takes long
                self.most[kept] = max(self.most[kept], self._living(kept))
            return given

        return counted

    def _living(self, kept: str) -> int:
        return sum(one() is not None for one in getattr(self, kept))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_one_layer_of_each_model_is_in_memory(
    name: str, tokenizer: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = _dense(tmp_path / "dense", tokenizer, name, layers=6)
    living = _Living(monkeypatch)
    options: dict[str, Any] = {"fit": FIT, "recover": "fit", "evaluate": text, **TEXT}
    compress(dense, 0.5, tmp_path / "out", method=FORWARD, stream=True, **options)
    # Passes over six layers: statistics, two judgements, the fit of two models, two measurements.
    assert len(living.layers) == 6 * 7
    assert living.most["layers"] == 2
    # A head that reads the dense states stays while the pruned model is measured.
    assert living.most["models"] <= 2


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = _dense(tmp_path / "dense", tokenizer)
    options: dict[str, Any] = {"fit": FIT, "recover": "fit", "evaluate": None, **TEXT}
    options["method"] = FORWARD
    compress(dense, 0.5, tmp_path / "whole", **options, stream=True)
    solve, solved, calibrated = LayerProblem.solve, [], []
    calibrate = dense_context.calibrate

    def solve_some(problem: LayerProblem) -> Any:
        solved.append(problem.index)
        if solved == [0, 1]:
            raise KeyboardInterrupt
        return solve(problem)

    def calibrate_once(*args: Any, **kwargs: Any) -> Any:
        calibrated.append(1)
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(LayerProblem, "solve", solve_some)
    monkeypatch.setattr(dense_context, "calibrate", calibrate_once)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compress(dense, 0.5, out, **options, stream=True)
    assert not out.exists()
    assert work_folder(out).is_dir()
    compress(dense, 0.5, out, **options, stream=True)
    assert (solved, calibrated) == ([0, 1, 1, 2], [1])
    found, expected = _tensors(out), _tensors(tmp_path / "whole")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not work_folder(out).exists()


def test_a_fit_that_is_no_better_is_left_out(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = _dense(tmp_path / "dense", tokenizer)
    options: dict[str, Any] = {"evaluate": None, **TEXT}
    compress(dense, 0.5, tmp_path / "cut", **options, stream=True)

    def spoil(problem: LayerProblem) -> Any:
        with torch.no_grad():
            problem.attention.o_proj.weight.mul_(30)
        return rap.recovery.layer_fit.LayerFit(problem.index, 1.0, 0.5)

    monkeypatch.setattr(LayerProblem, "solve", spoil)
    options |= {"recover": "fit", "fit": FIT, "stream": True}
    report = compress(dense, 0.5, tmp_path / "out", **options).report
    recovery = report["recovery"]
    assert recovery["perplexity_fitted"] > recovery["perplexity_before"]
    assert recovery["perplexity_after"] == recovery["perplexity_before"]
    found, expected = _tensors(tmp_path / "out"), _tensors(tmp_path / "cut")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_statistics_of_a_file_take_any_method_that_cuts(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dense = _dense(tmp_path / "dense", tokenizer, "qwen3", dtype=torch.float32)
    model = load_dense(dense)
    method = rap.Rap(retain=0.5)
    windows = rap.load_windows("bundled", tokenizer, num_windows=2, window=32)
    statistics = rap.calibrate(model, windows, method.needs_for(model))
    statistics.save(tmp_path / "statistics")
    text = tmp_path / "unread.txt"
    text.write_text("not read", encoding="utf-8")
    given: dict[str, Any] = {"statistics": tmp_path / "statistics", "evaluate": None}
    given["calibration"] = text
    report = compress(dense, 0.5, tmp_path / "out", **given, stream=True, progress=True).report
    assert "calibrating" not in capsys.readouterr().err
    made = report["provenance"]["settings"]
    assert (made["num_windows"], made["window"]) == (2, 32)
    assert made["statistics"] == str(tmp_path / "statistics")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Calibration: 2 windows of 32 tokens, from a file of statistics." in card
    expected = method.apply(model, method.plan(model, statistics))
    assert rap.fingerprint_model(load(tmp_path / "out")) == rap.fingerprint_model(expected)
    with pytest.raises(RapError, match="needs the statistics fisher"):
        compress(dense, 0.5, tmp_path / "other", method="rap:paper", **given, stream=True)


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_every_method_reads_files_or_says_in_a_line_why_not(
    case: MethodCase, tokenizer: Any, tmp_path: Path
) -> None:
    """Where the model fits, only what evaluates it is left for a loaded one."""
    dense, method = _dense(tmp_path / "dense", tokenizer), case.method(0.5)
    given: dict[str, Any] = {"method": method, "evaluate": None, "recover": "none", **TEXT}
    assert bool(method.tries) == (WINDOWS in method.needs)
    if method.tries:
        with pytest.raises(RapError, match=rf"\({method.tries}\): remove --stream, or change"):
            compress(dense, 0.5, tmp_path / "out", **given, stream=True)
        assert not (tmp_path / "out").exists()
        return
    compress(dense, 0.5, tmp_path / "out", **given, stream=True)
    loaded = compress(dense, 0.5, tmp_path / "memory", **given).report
    report = json.loads((tmp_path / "out" / "rap_report.json").read_text())
    assert report["pruned"]["fingerprint"] == loaded["pruned"]["fingerprint"]


@pytest.mark.usefixtures("no_room")
def test_the_command_says_what_it_does_and_refuses_what_it_cannot(
    tokenizer: Any, tmp_path: Path
) -> None:
    dense, out = _dense(tmp_path / "dense", tokenizer), tmp_path / "out"
    given = ("compress", dense, "--stream", "--retain", 0.5, "--windows", 2, "--window", 32)
    given += ("--evaluate", "none", "-o", out)
    result = run(*given, "--json")
    assert result.code == 0, result.err
    assert result.json["method"]["metric"] == "output"
    first, second, *_ = result.err.splitlines()
    assert first.startswith(
        "objective: metric 'output', statistics layer by layer: metric 'loss', as"
    )
    assert first.endswith("; for 'loss' give --statistics of a machine that holds the model")
    assert second.startswith("layer by layer it takes at most about")
    assert result.json["objective"]["metric"] == "output"
    assert "Objective: metric `output`, statistics layer by layer (metric 'loss', as" in (
        out / "README.md"
    ).read_text(encoding="utf-8")
    assert load(out).config.rap["method"]["metric"] == "output"
    for arguments, message in {
        ("--metric", "loss"): "gradients of the loss",
        ("--method", "rap:paper"): "method rap needs the statistics fisher",
        ("--method", "palu"): "method palu needs the statistics fisher",
        ("--budget", "search"): "evaluates the whole model (budget 'search'): remove --stream",
        ("--recover", "fast"): "--stream takes none or fit",
        ("--dtype", "float32"): "remove --dtype and --device-map",
        ("--statistics", tmp_path / "nowhere"): "nowhere",
        ("--device", "nowhere"): "no device 'nowhere'",
    }.items():
        refused = run(*given, "--force", *arguments)
        assert (error_violations(refused), message in refused.err) == ([], True), refused.err
    refused = run("compress", dense, "--statistics", "file", "-o", out, "--force")
    assert "--statistics requires --stream" in refused.err


def test_where_the_model_fits_the_objective_is_that_of_a_loaded_one(
    tokenizer: Any, tmp_path: Path
) -> None:
    dense, out = _dense(tmp_path / "dense", tokenizer), tmp_path / "out"
    given = ("compress", dense, "--retain", 0.5, "--windows", 2, "--window", 32)
    given += ("--evaluate", "none", "--json")
    loaded = run(*given, "-o", tmp_path / "memory").json
    result = run(*given, "-o", out, "--stream")
    first, second, *_ = result.err.splitlines()
    assert first.startswith(
        "objective: metric 'loss', statistics in memory: gradients of the loss, as"
    )
    assert first.endswith("GiB free); --metric output keeps to one layer in memory")
    assert second.startswith("it takes at most about")
    assert result.json["method"] == loaded["method"]
    assert result.json["pruned"]["fingerprint"] == loaded["pruned"]["fingerprint"]
    assert result.json["objective"]["statistics"] == "in memory"
    assert "objective" not in loaded
    # A method that has no other way is taken too, where it was refused.
    paper = run(*given, "-o", tmp_path / "paper", "--stream", "--method", "rap:paper")
    assert paper.json["objective"]["metric"] is None
    assert paper.err.splitlines()[0].endswith("GiB free)")
    asked = run(*given, "-o", tmp_path / "asked", "--stream", "--metric", "output")
    line = (
        "objective: metric 'output', statistics layer by layer: it needs no gradients of the loss"
    )
    assert asked.err.splitlines()[0] == line


@pytest.mark.parametrize("room_first", [False, True])
def test_a_repeated_run_keeps_to_its_objective(
    room_first: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, out = _dense(tmp_path / "dense", tokenizer), tmp_path / "out"
    options: dict[str, Any] = {"evaluate": None, **TEXT}
    for room, stops in ((room_first, True), (not room_first, False)):
        with monkeypatch.context() as patched:
            patched.setattr(objective, "free_memory", lambda device, room=room: room * 2**40)
            if stops:
                patched.setattr(rap.Rap, "plan_from", _stop)
                with pytest.raises(KeyboardInterrupt):
                    compress(dense, 0.5, out, **options, stream=True)
            else:
                report = compress(dense, 0.5, out, **options, stream=True).report
    assert report["objective"]["metric"] == ("loss" if room_first else "output")


def test_gradients_take_more_than_the_weights_and_grow_with_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(dtype=torch.bfloat16)

    def taken(window: int) -> int:
        context: Any = SimpleNamespace(
            model=model, reading=SimpleNamespace(num_windows=2, window=window)
        )
        return objective.in_memory(context, frozenset({"gradients"}))

    assert taken(256) > taken(32)
    monkeypatch.setattr(objective, "estimate_memory", lambda *_: {"total": 0})
    # As they are stored, and in float32.
    assert taken(32) > 3 * sum(p.nbytes for p in model.parameters())


def _stop(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_every_source_is_one_interface() -> None:
    names = [name for name in vars(sources.LayerSource) if not name.startswith("_")]
    for kind in (sources.LoadedLayers, StoredLayers):
        assert [name for name in names if not hasattr(kind, name) and name != "model"] == []
