"""The safetensors files of a checkpoint directory: found, compared, and written bit by bit."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from ..model.errors import CheckpointError
from ..model.layers import text_config
from .files import check_safetensors, read_json

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# In the order in which safetensors lays types out in a file, wide ones first for alignment.
DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Rows compared at a time: an embedding is the largest tensor there is.
_ROWS = 4096


def find_shards(folder: Path) -> list[Path]:
    """The files that hold the weights, each whole; CheckpointError if one is missing or damaged."""
    shards = [folder / WEIGHTS_FILE]
    if not shards[0].is_file() and (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE, "download it again")
        try:
            shards = [folder / name for name in sorted(set(index["weight_map"].values()))]
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / INDEX_FILE} is damaged ({error}): download it again"
            ) from error
    elif not shards[0].is_file():
        raise CheckpointError(
            f"{folder} has no model.safetensors and no {INDEX_FILE}: convert the checkpoint first"
        )
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing: download the checkpoint again")
        check_safetensors(shard)
    return shards


def check_depth(shards: list[Path], config: Any) -> None:
    """Raise CheckpointError for a config of more layers than all files together have tensors.

    Without it a wrong number is first built, layer by layer, before a tensor is found to lack.
    """
    num_layers = getattr(text_config(config), "num_hidden_layers", 0)
    num_tensors = 0
    for shard in shards:
        with safe_open(shard, "pt") as file:
            num_tensors += len(file.keys())
    if num_layers > num_tensors:
        raise CheckpointError(
            f"the config asks for {num_layers:,} layers, but the checkpoint {shards[0].parent} has "
            f"{num_tensors:,} tensors in all: correct num_hidden_layers, or download it again"
        )


def same_values(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two stored tensors, each a file and a name in it, are equal."""
    with safe_open(first[0], "pt") as one, safe_open(second[0], "pt") as other:
        a, b = one.get_slice(first[1]), other.get_slice(second[1])
        if a.get_shape() != b.get_shape() or a.get_dtype() != b.get_dtype():
            return False
        starts = range(0, a.get_shape()[0], _ROWS)
        return all(torch.equal(a[i : i + _ROWS], b[i : i + _ROWS]) for i in starts)


def write_header(
    file: BinaryIO, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]
) -> None:
    """The safetensors header of (name, dtype, shape): https://github.com/huggingface/safetensors#format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_index(output: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Which file holds which tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (output / INDEX_FILE).write_text(text, encoding="utf-8")
