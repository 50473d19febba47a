"""The plain model that a GGUF file holds, and what of it llama.cpp's Llama cannot express."""

from pathlib import Path
from typing import Any

import torch

from ...checkpoint.load import is_pruned, load, load_config
from ...model.errors import UnsupportedModelError
from ...model.families import FAMILIES
from ...model.layers import rotary_module
from ...model.rope import read_frequencies
from ..families import SUPPORT, support
from ..layout import head_dim
from ..plain_forms import check_stock, check_widely_read, is_variable
from ..stock import longrope_factors, stock_model

QUANTIZED_BLOCK = 32  # values that share a scale in a quantized cache
ROTATED_WIDTH = 64  # widths whose quantized cache llama.cpp rotates are multiples of it


def plain_model(source: str | Path) -> Any:
    """A checkpoint as a plain Llama, Mistral or Qwen2 that llama.cpp can express.

    A pruned one is read in float32, because its softmax scale goes into W_q. Raises CheckpointError
    for one that is not of the stock profile, UnsupportedModelError for what has no form in GGUF.
    """
    config = load_config(source)
    check_form(config)
    if is_pruned(config):
        model = stock_model(load(source, dtype=torch.float32))
    else:
        model = load(source, dtype="auto")
    check_plain(model.config)
    _check_rope(model)
    return model


def check_form(config: Any) -> None:
    """Raise UnsupportedModelError for a config, dense or pruned, that no GGUF file expresses."""
    if not is_pruned(config):
        check_plain(config)
        return
    check_stock(config)
    check_widely_read(config, "llama.cpp")


def frequency_factors(model: Any) -> list[float] | None:
    """What llama.cpp divides base^(-2i / 2m) by to get a model's frequencies; None if it is all 1.

    Whatever scaling they came from (llama3, linear, longrope) is inside.
    """
    theta = read_frequencies(rotary_module(model)).float()
    factors = longrope_factors(theta, model.config.rope_parameters["rope_theta"])
    return None if all(abs(factor - 1) < 1e-6 for factor in factors) else factors


def width_warnings(width: int) -> list[str]:
    """What llama.cpp does worse with heads of this width, a sentence each."""
    if width % QUANTIZED_BLOCK:
        return [
            f"heads of {width} channels are no multiple of {QUANTIZED_BLOCK}: llama.cpp decodes "
            "them slower than the dense model and takes no quantized cache for them; compress with "
            "`--target llamacpp`"
        ]
    if width % ROTATED_WIDTH:
        return [
            f"heads of {width} channels are no multiple of {ROTATED_WIDTH}: llama.cpp does not "
            "rotate their quantized cache, which costs quality at 4 bits"
        ]
    return []


def check_plain(config: Any) -> None:
    """Raise UnsupportedModelError for a config that has no form in llama.cpp's Llama."""
    family = config.model_type
    if not support(family).as_llama:
        possible = ", ".join(name for name, row in SUPPORT.items() if row.as_llama)
        raise UnsupportedModelError(f"{family} has no GGUF form here: one of {possible} is needed")
    # A field that the family does not read says nothing.
    slides = FAMILIES[family].sliding_window_from is not None
    window = config.sliding_window if slides else None
    if window and window < config.max_position_embeddings:
        raise UnsupportedModelError(
            f"a sliding window of {window} tokens has no form in llama.cpp's Llama: export a model "
            "that attends to all tokens"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModelError(
            f"llama.cpp's Llama has silu in its feed-forward layers, not {config.hidden_act}: "
            "export another model"
        )


def _check_rope(model: Any) -> None:
    rotary, rope = rotary_module(model), model.config.rope_parameters
    if is_variable(rope):
        raise UnsupportedModelError(
            f"rope_type {rope['rope_type']!r} has frequencies that depend on the length of the "
            "text: no GGUF file of a Llama can list them"
        )
    scaling = getattr(rotary, "attention_scaling", 1.0)
    if scaling != 1.0:
        raise UnsupportedModelError(
            f"the rotary embedding scales attention by {scaling:g} ({rope['rope_type']}), which "
            "llama.cpp's Llama does not read: only models without such a factor can be exported"
        )
    width, rotated = head_dim(model.config), 2 * len(read_frequencies(rotary))
    if width != rotated:
        raise UnsupportedModelError(
            f"only {rotated} of {width} channels of a head rotate: llama.cpp's Llama rotates all"
        )
