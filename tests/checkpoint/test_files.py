"""Directories written whole or not at all, and broken or foreign ones refused in one line."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from cases.models import random_tokens, tiny_model
from cases.plans import random_plan
from rap.checkpoint import files
from rap.checkpoint.files import (
    check_output,
    check_output_file,
    check_safetensors,
    read_json,
    whole_directory,
    whole_file,
    write_json,
)
from rap.checkpoint.load import is_pruned, load, load_config, load_dense, load_tokenizer
from rap.model.errors import CheckpointError, PlanError
from rap.model.fingerprint import Fingerprint, fingerprint_model, fingerprint_tensors
from rap.surgery.apply import apply

WIDTHS = [(3, 5), (5, 9)]


def _names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path):
    """An output directory that a command wrote before."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "out"


def _write(output, **options) -> None:
    with whole_directory(output, **options) as partial:
        (partial / "new").write_text("new")
        assert partial.parent == output.parent, "a rename needs the same file system"


def test_directory_appears_whole(tmp_path):
    with whole_directory(tmp_path / "a" / "out") as partial:
        (partial / "new").write_text("new")
        assert not (tmp_path / "a" / "out").exists()
    assert _names(tmp_path / "a") == ["out"]
    assert _names(tmp_path / "a" / "out") == ["new"]


def test_exception_leaves_the_old_state_and_no_rest(old, tmp_path):
    for output in (old, tmp_path / "fresh"):
        with (  # noqa: PT012 (the block is what is tested)
            pytest.raises(RuntimeError, match="stop"),
            whole_directory(output, force=True) as partial,
        ):
            (partial / "new").write_text("new")
            raise RuntimeError("stop")
    assert _names(tmp_path) == ["out"]
    assert _names(old) == ["config.json"]


def test_existing_output_is_refused_without_force(old, tmp_path):
    with pytest.raises(CheckpointError, match="exists: pass --force to replace it"):
        _write(old)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file: name a directory"):
        _write(tmp_path / "file", force=True)
    assert _names(tmp_path) == ["file", "out"]
    assert _names(old) == ["config.json"]


def test_empty_output_needs_no_force(tmp_path):
    (tmp_path / "out").mkdir()
    _write(tmp_path / "out")
    assert _names(tmp_path / "out") == ["new"]


@pytest.mark.parametrize("atomic", [True, False], ids=["exchange", "no exchange"])
def test_force_replaces_the_whole_directory(old, atomic):
    real = files._exchange
    with mock.patch.object(files, "_exchange", real if atomic else lambda *paths: False):
        _write(old, force=True)
    assert _names(old) == ["new"]
    assert _names(old.parent) == ["out"]


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is a call of Linux")
def test_replacing_is_one_step(old):
    """There is no moment at which neither the old nor the new directory has the name."""
    with mock.patch("pathlib.Path.rename", side_effect=AssertionError("two steps")):
        _write(old, force=True)
    assert _names(old) == ["new"]


