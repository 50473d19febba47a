"""GGUF files as a source: dequantized once into a normal checkpoint directory, by transformers."""

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..model.errors import CheckpointError
from .files import whole_directory, write_json
from .home import home
from .reading import reading

SOURCE_FILE = "gguf_source.json"
FREQUENCY_FACTORS = "rope_freqs.weight"
FACTORS_BY_LENGTH = "rope_factors_"  # long and short, of which the longest text decides
# Types that a float dtype holds exactly; all others are dequantized to bfloat16.
_EXACT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 24

Say = Callable[[str], None]


def is_gguf(source: object) -> bool:
    """Whether a source names a GGUF file."""
    return str(source).endswith(".gguf")


def checkpoint_of(file: str | Path, say: Say = lambda line: None) -> Path:
    """The checkpoint directory of a GGUF file, made on the first call and kept in `home()`.

    The directory is named by the file's content, so a changed file is converted again. `say` is
    given one line about what was done. Raises CheckpointError for a file that is missing, damaged,
    or of an architecture transformers cannot read.
    """
    file = Path(file)
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}: check the path")
    folder = home() / "gguf" / f"{file.stem}-{_digest(file)[:16]}"
    if folder.is_dir():
        say(f"{file.name}: dequantized before, in {folder}")
        return folder
    stored = convert(file, folder)
    say(f"{file.name}: dequantized from {stored['types']} to {stored['dtype']}, kept in {folder}")
    return folder


def convert(file: Path, folder: Path) -> dict[str, Any]:
    """Write a GGUF file's weights, config and tokenizer as a checkpoint; returns what they were.

    Raises CheckpointError as `checkpoint_of`, or if the `gguf` package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("reading GGUF files needs the package gguf: pip install gguf")
    with reading(f"read {file}"):
        types = _tensor_types(file)
        where: dict[str, Any] = {"gguf_file": file.name}
        config = AutoConfig.from_pretrained(file.parent, **where)
        _name_biases(config, types)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, dtype=torch.float32, output_loading_info=True, **where
        )
        packed, found = loaded
        _check_whole(packed, file, types, found["missing_keys"])
        _turn_as_stored(packed.config, file)
    counted = Counter(types.values())
    matrices = set(counted) - {"F32"}  # norms are F32 in every file
    dtype = _EXACT.get(min(matrices, default="F32"), torch.bfloat16)
    dtype = dtype if len(matrices) < 2 else torch.bfloat16
    stored = {
        "file": file.name,
        "types": ", ".join(f"{count} {name}" for name, count in counted.most_common()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    with reading(f"read {file}", "its header and its tensors disagree, download it again"):
        plain = _plain(packed, dtype)
    with whole_directory(folder, own=True) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / SOURCE_FILE, stored)
    return stored


def _name_biases(config: Any, names: Collection[str]) -> None:
    """Say in the config which biases a file has: transformers makes a model without them."""
    for field, role in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_down")):
        if hasattr(config, field):
            setattr(config, field, any(name.endswith(f"{role}.bias") for name in names))


def _check_whole(packed: Any, file: Path, names: Collection[str], missing: Collection[str]) -> None:
    """Raise CheckpointError for weights of the model that the file has not, and the other way.

    transformers makes the ones up and drops the others. An output's bias that is no more than
    zeros need not be in a file.
    """
    absent = sorted(missing)
    for name in absent:
        if name.endswith("o_proj.bias"):
            packed.get_parameter(name).data.zero_()
    lacking = [name for name in absent if not name.endswith("o_proj.bias")]
    if lacking:
        raise CheckpointError(
            f"{file} lacks {len(lacking)} of the tensors of its model ({lacking[0]}, ...): it is "
            "one of several parts, or damaged: join the parts, or download it again"
        )
    biases = [name for name in names if name.endswith(".bias")]
    read = [name for name in packed.state_dict() if name.endswith(".bias")]
    if len(biases) > len(read):
        raise CheckpointError(
            f"{file} has {len(biases)} biases, and the model that transformers makes of it "
            f"{len(read)}: start from the checkpoint that it was made of"
        )


def _plain(packed: Any, dtype: torch.dtype) -> Any:
    """The same weights in a model that was never quantized: transformers refuses to save others."""
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""
    with torch.device("meta"):
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    return plain.to(dtype)


def _turn_as_stored(config: Any, file: Path) -> None:
    """Put how the file scales its frequencies into the config: transformers reads past most of it.

    llama.cpp divides every frequency by its factor, as longrope does; llama3 scaling and exports of
    the stock profile are stored so. A linear scaling is a number of the header. Raises
    CheckpointError for another scaling that transformers did not read itself.
    """
    from gguf import GGUFReader  # an optional extra

    reader = GGUFReader(file)
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        return
    kind, linear = _scaling(reader.fields)
    by_length = [each.name for each in reader.tensors if each.name.startswith(FACTORS_BY_LENGTH)]
    if kind not in ("none", "linear") or by_length:
        raise CheckpointError(
            f"{file} scales its frequencies by {by_length[0] if by_length else kind}, which is not "
            "read from GGUF: start from the checkpoint that it was made of"
        )
    stored = [each.data for each in reader.tensors if each.name == FREQUENCY_FACTORS]
    theta = {"rope_theta": config.rope_parameters["rope_theta"]}
    if not stored:
        if linear != 1:
            config.rope_parameters = {"rope_type": "linear", **theta, "factor": linear}
        return
    factors = [linear * float(factor) for factor in stored[0]]
    config.rope_parameters = {
        "rope_type": "longrope",
        **theta,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
    }


def _scaling(fields: Any) -> tuple[str, float]:
    """How a header says that frequencies are scaled, and the factor of a linear scaling."""
    named = {name.partition(".")[2]: field for name, field in fields.items()}

    def value(name: str, default: Any) -> Any:
        return named[name].contents() if name in named else default

    factor = float(value("rope.scaling.factor", value("rope.scale_linear", 1.0))) or 1.0
    kind = str(value("rope.scaling.type", "linear" if factor != 1 else "none"))
    return kind, factor if kind == "linear" else 1.0


def _tensor_types(file: Path) -> dict[str, str]:
    """By tensor, in which of GGUF's types it is stored."""
    from gguf import GGUFReader  # an optional extra

    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
