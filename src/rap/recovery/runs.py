"""The folder of a recovery under way: what run it belongs to, its checkpoints, and a full disk.

A killed process leaves at worst one checkpoint without the file that marks it complete.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from safetensors import SafetensorError

from ..checkpoint.files import no_room, read_json, write_json
from ..model.errors import RapError

RECORD_FILE = "run.json"
COMPLETE = "complete"
FIT_FOLDER = "fit"  # of the layers that are fitted before any checkpoint
REFIT_FOLDER = "refit"  # of the outputs that are refitted before any checkpoint
STATISTICS_FOLDER = "statistics"  # of a run that plans, and reads its text layer by layer


def processes() -> PartialState:
    """The processes of this run, under torchrun or `accelerate launch` more than one."""
    # Without being told, accelerate takes several processes without a GPU for several runs.
    return PartialState(cpu=not torch.cuda.is_available())


def take_from_main(model: Any) -> None:
    """Give the model of every process the weights that the main one has, in place.

    What every process trains by itself differs by rounding, and adapters are shared only between
    equal models.
    """
    if processes().num_processes == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.to(processes().device, memory_format=torch.contiguous_format, copy=True)
            tensor.copy_(broadcast(sent))


def begin(work: Path, record: dict[str, Any]) -> Path | None:
    """Claim `work` for the run that `record` describes; the last whole checkpoint in it, or None.

    Raises RapError if the folder belongs to another run.
    """
    path = work / RECORD_FILE
    # As JSON gives it back, so that a tuple equals the list it is stored as.
    record = json.loads(json.dumps(record))
    if path.is_file():
        stored = read_json(path, f"remove {work} to start anew")
        differing = sorted(key for key in {*stored, *record} if stored.get(key) != record.get(key))
        if differing:
            raise RapError(
                f"{work} holds an unfinished recovery with another {', '.join(differing)}: remove "
                "the folder to start anew, or repeat the command it was started with"
            )
    write_json(path, record)
    for folder in _checkpoints(work):
        if not (folder / COMPLETE).is_file():
            shutil.rmtree(folder)
    return last_checkpoint(work)


def last_checkpoint(work: Path) -> Path | None:
    """The whole checkpoint of the highest step."""
    whole = [folder for folder in _checkpoints(work) if (folder / COMPLETE).is_file()]
    return max(whole, key=_step, default=None)


def clear_work(work: Path) -> None:
    """Remove a finished run's checkpoints and record; what else is in the folder stays."""
    named = (work / name for name in (FIT_FOLDER, REFIT_FOLDER, STATISTICS_FOLDER))
    for folder in (*_checkpoints(work), *named):
        shutil.rmtree(folder, ignore_errors=True)
    (work / RECORD_FILE).unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()


@contextmanager
def explained(work: Path) -> Iterator[None]:
    """Turn a full disk into a RapError of one line with an action.

    The libraries below report it in three ways: an OSError, or errors of their own without number.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not no_room(error):
            raise
        there = next(folder for folder in (work, *work.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        raise RapError(
            f"no space left in {work} ({free:,.0f} MiB free) to write a checkpoint: make room and "
            "repeat the command, it continues from the last whole checkpoint"
        ) from error


def _checkpoints(work: Path) -> list[Path]:
    return [path for path in work.glob("checkpoint-*") if path.is_dir()]


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])
