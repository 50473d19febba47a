"""Writing a checkpoint as one GGUF file: settings, tokenizer, then tensors one at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.files import check_output_file, whole_file
from ...checkpoint.gguf_header import FREQUENCY_FACTORS
from ...checkpoint.load import load_config, load_tokenizer
from ...model.errors import CheckpointError, RapError
from ...model.layers import text_config
from ...runtime.progress import Progress
from .plain import check_form, head_width, plain_model, width_warnings
from .rotation import rotate_heads
from .settings import add_settings, new_writer
from .tensors import stored_tensors
from .tokenizer import add_tokenizer, copy_tokenizer

ARCHITECTURE = "llama"
SUFFIX = ".gguf"
TYPE_NAMES = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class GgufExport:
    """What was written: plain data for JSON. `warnings` are sentences about the engine."""

    output: str
    modelfile: str
    type: str
    head_dim: int
    num_bytes: int
    frequency_factors: bool
    warnings: list[str]


def export_gguf(
    source: str | Path,
    output: str | Path,
    *,
    kind: str = "f16",
    tokenizer_from: str | Path | None = None,
    pre: str | None = None,
    rotate: bool = False,
    force: bool = False,
    progress: bool = False,
) -> GgufExport:
    """Write a dense checkpoint, or a pruned one of the stock profile, as a GGUF file.

    `kind` is how matrices are stored, one of TYPE_NAMES. The tokenizer is the checkpoint's own, or
    copied from the GGUF file `tokenizer_from`; `pre` names its pre-tokenizer in llama.cpp. With
    `rotate`, heads are mixed for a quantized cache (`rotation`). The file appears whole or not at
    all; a Modelfile for Ollama is put beside it. Raises CheckpointError or UnsupportedModelError
    for what llama.cpp cannot run, RapError for an unknown kind or `pre`, and for an `output` that
    does not end in .gguf.
    """
    modelfile = _checked(Path(output), force)
    config = load_config(source)
    check_form(config)
    vocabulary = text_config(config).vocab_size
    writer = new_writer(ARCHITECTURE)
    if tokenizer_from is not None:
        copy_tokenizer(writer, tokenizer_from, vocabulary, pre)
    else:
        add_tokenizer(writer, _own_tokenizer(source), vocabulary, pre)
    model = plain_model(source)
    if rotate:
        rotate_heads(model.float())
    tensors = list(stored_tensors(model, kind))
    add_settings(writer, model, kind, _name(source))
    with whole_file(output, force=force) as partial:
        _write(writer, tensors, partial, progress)
        num_bytes = partial.stat().st_size
    with whole_file(modelfile, force=force) as partial:
        partial.write_text(_modelfile(Path(output).name, model.config), encoding="utf-8")
    width = head_width(model.config)
    return GgufExport(
        output=str(output),
        modelfile=str(modelfile),
        type=kind,
        head_dim=width,
        num_bytes=num_bytes,
        frequency_factors=any(tensor.name == FREQUENCY_FACTORS for tensor in tensors),
        warnings=width_warnings(width),
    )


def _checked(output: Path, force: bool) -> Path:
    """The Modelfile beside `output`, after both were found fit to be written."""
    if output.suffix != SUFFIX:
        raise RapError(f"{output} must end in {SUFFIX}: llama.cpp and Ollama know a model by it")
    modelfile = output.with_suffix(".Modelfile")
    for file in (output, modelfile):
        check_output_file(file, force=force)
    return modelfile


def _write(writer: Any, tensors: list[Any], path: Path, progress: bool) -> None:
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, None, tensor.num_bytes, raw_dtype=tensor.stored_as
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = sum(tensor.num_bytes for tensor in tensors) / 2**20
        with Progress("gguf", total, "MiB", shown=progress, transient=True) as shown:
            for tensor in tensors:
                writer.write_tensor_data(tensor.data())
                shown.advance(tensor.num_bytes / 2**20)
    finally:
        writer.close()


def _modelfile(file: str, config: Any) -> str:
    """What `ollama create NAME -f FILE` reads; without num_ctx Ollama cuts texts short."""
    return f"FROM ./{file}\nPARAMETER num_ctx {min(config.max_position_embeddings, 8192)}\n"


def _own_tokenizer(source: str | Path) -> Any:
    try:
        return load_tokenizer(source)
    except CheckpointError as error:
        raise CheckpointError(
            f"{source} has no tokenizer that can be read: copy one from a GGUF file of the dense "
            "model with --tokenizer-from"
        ) from error


def _name(source: str | Path) -> str:
    """What the file says it is: the checkpoint's own name, never a path of this machine."""
    return Path(source).resolve().name if Path(source).exists() else str(source)
