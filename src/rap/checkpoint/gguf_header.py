"""The GGUF architectures that are read, and what their headers state that transformers ignores.

Keys are llama.cpp's. A missing key has llama.cpp's default, because a file is complete for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ..model.errors import CheckpointError

FREQUENCY_FACTORS = "rope_freqs.weight"
FACTORS_BY_LENGTH = "rope_factors_"  # long and short, of which the longest text decides
OTHERWISE = "use the original checkpoint"
_BASE = 10_000.0  # llama.cpp's default, also of the layers under a window


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, and how its header completes the config.

    `fields` are fields of the config by the key that states them. `complete` means that
    transformers reads the whole header. `rotates_part` is set where a model may rotate a part of
    every head. Where layers differ, every `period`-th one has full attention, the others a sliding
    window (of `window` tokens, 0 for none, unless the header states it); queries are scaled by the
    head dimension, in the model of `largest` layers by hidden size / heads. `unread` is the reason
    why an architecture is rejected.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    rotates_part: bool = False
    period: int = 0
    window: int = 0
    largest: int = 0
    unread: str = ""


_EXPERTS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
ARCHITECTURES = {
    "llama": Architecture(),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(_EXPERTS),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(_EXPERTS),
    "qwen35": Architecture(complete=True),
    "qwen35moe": Architecture(complete=True),
    "phi3": Architecture({"attention.sliding_window": "sliding_window"}, rotates_part=True),
    "stablelm": Architecture(rotates_part=True),
    "starcoder2": Architecture(),
    "nemotron": Architecture({"attention.layer_norm_epsilon": "norm_eps"}, rotates_part=True),
    "gemma2": Architecture(_CAPS, period=2, window=4096, largest=46),
    "gemma3": Architecture(_CAPS, period=6, largest=62),
    "minimax-m2": Architecture(rotates_part=True),
    "lfm2": Architecture({"attention.layer_norm_rms_epsilon": "norm_eps"}),
    "gemma4": Architecture(unread="transformers does not read its layer scales"),
    "gpt-oss": Architecture(unread="transformers does not read its experts and attention sinks"),
}


class Header:
    """The header and the table of tensors of a GGUF file; no tensor data is read.

    Raises CheckpointError for an architecture that is not read from GGUF.
    """

    def __init__(self, file: Path):
        from gguf import GGUFReader

        reader = GGUFReader(file)
        self.file = file
        self.fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        named = self.fields.get("general.architecture")
        self.architecture = str(named.contents()) if named is not None else "none"
        self.row = ARCHITECTURES.get(self.architecture)
        if self.row is None:
            raise self.rejected(f"its architecture, {self.architecture}, is not read from GGUF")
        if self.row.unread:
            raise self.rejected(self.row.unread)
        if self.architecture == "llama":
            if self.stated("expert_count", 0):
                raise self.rejected("transformers does not read Mixtral's experts from GGUF")
            if self.stated("attention.head_count_kv") is None:
                raise self.rejected("its header lacks llama.attention.head_count_kv")

    def stated(self, key: str, default: Any = None) -> Any:
        """The value of a key of this architecture."""
        found = self.fields.get(f"{self.architecture}.{key}")
        return default if found is None else found.contents()

    def rejected(self, reason: str) -> CheckpointError:
        """The error for a file that cannot be read for a reason."""
        return CheckpointError(f"cannot read {self.file}: {reason}; {OTHERWISE}")

    def types(self) -> dict[str, str]:
        """By tensor, the GGUF type that it is stored in."""
        return {name: tensor.tensor_type.name for name, tensor in self.tensors.items()}


def completed(config: Any, header: Header) -> Any:
    """The config that transformers made of a header, with everything else that the header states.

    Raises CheckpointError for what neither transformers nor this function can read.
    """
    row = header.row
    if row is None or row.complete:
        return config
    if config.model_type == "mistral":
        config = _as_llama(config)
    for key, name in row.fields.items():
        if header.stated(key) is not None:
            setattr(config, name, header.stated(key) or None)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = header.fields.get(f"tokenizer.ggml.{key}_token_id")
        setattr(config, f"{name}_token_id", None if token is None else token.contents())
    _biases(config, header)
    width = config.hidden_size // config.num_attention_heads
    if hasattr(config, "head_dim") or header.stated("attention.key_length", width) != width:
        config.head_dim = width = header.stated("attention.key_length", width)
    if row.period:
        _windows(config, header, row)
        largest = config.num_hidden_layers == row.largest
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if largest else width
        )
    _rotation(config, header, row, width)
    return config


def begun(tokenizer: Any, header: Header) -> Any:
    """The tokenizer, which adds BOS if the header states it, unlike that of transformers.

    llama.cpp adds it unasked for SentencePiece vocabularies.
    """
    model = header.fields.get("tokenizer.ggml.model")
    adds = header.fields.get("tokenizer.ggml.add_bos_token")
    pieces = model is not None and model.contents() == "llama"
    if (pieces if adds is None else adds.contents()) and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
        tokenizer.update_post_processor()
    return tokenizer


def _as_llama(config: Any) -> Any:
    """Mistral is stored as Llama, without the window of its first version, and run without it."""
    fields = config.to_dict()
    return LlamaConfig.from_dict(
        {name: fields[name] for name in fields if name not in ("model_type", "sliding_window")}
    )


def _biases(config: Any, header: Header) -> None:
    """Say which biases a file has: transformers makes a model without them."""
    for name, role in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_down")):
        if hasattr(config, name):
            setattr(config, name, any(key.endswith(f"{role}.bias") for key in header.tensors))


def _windows(config: Any, header: Header, row: Architecture) -> None:
    """Which layers have a sliding window: a period, or a list of all layers."""
    window = header.stated("attention.sliding_window", row.window)
    pattern = header.stated("attention.sliding_window_pattern", row.period)
    if not isinstance(pattern, list):
        layers = range(config.num_hidden_layers)
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in layers]
    kinds = ("full_attention", "sliding_attention")
    config.layer_types = [kinds[bool(window and slides)] for slides in pattern]
    config.sliding_window = window or config.sliding_window  # unused, but never None


def _rotation(config: Any, header: Header, row: Architecture, width: int) -> None:
    """Put bases, scaling and the rotating part of a head into the config.

    llama.cpp divides every frequency by its factor, as longrope does; llama3 scaling and exports of
    the stock profile are stored so. A linear scaling is a number of the header.
    """
    rope = {"rope_type": "default", "rope_theta": header.stated("rope.freq_base", _BASE)}
    kind, linear = _scaling(header)
    if linear != 1:
        rope |= {"rope_type": "linear", "factor": linear}
    turned = header.stated("rope.dimension_count", width)
    if row.rotates_part:
        rope["partial_rotary_factor"] = turned / width
    elif turned != width:
        raise header.rejected(f"it rotates {turned} of {width} channels of a head")
    by_length = [name for name in header.tensors if name.startswith(FACTORS_BY_LENGTH)]
    if kind not in ("none", "linear") or by_length:
        raise header.rejected(f"it scales its frequencies by {by_length[0] if by_length else kind}")
    factors = header.tensors.get(FREQUENCY_FACTORS)
    by_layer = "full_attention" in config.rope_parameters
    if factors is not None and by_layer:
        raise header.rejected("it scales the frequencies of layers that differ")
    if factors is not None:
        listed = [linear * float(factor) for factor in factors.data]
        rope |= {"rope_type": "longrope", "short_factor": listed, "long_factor": listed}
        rope |= {"factor": 1.0, "attention_factor": 1.0}
        rope["original_max_position_embeddings"] = config.max_position_embeddings
    if by_layer:  # a scaling is of the layers with full attention alone
        local = {"rope_type": "default", "rope_theta": header.stated("rope.freq_base_swa", _BASE)}
        config.rope_parameters = {"full_attention": rope, "sliding_attention": local}
    else:
        config.rope_parameters = rope


def _scaling(header: Header) -> tuple[str, float]:
    """How a header says that frequencies are scaled, and the factor of a linear scaling."""
    stated = header.stated("rope.scaling.factor", header.stated("rope.scale_linear", 1.0))
    factor = float(stated) or 1.0
    kind = str(header.stated("rope.scaling.type", "linear" if factor != 1 else "none"))
    return kind, factor if kind == "linear" else 1.0
