"""A GGUF file's header: the settings of a plain model under the keys of llama.cpp's Llama."""

from typing import Any

import gguf

from ...checkpoint.version import __version__
from .plain import head_width
from .tensors import TYPES


def new_writer(architecture: str) -> gguf.GGUFWriter:
    """A writer without a file yet: settings are collected first."""
    return gguf.GGUFWriter(None, architecture)


def add_settings(writer: gguf.GGUFWriter, model: Any, kind: str, name: str) -> None:
    """Write what llama.cpp needs to build the model, and which file this is.

    No rope scaling is named on purpose: all of it is in the frequency factors, and a named scaling
    would be applied on top.
    """
    config, width = model.config, head_width(model.config)
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
