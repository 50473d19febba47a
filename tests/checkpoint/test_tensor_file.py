"""Files of tensors per layer: what comes back, and one clear line for every other file."""

import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rap.calibration.statistics import Statistics
from rap.checkpoint.tensor_file import TensorFile
from rap.model.errors import PlanError
from rap.planning.plan import Plan

FILE = TensorFile("thing", 3, "a thing", PlanError, "make one")


def _both(about, tensors):
    return about, tensors


def test_what_is_saved_comes_back(tmp_path):
    """Layers without tensors stay empty, layer 1 does not take those of layer 10."""
    path = tmp_path / "thing"
    layers = [{"a": torch.arange(6.0).reshape(2, 3).mT}, None, *[{"a": torch.ones(1)}] * 9]
    FILE.save(path, layers, {"words": ["x"]})
    about, tensors = FILE.load(path, _both)
    assert about == {"version": 3, "words": ["x"]}
    assert torch.equal(tensors(0)["a"], layers[0]["a"])
    assert tensors(1) == {}
    assert tensors(10).keys() == {"a"}
    assert FILE.wrote(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "does not hold a thing: make one"),
        ({"format": "rap-thing"}, "is damaged"),
        ({"format": "rap-thing", "thing": "{"}, "is damaged"),
        ({"format": "rap-thing", "thing": "[]"}, "is damaged"),
        ({"format": "rap-thing", "thing": "{}"}, "is damaged .*: make one"),
        ({"format": "rap-thing", "thing": '{"version": 4}'}, "version 4, .* up to 3: upgrade"),
    ],
)
def test_other_files_are_refused(tmp_path, metadata, message):
    path = tmp_path / "thing"
    save_file({"x": torch.zeros(1)}, path, metadata=metadata)
    with pytest.raises(PlanError, match=message):
        FILE.load(path, _both)


@pytest.mark.parametrize(
    "layers",
    [
        [{"a": torch.tensor([1.0, 2.0])}],
        [{"b": torch.tensor([1.0, 3.0])}],
        [{"a": torch.tensor([[1.0, 3.0]])}],
        [None, {"a": torch.tensor([1.0, 3.0])}],
        [{"a": torch.tensor([1, 3], dtype=torch.int32)}],
    ],
)
def test_a_file_that_was_changed_is_refused(tmp_path, layers):
    """Whatever of the tensors is another: a value, a name, a shape, a layer, a type."""
    path, other = tmp_path / "thing", tmp_path / "other"
    FILE.save(path, [{"a": torch.tensor([1.0, 3.0])}], {})
    FILE.save(other, layers, {})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(other), other, metadata=metadata)
    with pytest.raises(PlanError, match=r"is damaged .not what was written.: make one"):
        FILE.load(other, _both)


def test_other_words_about_the_same_tensors_are_refused(tmp_path):
    path = tmp_path / "thing"
    FILE.save(path, [{"a": torch.ones(1)}], {"retain": 0.5})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata["thing"] = metadata["thing"].replace("0.5", "0.7")
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(PlanError, match="not what was written"):
        FILE.load(path, _both)
    # Files of releases before the digest have none, and are read as they were.
    del metadata["sha256"]
    save_file(load_file(path), path, metadata=metadata)
    assert FILE.load(path, _both)[0]["retain"] == 0.7


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.write_bytes(b"no tensors"), "it is of another kind, or damaged:"),
        (lambda path: path.write_bytes(b""), "it is of another kind, or damaged:"),
        (lambda path: path.mkdir(), "it is a directory, name the file, or"),
        (lambda path: None, "there is no such file, check the path, or"),
    ],
    ids=["words", "empty", "directory", "nothing"],
)
def test_unreadable_files_are_refused(tmp_path, make, why):
    path = tmp_path / "thing"
    make(path)
    for read in (lambda: FILE.load(path, _both), lambda: FILE.wrote(path)):
        with pytest.raises(PlanError, match=rf"cannot read a thing from .*thing: {why} make one$"):
            read()


@pytest.mark.parametrize("made", [Plan, Statistics])
def test_a_header_that_lacks_something_is_damage(tmp_path, made):
    """Every reader turns a header without what it needs into the same line."""
    path, file = tmp_path / "file", sys.modules[made.__module__].FILE
    file.save(path, [], {})
    with pytest.raises(file.error, match=f"is damaged .*: {file.remedy}"):
        made.load(path)