_KILLED = """
import os, signal, sys
from rap.checkpoint.files import whole_directory
with whole_directory(sys.argv[1], force=True) as partial:
    (partial / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_leaves_the_old_state_and_the_next_run_cleans_up(old):
    result = subprocess.run([sys.executable, "-c", _KILLED, str(old)])
    assert result.returncode == -9
    assert _names(old) == ["config.json"]
    abandoned = [name for name in _names(old.parent) if "partial" in name]
    assert len(abandoned) == 1, "the process did not die inside the block"
    running, elsewhere = files._partial(old, os.getppid()), ".out.partial-another-999999999"
    running.mkdir()
    (old.parent / elsewhere).mkdir()
    _write(old, force=True)
    assert _names(old) == ["new"]
    # Another run's stays, and one that a machine with the same folder writes.
    assert _names(old.parent) == sorted([running.name, elsewhere, "out"])


def test_names_with_wildcards_clean_only_their_own(tmp_path):
    other = files._partial(tmp_path / "outx", 999999999)
    other.mkdir()
    _write(tmp_path / "out[x]")
    assert _names(tmp_path) == [other.name, "out[x]"]


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": [2]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [2], "b": 1}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"b": object()})
    assert _names(tmp_path) == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [2], "b": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved pruned checkpoint; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model()
    apply(model, random_plan(model, WIDTHS)).save_pretrained(folder)
    return folder


@pytest.fixture
def pruned(saved, tmp_path):
    folder = tmp_path / "pruned"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _refused(load_it, source, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load_it(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [-1, 1000, 4, 0], ids=["a byte", "half", "4 bytes", "empty"])
def test_truncated_weights_are_refused(pruned, keep):
    path = pruned / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    _refused(load, pruned, "is truncated or damaged")


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b"xx", b"5", b'["a"]', b"[" * 100_000),
        *(b'{"a": 1}', b'{"a": {}}', b'{"a": {"data_offsets": [0]}}'),
        b'{"a": {"data_offsets": [0, "4"]}}',
        b'{"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    ],
    ids=lambda header: header[:30].decode(),
)
def test_damaged_header_is_refused(tmp_path, header):
    content = len(header).to_bytes(8, "little") + header + b"rest"
    (tmp_path / "x.safetensors").write_bytes(content)
    _refused(check_safetensors, tmp_path / "x.safetensors", "is truncated or damaged")


def test_directory_without_a_model_is_refused(tmp_path, pruned):
    for load_it in (load, load_dense, load_config):
        _refused(load_it, tmp_path, "is a directory without a model: config.json is missing")
    (pruned / "model.safetensors").unlink()
    _refused(load, pruned, "cannot load weights from")
    (pruned / "config.json").write_text("{")
    _refused(load, pruned, "cannot read a model config from")
    (pruned / "config.json").write_text('{"model_type": "no such model"}')
    _refused(load, pruned, "cannot read a model config from")
    _refused(load_tokenizer, pruned, "cannot load a tokenizer from")


def test_name_that_is_no_directory_is_refused():
    _refused(load_config, "no/such-model", "cannot read a model config from no/such-model")


def test_load_gives_a_model_in_eval_mode(pruned):
    model = load(pruned)
    assert not model.training
    assert is_pruned(model)
    assert is_pruned(model.config)
    assert not is_pruned(tiny_model())


def test_load_takes_a_dense_checkpoint_too(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tokens = random_tokens(1, 5)
    for load_it in (load, load_dense):
        assert torch.equal(load_it(tmp_path)(tokens).logits, model(tokens).logits)


def test_changed_weights_are_detected(pruned):
    path = pruned / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    _refused(load, pruned, "the weights in .* are not the ones its config describes")
    assert is_pruned(load(pruned, verify=False))


def test_a_fingerprint_that_is_no_text_is_refused(pruned):
    path = pruned / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["rap"]["fingerprint"] = 5
    path.write_text(json.dumps(config), encoding="utf-8")
    _refused(load, pruned, r"not the ones its config describes \(fingerprint 5\)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_load_in_any_dtype_passes_the_check(pruned, dtype):
    assert load(pruned, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("given", [False, True], ids=["own", "given state"])
def test_saved_fingerprint_is_that_of_the_stored_weights(tmp_path, tied, given):
    model = tiny_model(tie_word_embeddings=tied)
    small = apply(model, random_plan(model, WIDTHS))
    with torch.no_grad():
        small.model.norm.weight += 1
    options = {"state_dict": small.state_dict()} if given else {}
    small.save_pretrained(tmp_path, **options)
    assert load(tmp_path).config.rap["fingerprint"] == fingerprint_model(small)


def test_fingerprint_does_not_depend_on_order_or_upcast():
    named = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7).half(),
        "c": torch.arange(4, dtype=torch.int32),
    }
    value = fingerprint_tensors(named.items())
    assert len(value) == 64
    assert fingerprint_tensors(reversed(named.items())) == value
    upcast = {name: t.float() if t.is_floating_point() else t for name, t in named.items()}
    assert fingerprint_tensors(upcast.items()) == value
    assert (
        fingerprint_tensors((n, t.double() if n == "a" else t) for n, t in named.items()) == value
    )


def test_fingerprint_sees_every_change():
    values = torch.randn(6)
    changed = values.clone()
    changed[4] = torch.nextafter(changed[4], torch.tensor(9.0))
    variants = [
        [("a", values)],
        [("b", values)],
        [("a", changed)],
        [("a", values.flip(0))],
        [("a", values.view(2, 3))],
        [("a", values), ("b", values)],
        [],
        # Integers that float32 cannot tell apart.
        [("a", torch.tensor([2**24]))],
        [("a", torch.tensor([2**24 + 1]))],
    ]
    assert len({fingerprint_tensors(variant) for variant in variants}) == len(variants)


def test_fingerprint_in_chunks_is_the_same():
    tensor = torch.randn(5, 7).bfloat16().T
    whole, parts = Fingerprint(), Fingerprint()
    whole.add("a", tensor)
    with mock.patch("rap.model.fingerprint._CHUNK", 4):
        parts.add("a", tensor)
    assert parts.value() == whole.value()
    assert whole.value() == fingerprint_tensors([("a", tensor.contiguous().float())])


class Packed(torch.Tensor):
    """Weights that stand for their doubles."""

    def dequantize(self):
        return 2 * self.as_subclass(torch.Tensor)


def test_fingerprint_of_packed_weights_is_of_what_they_stand_for():
    values = torch.randn(5)
    packed = values.as_subclass(Packed)
    assert fingerprint_tensors([("a", packed)]) == fingerprint_tensors([("a", 2 * values)])


def test_fingerprint_of_a_tied_model_counts_a_weight_once():
    model = tiny_model(tie_word_embeddings=True)
    stored = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    assert fingerprint_model(model) == fingerprint_tensors(stored.items())


def test_a_file_that_a_killed_process_left_is_removed_by_the_next(tmp_path):
    files._partial(tmp_path / "a.json", 999999999).write_text("half")
    running = files._partial(tmp_path / "a.json", os.getppid())
    running.write_text("half")
    write_json(tmp_path / "a.json", {})
    assert _names(tmp_path) == sorted([running.name, "a.json"]), "another run's half must stay"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EFBIG, "too much"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        Exception("File too large (os error 27)"),
        RuntimeError("PytorchStreamWriter failed writing file data/0"),
        OSError("262144 requested and 197152 written"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", [whole_directory, whole_file])
def test_a_full_disk_is_one_line_in_whatever_class(tmp_path, kind, error):
    message = r"no space left in .* \([\d,]+ MiB free\) to write out: make room"
    with pytest.raises(CheckpointError, match=message), kind(tmp_path / "out"):
        raise error
    assert _names(tmp_path) == []


@pytest.mark.parametrize("kind", [whole_directory, whole_file])
def test_other_errors_of_writing(tmp_path, kind):
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*out: .*denied"),
        kind(tmp_path / "out"),
    ):
        raise SafetensorError("Permission denied (os error 13)")
    with pytest.raises(RuntimeError, match="out of memory"), kind(tmp_path / "out"):
        raise RuntimeError("out of memory")
    with pytest.raises(PlanError, match="no space left for it"), kind(tmp_path / "out"):
        raise PlanError("no space left for it")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff{}", b"[" * 100_000])
def test_json_that_is_damaged_says_what_to_do(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json is damaged \(.*\): write it again"):
        read_json(tmp_path / "a.json", "write it again")
    write_json(tmp_path / "a.json", {"a": 1})
    assert read_json(tmp_path / "a.json", "") == {"a": 1}


@pytest.mark.parametrize("kind", [whole_directory, whole_file])
def test_folders_that_were_made_for_an_output_go_with_it(tmp_path, kind):
    (tmp_path / "there").mkdir()
    with pytest.raises(RuntimeError), kind(tmp_path / "there" / "a" / "b" / "out"):
        raise RuntimeError
    assert _names(tmp_path / "there") == []
    with kind(tmp_path / "there" / "a" / "out") as partial:
        partial.mkdir(exist_ok=True)
    assert _names(tmp_path / "there" / "a") == ["out"]


def test_where_nothing_can_appear_is_refused_before_any_work(tmp_path, monkeypatch):
    mounted = next(path for path in map(Path, ("/proc", "/dev", "/")) if path.is_mount())
    with pytest.raises(CheckpointError, match="root of a file system"):
        check_output(mounted, force=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="may not be written to, where out would appear"):
        check_output(tmp_path / "out", force=False)
    with pytest.raises(CheckpointError, match="may not be written to"):
        check_output_file(tmp_path / "deeper" / "out.json", force=False)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder_stays_one(tmp_path, there):
    """What is written goes where it leads: another disk, as a rule."""
    (tmp_path / "disk").mkdir()
    if there:
        (tmp_path / "disk" / "big").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "big")
    with whole_directory(tmp_path / "out") as partial:
        (partial / "config.json").write_text("{}")
        assert partial.parent == tmp_path / "disk"
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "big" / "config.json").read_text() == "{}"
    with whole_file(tmp_path / "out" / "x.json") as partial:
        partial.write_text("1")
    (tmp_path / "y.json").symlink_to(tmp_path / "out" / "x.json")
    with whole_file(tmp_path / "y.json") as partial:
        partial.write_text("2")
    assert (tmp_path / "y.json").is_symlink()
    assert (tmp_path / "disk" / "big" / "x.json").read_text() == "2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out", "y.json"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["big"]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for output in (pipe, "/dev/null"):
        with pytest.raises(CheckpointError, match="is no regular file: name one"):
            check_output_file(output, force=True)
    assert pipe.is_fifo()


def test_a_state_that_is_given_by_place_is_fingerprinted(tmp_path):
    model = tiny_model()
    small = apply(model, random_plan(model, WIDTHS))
    state = {name: tensor + 1 for name, tensor in small.state_dict().items() if "index" not in name}
    small.save_pretrained(tmp_path, True, small.state_dict() | state)
    assert load(tmp_path).model.norm.weight[0] == small.model.norm.weight[0] + 1
