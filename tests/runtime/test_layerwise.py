"""Layers read from files one at a time: the same streams and statistics as of the loaded model."""

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.family_cases import CASES, Case
from cases.models import random_tokens, tiny_model
from rap.calibration.memory import estimate_layers
from rap.calibration.registry import STATISTICS, backward_needs
from rap.calibration.run import calibrate
from rap.checkpoint.load import load_dense
from rap.checkpoint.stored import StoredModel
from rap.model.errors import CalibrationError, RapError
from rap.model.fingerprint import fingerprint_model
from rap.runtime import layerwise, memory
from rap.runtime.layerwise import LayerwiseRunner, new_stream
from rap.runtime.logits import CHUNK_LOGITS
from rap.runtime.sources import LoadedLayers, StoredLayers

FORWARD = {*STATISTICS} - {*backward_needs(STATISTICS)}
# Layouts of attention, norms, experts, and layers that have none.
FAMILIES = ["llama", "phi3", "gpt_neox", "qwen3", "gemma3_text", "olmo2", "mixtral", "qwen3_moe"]
FAMILIES += ["gpt_oss", "lfm2", "gemma3"]
WINDOWS = random_tokens(3, 16)  # the last batch is smaller


def _saved(case: Case, folder: Path, **fields: Any) -> Any:
    """A model in several files, as it is loaded from there."""
    case.model(**{"dtype": torch.float32} | fields).save_pretrained(folder, max_shard_size="10KB")
    return load_dense(folder)


WALKED = [case for case in CASES if not case.value_norm]


@pytest.mark.parametrize("name", [case.name for case in CASES if case.value_norm])
def test_layers_that_read_others_are_not_walked_one_by_one(name: str) -> None:
    model = next(case for case in CASES if case.name == name).model(dtype=torch.float32)
    with pytest.raises(RapError, match="hand keys and values, or inputs of each layer, past it"):
        LayerwiseRunner(LoadedLayers(model), WINDOWS, 2)


@pytest.mark.parametrize("case", WALKED, ids=lambda case: case.name)
def test_layers_from_files_are_the_loaded_model_in_every_family(case: Case, tmp_path: Path) -> None:
    model = _saved(case, tmp_path)
    stored = StoredModel(tmp_path)
    assert len(stored.shards) > 2
    walked = [
        LayerwiseRunner(one, WINDOWS, 2) for one in (LoadedLayers(model), StoredLayers(stored))
    ]
    for stream in walked:
        stream.walk("walking")
    assert torch.equal(walked[0].hidden, walked[1].hidden)
    with torch.no_grad(), walked[1].finished() as finished:
        logits = torch.cat([finished(ids[None], use_cache=False).logits for ids in WINDOWS])
        expected = model(WINDOWS, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    model = _saved(next(case for case in CASES if case.name == name), tmp_path)
    expected = calibrate(model, WINDOWS, FORWARD, batch_size=2)
    found = calibrate(StoredLayers(StoredModel(tmp_path)), WINDOWS, FORWARD, batch_size=2)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert (layer is None) == (other is None)
        assert (layer or {}).keys() == (other or {}).keys()
        for key, value in (other or {}).items():
            # The same products in the same order, but for those that a family computes otherwise
            # where a mask is all true.
            torch.testing.assert_close(layer[key], value, rtol=1e-5, atol=1e-7)
    kept = ("num_windows", "window", "needs", "fingerprint")
    assert all(getattr(found, field) == getattr(expected, field) for field in kept)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_low_precision_checkpoint_works_in_float32(tied: bool, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    stored = StoredModel(tmp_path)
    assert stored.fingerprint == fingerprint_model(model)
    found = calibrate(StoredLayers(stored), WINDOWS, {"pairs"})
    expected = calibrate(load_dense(tmp_path, dtype=torch.float32), WINDOWS, {"pairs"})
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert all(torch.equal(layer[key], value) for key, value in other.items())
    outside = StoredLayers(stored).outside()
    same = outside.lm_head.weight.data_ptr() == outside.model.embed_tokens.weight.data_ptr()
    assert same == tied
    exact = StoredLayers(stored).outside(head=False, exact=True)
    assert exact.model.embed_tokens.weight.dtype == torch.bfloat16
    assert exact.lm_head.weight.is_meta != tied


def test_gradients_are_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(CalibrationError, match="gradients of the loss"):
        calibrate(StoredLayers(StoredModel(tmp_path)), WINDOWS, {"pairs", "fisher"})
    with pytest.raises(CalibrationError, match="outside the vocabulary"):
        calibrate(StoredLayers(StoredModel(tmp_path)), WINDOWS + 10_000, {"pairs"})


def test_a_large_stream_is_mapped_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    small = LayerwiseRunner(LoadedLayers(model), WINDOWS, 2, tmp_path)
    monkeypatch.setattr(layerwise, "HOST_SHARE", 0)
    large = LayerwiseRunner(LoadedLayers(model), WINDOWS, 2, tmp_path)
    for stream in (small, large):
        stream.walk("walking")
    assert torch.equal(small.hidden, large.hidden)
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(tmp_path) in line for line in lines) == 1
    assert list(tmp_path.iterdir()) == []
    assert new_stream((2, 3, 4), tmp_path / "new").shape == (2, 3, 4)


def test_the_estimate_counts_one_layer(tmp_path: Path) -> None:
    model = tiny_model(layers=5)
    model.save_pretrained(tmp_path)
    estimate = estimate_layers(StoredModel(tmp_path).model, WINDOWS, {"values"})
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert estimate["layer"] == 4 * layer
    head = model.lm_head.weight.numel() + 32
    assert estimate["outside"] == 4 * (head + CHUNK_LOGITS)
    assert estimate["streams"] == 4 * WINDOWS.numel() * 32
    both = estimate_layers(StoredModel(tmp_path).model, WINDOWS, {"values"}, kept=2)
    assert both["streams"] == 2 * estimate["streams"]
    assert estimate["statistics"] == 5 * 4 * 4 * 16 * 16
    assert estimate["total"] == sum(x for name, x in estimate.items() if name != "total")


def test_a_mapped_stream_takes_its_room_at_once(tmp_path, monkeypatch):
    """A disk that fills up later would kill the process with SIGBUS, without a word."""
    monkeypatch.setattr(layerwise, "HOST_SHARE", 0)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        layerwise._reserve(file.fileno(), 2**20, tmp_path)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 2**20
    huge = shutil.disk_usage(tmp_path).free // 4 * 2
    with pytest.raises(RapError, match=r"no space left in .*: make room, or take fewer windows"):
        new_stream((huge,), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_reserve_is_used_all_the_same(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(layerwise, "HOST_SHARE", 0)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert new_stream((2, 3), tmp_path).shape == (2, 3)


def test_a_container_may_have_less_room_than_its_machine(tmp_path, monkeypatch):
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(memory, "CONTAINER", (limit, used))
    whole = memory.free_memory(torch.device("cpu"))
    assert whole > 2**20
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert memory.free_memory(torch.device("cpu")) > 2**20
    limit.write_text("3000\n")
    monkeypatch.setattr(memory, "CONTAINER_STATISTICS", tmp_path / "stat")
    assert memory.free_memory(torch.device("cpu")) == 2000
    (tmp_path / "stat").write_text("anon 100\ninactive_file 600\nactive_file 50\n")
    assert memory.free_memory(torch.device("cpu")) == 2600
