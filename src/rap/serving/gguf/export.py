"""Writing a checkpoint as one GGUF file: settings, tokenizer, then tensors one at a time.

The settings of a plain model are written under the keys of llama.cpp's Llama, weights as GGUF
names, orders and stores them.

With rotation, channels of a head are mixed so that each carries alike: a quantized cache then loses
less. Blocks of a quantized cache share one scale, which the loudest channel sets. Any rotation of a
head's values is free (W_o undoes it), and so is any unitary mix of keys that rotate at one
frequency (the queries take the same). llama.cpp rotates caches by itself at widths that are
multiples of 64; this does it in the weights, for other widths.

Shapes: H heads, G KV heads, R query heads per KV head, C value channels, m pairs, E model dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ...checkpoint.files import check_output_file, whole_file
from ...checkpoint.gguf_header import FREQUENCY_FACTORS
from ...checkpoint.load import load_config, load_tokenizer
from ...checkpoint.version import __version__
from ...model.errors import CheckpointError, RapError
from ...model.fingerprint import tied_names
from ...model.layers import rotary_module, text_config
from ...model.rope import read_frequencies
from ...runtime.progress import Progress
from ..layout import head_dim
from .plain import check_form, frequency_factors, plain_model, width_warnings
from .tokenizer import add_tokenizer, copy_tokenizer

# Name, how matrices are stored, and the number by which GGUF calls such a file.
TYPES: dict[str, tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


@dataclass(frozen=True)
class Stored:
    """One tensor of the file. `stored_as` is its type, `shape` counts values, not bytes."""

    name: str
    shape: tuple[int, ...]
    stored_as: gguf.GGMLQuantizationType
    weight: Tensor
    num_heads: int = 0  # of a tensor whose heads change from half-split to interleaved

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, without padding."""
        block, size = gguf.GGML_QUANT_SIZES[self.stored_as]
        return int(np.prod(self.shape)) // block * size

    def data(self) -> np.ndarray:
        """The bytes to write, as an array of what GGUF's writer takes for the type."""
        weight = self.weight.detach().float().cpu()
        if self.num_heads:
            weight = interleaved(weight, self.num_heads)
        return gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), self.stored_as)


