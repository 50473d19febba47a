"""What scripts of experiments keep is named by weights and settings, not by a name alone."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rap
from cases.scripts import REPOSITORY, load_script
from rap import assets
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.evaluation.cache.compressed import CacheCompression
from rap.serving.targets import target_settings


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a model in it."""
    folder = tmp_path / "fitted"
    assets.reference_model().save_pretrained(folder)
    return folder


def fit_anew(folder: Path) -> None:
    """Other weights in the same folder."""
    model = assets.reference_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
    model.save_pretrained(folder)


def test_zero_shot_cells_of_other_weights_are_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    script = load_script("experiments/smollm2-zero-shot/run.py")
    context: Any = SimpleNamespace(fingerprint="dense", bos=None)
    subject = script.Subject("rap 0.7 fit", directory=checkpoint)
    key = script.cell_key(context, subject, "piqa", 500)
    path = tmp_path / "cell.json"
    # As this release keeps a cell, and as an earlier one did: the fingerprint beside the key.
    old = {name: x for name, x in key.items() if name != "fingerprint"}
    for cell in ({"key": key}, {"key": old, "fingerprint": key["fingerprint"]}):
        path.write_text(json.dumps(cell), encoding="utf-8")
        assert script.finished(path, key) == cell
        fit_anew(checkpoint)
        script.weights_of.cache_clear()
        assert script.finished(path, script.cell_key(context, subject, "piqa", 500)) is None
        assets.reference_model().save_pretrained(checkpoint)
        script.weights_of.cache_clear()
    assert script.finished(path, key | {"limit": 100}) is None


def test_zero_shot_cells_of_another_calibration_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("experiments/smollm2-zero-shot/run.py")
    context: Any = SimpleNamespace(fingerprint="dense", bos=None)
    (subject,) = (one for one in script.subjects([]) if one.name == "rap 0.7")
    key, path = script.cell_key(context, subject, "piqa", 500), tmp_path / "cell.json"
    path.write_text(json.dumps({"key": key}), encoding="utf-8")
    assert script.finished(path, key) is not None
    monkeypatch.setattr(script, "READING", replace(script.READING, num_windows=32))
    assert script.finished(path, script.cell_key(context, subject, "piqa", 500)) is None


def test_all_committed_zero_shot_cells_are_still_taken() -> None:
    script = load_script("experiments/smollm2-zero-shot/run.py")
    cells = sorted((REPOSITORY / "experiments/smollm2-zero-shot/cells").glob("*/*.json"))
    assert len(cells) > 60
    for path in cells:
        cell = json.loads(path.read_text(encoding="utf-8"))
        now = {name: cell[name] for name in ("fingerprint",) if "checkpoint" in cell["key"]}
        assert script.finished(path, cell["key"] | now | {"calibration": "as it was"}) == cell


def test_rows_of_the_pareto_are_of_the_weights(checkpoint: Path) -> None:
    script = load_script("experiments/smollm2-pareto/pareto.py")
    subject = script.Subject("rap", 0.7, "fit", checkpoint)
    key = subject.key("as it is", CacheCompression())
    row = {**key, "kl": 0.1}
    assert script.is_done(key, row)
    assert script.is_done(key, {name: x for name, x in row.items() if name != "fingerprint"})
    fit_anew(checkpoint)
    script.weights_of.cache_clear()
    assert not script.is_done(subject.key("as it is", CacheCompression()), row)


def test_the_pareto_of_another_calibration_is_not_gone_on_with() -> None:
    script = load_script("experiments/smollm2-pareto/pareto.py")
    found = json.loads(script.RESULT.read_text(encoding="utf-8"))
    settings, fingerprint = found["provenance"]["settings"], found["fingerprint"]
    assert script.stored(settings, fingerprint, found["calibration"]) == found["rows"]
    assert script.stored(settings, fingerprint, "another text") == []


