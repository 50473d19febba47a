"""Files and directories that are written atomically, and the folder of what is fetched."""

import contextlib
import ctypes
import errno
import glob
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..model.errors import CheckpointError, RapError

PLAN_FILE = "plan.rap"
REPORT_FILE = "rap_report.json"
CONFIG_FILE = "config.json"
_CONFIG_KEYS = {"model_type", "architectures"}  # other programs have a config.json too
_SHOWN = 3  # names of files in the way
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries that write by themselves (safetensors, tokenizers, torch) say the same.
_NO_ROOM_WORDS = (
    *("no space left", "quota exceeded", "file too large"),
    *("pytorchstreamwriter", "inline_container", "iostream error"),
    "requested and",  # numpy: 262144 requested and 197152 written
)
# Whatever is no header of safetensors: not JSON, no object, entries that lack something.
_NO_HEADER = (
    *(ValueError, AttributeError, LookupError, TypeError, RecursionError),
    SafetensorError,
)
_SYSTEM_ERROR = re.compile(r"\(os error \d+\)")  # an OSError, as a library in Rust words it


def check_folder(output: str | Path) -> None:
    """Raise CheckpointError if `output` cannot be a folder that files are written into."""
    path = Path(output)
    _check_parents(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{output} is a file: name a directory")


def check_output(output: str | Path, *, force: bool) -> None:
    """Raise CheckpointError if the directory `output` cannot be made or may not be replaced.

    What is replaced goes whole. So the directory one works in, and those above it, are refused
    always, as are roots of file systems, and `force` takes only what this package or transformers
    wrote. A link to a directory stands for that directory.
    """
    check_folder(output)
    path = Path(output).resolve()
    if Path.cwd().is_relative_to(path):
        raise CheckpointError(
            f"{output} is the directory you work in, or one above it, which would be replaced "
            "whole: name a directory inside it"
        )
    if path.is_mount():
        raise CheckpointError(
            f"{path} is the root of a file system, which cannot be replaced whole: name a "
            "directory inside it"
        )
    if not path.is_dir() or not any(path.iterdir()):
        return
    if (path / ".git").exists():
        raise CheckpointError(
            f"{output} is a git repository, which would be replaced with its history: choose "
            "another output, and copy its files there"
        )
    if not _is_checkpoint(path):
        names = sorted(entry.name for entry in path.iterdir())
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise CheckpointError(
            f"{output} has files in the way ({shown}) and is no checkpoint, which --force would "
            "replace: choose another output, or empty it yourself"
        )
    if not force:
        raise CheckpointError(
            f"{output} exists: pass --force to replace it, or choose another output"
        )


def _is_checkpoint(folder: Path) -> bool:
    """Whether transformers or this package wrote a folder."""
    try:
        found = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and not _CONFIG_KEYS.isdisjoint(found)


def check_output_file(output: str | Path, *, force: bool) -> None:
    """Raise CheckpointError if the file `output` cannot be made or may not be replaced."""
    path = Path(output)
    _check_parents(path)
    if path.is_dir():
        raise CheckpointError(f"{output} is a directory: name a file")
    if path.exists() and not path.is_file():  # a device would be replaced, a pipe has no folder
        raise CheckpointError(f"{output} is no regular file: name one")
    if path.exists() and not force:
        raise CheckpointError(
            f"{output} exists: pass --force to replace it, or choose another output"
        )


@contextlib.contextmanager
def whole_file(output: str | Path, *, force: bool = True) -> Iterator[Path]:
    """A path to write to that becomes the file `output` only when the block ends well.

    Raises CheckpointError if `output` may not be replaced, or where there is no room for it.
    """
    check_output_file(output, force=force)
    target = Path(output).resolve()
    made = _make_parents(target)
    _remove_abandoned(target)
    partial = _partial(target, os.getpid())
    try:
        with _written(target):
            yield partial
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
        _remove_empty(made)


@contextlib.contextmanager
def whole_directory(
    output: str | Path, *, force: bool = False, own: bool = False
) -> Iterator[Path]:
    """A directory to write into that becomes `output` only when the block ends well.

    A process killed inside leaves `output` as it was. An exception removes what was written. `own`
    is for folders that this package names itself, and so replaces whatever they hold. Raises
    CheckpointError if `output` may not be replaced, or where there is no room for it.
    """
    check_folder(output) if own else check_output(output, force=force)
    target = Path(output).resolve()
    made = _make_parents(target)
    _remove_abandoned(target)
    partial = _partial(target, os.getpid())
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with _written(target):
            yield partial
            _open_to_readers(partial)
            _move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(made)


def _make_parents(target: Path) -> list[Path]:
    """Make the folders above a path; those that were not there, the innermost first."""
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    return made


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that nothing came into: an output that failed leaves no trace."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def no_room(error: BaseException) -> bool:
    """Whether an error, of the system or of a library that writes, is of a disk that is full."""
    words = str(error).lower()
    return getattr(error, "errno", None) in _NO_ROOM or any(
        sign in words for sign in _NO_ROOM_WORDS
    )


@contextlib.contextmanager
def _written(target: Path) -> Iterator[None]:
    """Turn an error of writing `target`, in whatever class, into one line that says what to do."""
    try:
        yield
    except RapError:
        raise
    except Exception as error:
        if no_room(error):
            free = shutil.disk_usage(target.parent).free / 2**20
            raise CheckpointError(
                f"no space left in {target.parent} ({free:,.0f} MiB free) to write {target.name}: "
                "make room and repeat the command"
            ) from error
        if not _SYSTEM_ERROR.search(str(error)):
            raise
        raise CheckpointError(f"cannot write {target}: {error}") from error


def _open_to_readers(folder: Path) -> None:
    """safetensors writes files for their owner alone; a server often runs as another user."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)


def write_json(path: Path, data: object) -> None:
    """Write JSON atomically, sorted and indented."""
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError, which names the `remedy`, if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {remedy}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged (no JSON object): {remedy}")
    return found


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError if a safetensors file has no header, or not its length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little") if len(start) == 8 else size
        try:
            header = json.loads(file.read(length) if length < size else b"")
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            whole = 8 + length + max(ends, default=0) == size
            with safe_open(path, "pt"):  # it reads the header, and knows types and shapes
                pass
        except _NO_HEADER:
            whole = False
    if not whole:
        raise CheckpointError(f"{path} is truncated or damaged ({size} bytes): download it again")


def _check_parents(path: Path) -> None:
    above = next((parent for parent in path.resolve().parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise CheckpointError(f"{above} is a file: {path} cannot be made inside it")
    if above is not None and not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{above} may not be written to, where {path.name} would appear: choose another output"
        )


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


def _partial(target: Path, process: int | str) -> Path:
    """Where a process of this machine writes; others may share the folder, not its processes."""
    machine = re.sub(r"[^\w.-]", "_", platform.node())
    return target.with_name(f".{target.name}.partial-{machine}-{process}")


def _remove_abandoned(target: Path) -> None:
    for old in target.parent.glob(f"{glob.escape(_partial(target, '').name)}*"):
        process = old.name.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists() and Path("/proc").exists():
            old.unlink() if old.is_file() else shutil.rmtree(old, ignore_errors=True)


def write_model(model: Any, folder: Path) -> None:
    """`model.save_pretrained`, with the generation config as the model has it.

    transformers loads one that sets, say, a temperature without sampling, and raises ValueError
    where it is to be saved; the same settings are written as they are. A plain model's rope is also
    written as other readers know it (`write_legacy_rope`).
    """
    own = getattr(model, "generation_config", None)
    if own is None or _is_strict(own):
        model.save_pretrained(folder)
    else:
        model.generation_config = GenerationConfig()
        try:
            model.save_pretrained(folder)
        finally:
            model.generation_config = own
        own.to_json_file(folder / GENERATION_CONFIG_NAME, use_diff=True)
    if not hasattr(model.config, "rap"):
        write_legacy_rope(folder / CONFIG_FILE)


def write_legacy_rope(file: Path) -> None:
    """Write a config's rope also as `rope_theta` and `rope_scaling`, as before transformers 5.

    mlx-lm and other readers know only these, and take a default base where they are missing. A rope
    for each type of layer had no such form and stays as it is.
    """
    fields = json.loads(file.read_text(encoding="utf-8"))
    scaling = dict(fields.get("rope_parameters") or {})
    if "rope_theta" in scaling:
        fields["rope_theta"] = scaling.pop("rope_theta")
        fields["rope_scaling"] = scaling
        write_json(file, fields)


def _is_strict(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def home() -> Path:
    """Where models and datasets are kept: RAP_HOME, or the user's cache; it may not exist yet."""
    given = os.environ.get("RAP_HOME")
    return Path(given).expanduser() if given else platformdirs.user_cache_path("rap-kv")