def stored_tensors(model: Any, kind: str) -> Iterator[Stored]:
    """All tensors of a plain model in GGUF's names, matrices as `kind`, one of TYPES.

    Norms, biases and frequency factors stay float32, and so does llama.cpp's own arithmetic on
    them. The output projection is left out where it is the embedding. RapError for an unknown kind.
    """
    if kind not in TYPES:
        raise RapError(f"unknown type {kind!r}: use one of {', '.join(TYPES)}")
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    factors = frequency_factors(model)
    if factors is not None:
        listed = torch.tensor(factors)
        assert len(listed) == head_dim(config) // 2
        yield Stored(FREQUENCY_FACTORS, tuple(listed.shape), TYPES["f32"][0], listed)
    tied = tied_names(model)
    for name, weight in model.state_dict().items():
        if name in tied:
            continue
        if name.endswith("o_proj.bias") and not weight.any():
            continue  # a Qwen2 as a Llama has a zero bias that no file needs
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise RapError(f"{name} has no name in llama.cpp's Llama: export another model")
        role = name.split(".")[-2]
        stored_as = _type_of(weight, TYPES[kind][0])
        yield Stored(known, tuple(weight.shape), stored_as, weight, heads.get(role, 0))


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of every head [2m, ...] from [first halves | second halves] to pairs side by side.

    Transformers rotates channel i with i + m, llama.cpp's Llama channel 2i with 2i + 1.
    """
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def _type_of(weight: Tensor, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if weight.dim() == 1:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    # Rows that are no whole number of blocks, such as W_o's for 9 heads of 48, stay unquantized.
    return wanted if weight.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def new_writer(architecture: str) -> gguf.GGUFWriter:
    """A writer without a file yet: settings are collected first."""
    return gguf.GGUFWriter(None, architecture)


def add_settings(writer: gguf.GGUFWriter, model: Any, kind: str, name: str) -> None:
    """Write what llama.cpp needs to build the model, and which file this is.

    No rope scaling is named on purpose: all of it is in the frequency factors, and a named scaling
    would be applied on top.
    """
    config, width = model.config, head_dim(model.config)
    writer.add_name(name)
    writer.add_string("rap.version", __version__)
    writer.add_file_type(int(TYPES[kind][1]))
    if kind == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


_SAME = 1e-6  # relative difference of frequencies that are one


@torch.no_grad()
def rotate_heads(model: Any) -> None:
    """Mix the heads of a plain model in place; its logits stay the same up to rounding."""
    config = model.config
    kv_heads, ratio = (
        config.num_key_value_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    theta = read_frequencies(rotary_module(model))
    mix_mm = key_mix(theta)
    for layer in model.model.layers:
        attention = layer.self_attn
        width = attention.v_proj.out_features // kv_heads
        turn_CC = hadamard(width)
        for name in ("weight", "bias"):
            value = getattr(attention.v_proj, name)
            if value is not None:
                rows = value.double().reshape(kv_heads, width, -1)
                value.copy_((turn_CC @ rows).reshape(value.shape))
        out = attention.o_proj.weight
        columns = out.double().reshape(out.shape[0], kv_heads * ratio, width)
        out.copy_((columns @ turn_CC.T).reshape(out.shape))
        for linear in (attention.q_proj, attention.k_proj):
            for parameter in linear.parameters():
                parameter.copy_(_mixed(parameter, mix_mm))


def hadamard(width: int) -> Tensor:
    """An orthogonal matrix [C, C] in float64 with entries of one size, as far as C allows.

    Sylvester's construction gives the largest power of two that divides the width, a cosine
    transform the odd rest.
    """
    power = width & -width
    rest = width // power
    steps = torch.arange(rest, dtype=torch.float64)
    turn = torch.cos(torch.pi / rest * (steps[None] + 0.5) * steps[:, None]) * (2 / rest) ** 0.5
    turn[0] /= 2**0.5
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    for _ in range(power.bit_length() - 1):
        turn = torch.kron(turn, two)
    return turn


def key_mix(theta: Tensor) -> Tensor:
    """A unitary matrix [m, m], complex128, that mixes only pairs of one and the same frequency."""
    mix = torch.zeros(len(theta), len(theta), dtype=torch.complex128)
    for frequency in theta.unique():
        # Factors are rounded: one frequency may come back as two neighbours in float32.
        group = ((theta / frequency - 1).abs() < _SAME).nonzero()[:, 0]
        steps = torch.arange(len(group), dtype=torch.float64)
        angle = 2 * torch.pi / len(group) * steps[None] * steps[:, None]
        mix[group[:, None], group] = torch.polar(torch.ones_like(angle), angle) / len(group) ** 0.5
    return mix


def _mixed(weight: Tensor, mix_mm: Tensor) -> Tensor:
    """Rows of heads [first halves | second halves] as complex numbers, mixed."""
    rows = weight.double().reshape(-1, 2, len(mix_mm), *weight.shape[1:], 1)
    turned = torch.einsum("nm,hm...->hn...", mix_mm, torch.complex(rows[:, 0], rows[:, 1]))
    return torch.stack([turned.real, turned.imag], 1).reshape(weight.shape)


ARCHITECTURE = "llama"
SUFFIX = ".gguf"
TYPE_NAMES = tuple(TYPES)


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
    """Write a dense checkpoint, or a pruned one of the uniform layout, as a GGUF file.

    `kind` is how matrices are stored, one of TYPE_NAMES. The tokenizer is the checkpoint's own, or
    copied from the GGUF file `tokenizer_from`; `pre` names its pre-tokenizer in llama.cpp. With
    `rotate`, heads are mixed for a quantized cache (`rotate_heads`). The file appears whole or not
    at all; a Modelfile for Ollama is put beside it. Raises CheckpointError or UnsupportedModelError
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
    width = head_dim(model.config)
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
