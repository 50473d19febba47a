"""Checkpoint directories: reading with clear errors, and writing whole or not at all."""

import contextlib
import ctypes
import glob
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

from .errors import CheckpointError, RapError
from .families import PREFIX, attention_spec, refuse_pruned
from .fingerprint import fingerprint_model
from .modeling import auto_class, register

PLAN_FILE = "plan.rap"
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def load_config(source: str | Path) -> Any:
    """The config of a checkpoint directory or hub name; CheckpointError if there is none."""
    register()
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{source} is a directory without a model: config.json is missing")
    if not path.is_dir() and (path.is_absolute() or str(source).startswith(".")):
        raise CheckpointError(f"there is no directory {source}: check the path")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read a model config from {source}: {_first(error)}"
        ) from error


def load_dense(source: str | Path, **kwargs: Any) -> Any:
    """A dense causal LM to compress, in eval mode; refused before its weights are read.

    Keyword arguments go to `from_pretrained` (dtype, device_map, ...).
    Raises UnsupportedModelError or CheckpointError.
    """
    config = load_config(source)
    refuse_pruned(config)
    attention_spec(config)
    return _load(source, config, **kwargs)


def load(source: str | Path, *, verify: bool = True, **kwargs: Any) -> Any:
    """Any causal LM, dense or pruned, in eval mode.

    A pruned checkpoint's weights are checked against the fingerprint in its config, unless
    `verify` is off or the requested dtype cannot represent the stored values.
    """
    config = load_config(source)
    model = _load(source, config, **kwargs)
    stored = (getattr(config, "rap", None) or {}).get("fingerprint")
    exact = model.dtype in (config.dtype, torch.float32, torch.float64)
    if verify and exact and stored and stored != fingerprint_model(model):
        raise CheckpointError(
            f"the weights in {source} are not the ones its config describes (fingerprint "
            f"{stored[:12]}): the checkpoint was changed or mixed with another one"
        )
    return model


def is_pruned(model: Any) -> bool:
    """Whether a model or config is of a pruned family."""
    config = getattr(model, "config", model)
    return str(config.model_type).startswith(PREFIX)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a checkpoint; CheckpointError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load a tokenizer from {source}: {_first(error)}") from error


def copy_processor(source: str | Path, folder: Path) -> None:
    """Copy what prepares images for a multimodal model, as it is, from a checkpoint that has it."""
    for name in _PROCESSOR_FILES:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copyfile(found, folder / name)


def check_output(output: str | Path, *, force: bool) -> None:
    """Raise CheckpointError if the directory `output` cannot be made or may not be replaced."""
    path = Path(output)
    _check_parents(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{output} is a file: name a directory")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise CheckpointError(
            f"{output} exists: pass --force to replace it, or name another output"
        )


def check_output_file(output: str | Path, *, force: bool) -> None:
    """Raise CheckpointError if the file `output` cannot be made or may not be replaced."""
    path = Path(output)
    _check_parents(path)
    if path.is_dir():
        raise CheckpointError(f"{output} is a directory: name a file")
    if path.exists() and not force:
        raise CheckpointError(
            f"{output} exists: pass --force to replace it, or name another output"
        )


@contextlib.contextmanager
def whole_file(output: str | Path, *, force: bool = True) -> Iterator[Path]:
    """A path to write to that becomes the file `output` only when the block ends well."""
    check_output_file(output, force=force)
    target = Path(output).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(output: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A directory to write into that becomes `output` only when the block ends well.

    A process killed inside leaves `output` as it was. An exception removes what was written.
    """
    check_output(output, force=force)
    target = Path(output).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _open_to_readers(partial)
        _move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """safetensors writes files for their owner alone; a server often runs as another user."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all, sorted and indented."""
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError if a safetensors file is shorter than its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little") if len(start) == 8 else size
        try:
            header = json.loads(file.read(length)) if length < size else None
        except ValueError:
            header = None
    entries = [v["data_offsets"][1] for k, v in (header or {}).items() if k != "__metadata__"]
    if header is None or 8 + length + max(entries, default=0) != size:
        raise CheckpointError(f"{path} is truncated or damaged ({size} bytes): download it again")


def _load(source: str | Path, config: Any, **kwargs: Any) -> Any:
    check_dtype(kwargs.get("dtype", "auto"))
    if Path(source).is_dir():
        for shard in sorted(Path(source).glob("*.safetensors")):
            check_safetensors(shard)
    try:
        return auto_class(config).from_pretrained(source, **kwargs).eval()
    except RapError:
        raise
    # ValueError also for a broken shard index, ImportError for a quantizer that is not installed.
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"cannot load weights from {source}: {_first(error)}") from error


def check_dtype(dtype: Any) -> None:
    """Raise CheckpointError unless `dtype` is "auto", or a torch type or the name of one."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and not isinstance(named, torch.dtype):
        raise CheckpointError(f"unknown dtype {dtype!r}: use auto, float32, bfloat16 or float16")


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_parents(path: Path) -> None:
    above = next((parent for parent in path.absolute().parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise CheckpointError(f"{above} is a file: {path} cannot be made inside it")


def _move_into_place(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        # Without an atomic exchange there is a moment with only the backup: keep it beside.
        backup = target.with_name(f".{target.name}.replaced-{os.getpid()}")
        target.rename(backup)
        partial.rename(target)
        shutil.rmtree(backup)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step (Linux renameat2); False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = (os.fsencode(first), os.fsencode(second))
    return rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _remove_abandoned(target: Path) -> None:
    for old in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        process = old.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc").exists():
            shutil.rmtree(old, ignore_errors=True)