def test_long_answers_are_of_the_weights_and_of_the_settings(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("experiments/archive/smollm2-long-output/run.py")
    monkeypatch.setattr(script, "SOURCE", "bundled")
    kept = tmp_path / "kept"
    kept.mkdir()
    asked: list[str] = []

    def answers(value: str, mode: str = "greedy", shard: int = 0) -> Any:
        subjects = script.Subjects(kept, [("fitted", checkpoint)])
        make = lambda: asked.append(value) or value  # noqa: E731
        return subjects.kept("answers", "fitted", make, **script.asked_of(mode, shard))

    assert (answers("first"), answers("again")) == ("first", "first")
    assert answers("sampled", "sampled") == "sampled"
    assert answers("others", shard=1) == "others"
    fit_anew(checkpoint)
    assert answers("anew") == "anew"
    monkeypatch.setattr(script, "NUM_TOKENS", 16)
    assert answers("short") == "short"
    assert asked == ["first", "sampled", "others", "anew", "short"]


@pytest.mark.parametrize(
    "name", ["experiments/width-bits/width_bits.py", "experiments/gguf-fidelity/gguf_fidelity.py"]
)
def test_kept_cuts_are_of_the_weights_and_the_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script(name)
    made: list[Path] = []

    def save(small: Any, plan: Any, folder: Path, tokenizer: Any) -> None:
        folder.mkdir(parents=True)
        made.append(folder)

    monkeypatch.setattr("checkpoints.save", save)  # the module that the script imports
    monkeypatch.setattr(DenseContext, "plan", lambda context, method: None)
    monkeypatch.setattr(rap.Rap, "apply", lambda method, model, plan: None)
    reading = CalibrationText(num_windows=2, window=32)
    context = DenseContext.open("bundled", reading=reading)
    assert script.cut(context, 0.5, tmp_path) == script.cut(context, 0.5, tmp_path)
    assert len(made) == 1
    other = DenseContext.open("bundled", reading=replace(reading, seed=1))
    changed = DenseContext.open("bundled", reading=reading)
    with torch.no_grad():
        changed.model.lm_head.weight.mul_(2)
    folders = {script.cut(one, 0.5, tmp_path) for one in (context, other, changed)}
    assert len(folders) == len(made) == 3


def test_cells_of_the_ladder_are_of_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("experiments/ladder/ladder.py")
    path, asked = tmp_path / "cell.json", script.settings("rap", 0.7, ("fit",))
    path.write_text(json.dumps({"dense_fingerprint": "f", **asked}), encoding="utf-8")
    asked = json.loads(json.dumps(asked))
    assert script.finished(path, "f", asked) is not None
    assert script.finished(path, "another", asked) is None
    monkeypatch.setitem(script.CUTS, "rap", rap.Rap(align=4, merge=1))
    assert script.finished(path, "f", script.settings("rap", 0.7, ("fit",))) is None
    monkeypatch.setitem(script.CUTS, "rap", rap.Rap(align=2, merge=1))
    monkeypatch.setattr(script, "EVALUATION_WINDOWS", 4)
    assert script.finished(path, "f", script.settings("rap", 0.7, ("fit",))) is None


def test_all_committed_cells_of_the_ladder_are_still_taken() -> None:
    script = load_script("experiments/ladder/ladder.py")
    folder = REPOSITORY / "experiments/ladder/cells"
    dense = json.loads((folder / "dense.json").read_text(encoding="utf-8"))["dense_fingerprint"]
    cells, _ = script.stored(folder, dense)
    assert len(cells) == len(list(folder.glob("*.json"))) - 1


def test_a_normalised_model_is_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("experiments/qk-norm/qk_norm.py")
    dense, folder = assets.reference_model(), Path("runs/model")
    first = script.kept_folder(folder, dense, 200, 0)
    assert first == script.kept_folder(folder, dense, 200, 0)
    assert first.parent == folder.parent
    assert first != script.kept_folder(folder, dense, 100, 0)
    monkeypatch.setattr(script, "RATE", 2e-3)
    assert first != script.kept_folder(folder, dense, 200, 0)


def test_the_serving_benchmark_prunes_to_widths_that_need_no_padding() -> None:
    script = load_script("benchmarks/serving.py")
    method = script.pruning("bundled", 0.5)
    dim = assets.reference_model().config.head_dim
    wanted = target_settings("cpu", dim, "error")
    assert (method.retain, method.align) == (0.5, wanted["align"])
