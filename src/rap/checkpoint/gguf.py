"""GGUF files as a source: dequantized once into a normal checkpoint directory, by transformers."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..model.errors import CheckpointError
from .files import home, whole_directory, write_json
from .gguf_header import FACTORS_BY_LENGTH, FREQUENCY_FACTORS, Header, begun, completed
from .reading import reading

SOURCE_FILE = "gguf_source.json"
# Words in a vocabulary of SentencePiece or of bytes, and how many of them are tried.
_WORD, _SOME = re.compile("[\u2581\u0120][a-z]{4,}"), 200
_READING = 2  # raised when files are read differently, so that kept checkpoints are made again
# Types that a float dtype holds exactly; all others are dequantized to bfloat16.
_EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Say = Callable[[str], None]


def is_gguf(source: object) -> bool:
    """Whether a source names a GGUF file."""
    return str(source).endswith(".gguf")


def checkpoint_of(file: str | Path, say: Say = lambda line: None) -> Path:
    """The checkpoint directory of a GGUF file, made on the first call and kept in `home()`.

    The directory is named by the file's content, so a changed file is converted again, and so is
    one that an earlier release read. `say` is given one line about what was done. Raises
    CheckpointError for a file that is missing, damaged, or of an architecture that is not read.
    """
    file = Path(file)
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}: check the path")
    folder = home() / "gguf" / f"{file.stem}-{file_digest(file)[:16]}"
    if _kept(folder):
        say(f"{file.name}: dequantized before, in {folder}")
        return folder
    stored = convert(file, folder)
    say(f"{file.name}: dequantized from {stored['types']} to {stored['dtype']}, kept in {folder}")
    return folder


def _kept(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that was read as files are read now."""
    try:
        record = json.loads((folder / SOURCE_FILE).read_text())
    except (OSError, ValueError):  # none, or one that a crash of the machine left empty
        return False
    return bool(record.get("reading") == _READING and (folder / "config.json").is_file())


def convert(file: Path, folder: Path) -> dict[str, Any]:
    """Write a GGUF file's weights, config and tokenizer as a checkpoint; returns what they were.

    Raises CheckpointError as `checkpoint_of`.
    """
    with reading(f"read {file}"):
        header = Header(file)
        where: dict[str, Any] = {"gguf_file": file.name}
        config = completed(AutoConfig.from_pretrained(file.parent, **where), header)
        tokenizer = begun(AutoTokenizer.from_pretrained(file.parent, **where), header)
        _check_words(tokenizer, file)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, dtype=torch.float32, output_loading_info=True, **where
        )
        packed, found = loaded
        _check_whole(packed, header, found["missing_keys"])
    types = header.types()
    counted = Counter(types.values())
    matrices = set(counted) - {"F32"}  # norms are F32 in every file
    dtype = _EXACT.get(min(matrices, default="F32"), torch.bfloat16)
    dtype = dtype if len(matrices) < 2 else torch.bfloat16
    stored = {
        "file": file.name,
        "types": ", ".join(f"{count} {name}" for name, count in counted.most_common()),
        "dtype": str(dtype).removeprefix("torch."),
        "reading": _READING,
    }
    with reading(f"read {file}", "its header and its tensors disagree, download it again"):
        plain = _plain(packed, dtype)
    with whole_directory(folder, own=True) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / SOURCE_FILE, stored)
    return stored


def _check_words(tokenizer: Any, file: Path) -> None:
    """Raise CheckpointError for a tokenizer that splits the words of its own vocabulary.

    A SentencePiece vocabulary is stored without its merges, and transformers before 5.18 derives
    wrong ones for Gemma: a model then reads pieces that it never saw, and nothing fails.
    """
    words = sorted(filter(_WORD.fullmatch, tokenizer.get_vocab()))
    tried = words[:: len(words) // _SOME + 1]
    whole = sum(word in tokenizer.tokenize(f"a {word[1:]}") for word in tried)
    if whole < len(tried) / 2:
        raise CheckpointError(
            f"transformers {transformers.__version__} reads the tokenizer of {file.name} wrong: it "
            f"splits {len(tried) - whole} of {len(tried)} words of the vocabulary; pip install -U "
            "'transformers>=5.18', and repeat the command"
        )


def _check_whole(packed: Any, header: Header, missing: Collection[str]) -> None:
    """Raise CheckpointError for weights of the model that the file has not, and the other way.

    transformers makes the ones up and drops the others. An output's bias that is no more than
    zeros need not be in a file.
    """
    absent = sorted(missing)
    zeros = [packed.get_parameter(name) for name in absent if name.endswith("o_proj.bias")]
    for bias in zeros:
        bias.data.zero_()
    lacking = [name for name in absent if not name.endswith("o_proj.bias")]
    if lacking:
        raise CheckpointError(
            f"{header.file} lacks {len(lacking)} of the tensors of its model ({lacking[0]}, ...): "
            "it is one of several parts, or damaged: join the parts, or download it again"
        )
    own = {tensor.data_ptr(): tensor.numel() for tensor in packed.state_dict().values()}
    stored = _weights(header, packed.config.num_hidden_layers)
    if sum(own.values()) - sum(bias.numel() for bias in zeros) != sum(stored.values()):
        unread = sorted(stored.keys() - _read_names(packed, header.architecture))
        raise header.rejected(f"transformers does not read {unread[0] if unread else 'all of it'}")


def _weights(header: Header, layers: int) -> dict[str, int]:
    """How many numbers each tensor of the model has; a block behind the layers predicts ahead."""
    others = (FREQUENCY_FACTORS, FACTORS_BY_LENGTH, f"blk.{layers}.")
    return {
        name: int(tensor.n_elements)
        for name, tensor in header.tensors.items()
        if not name.startswith(others)
    }


def _read_names(packed: Any, architecture: str) -> set[str | None]:
    """The tensors of a file that have a counterpart of their own in the model."""
    import gguf

    named = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(named[architecture], packed.config.num_hidden_layers)
    return {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in packed.state_dict()}


def _plain(packed: Any, dtype: torch.dtype) -> Any:
    """The same weights in a model that was never quantized: transformers refuses to save others."""
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""
    with torch.device("meta"):
        plain = type(packed)(config)
    shapes = {name: weight.shape for name, weight in plain.state_dict().items()}
    weights = {
        name: weight.reshape(shapes[name]) if weight.shape == (1, *shapes[name]) else weight
        for name, weight in packed.state_dict().items()
    }  # transformers adds a dimension that some files already have
    plain.load_state_dict(weights, strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    return plain.to(dtype)


def file_digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
