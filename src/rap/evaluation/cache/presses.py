"""Evicting tokens from the cache of a dense or pruned model, by the scores of NVIDIA's kvpress.

kvpress scores the cached tokens, this package evicts them: kvpress cuts keys and values to one
`head_dim`, which pruned layers do not have. Scores that need queries get those of the pruned module
itself, projected, normalised and rotated as it attends, not kvpress's own reconstruction of them.

Shapes: B batch, H query heads, G KV heads, T tokens read, S tokens kept, N queries, E model dim,
W key width.
"""

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import QuantizedLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...model.attention import RapAttention
from ...model.errors import RapError
from ...model.layers import attention_layers, attention_spec, rotary_module, sliding_window
from ...runtime.state import removed

# Name: class in kvpress, and whether it needs queries.
PRESSES: dict[str, tuple[str, bool]] = {
    "knorm": ("KnormPress", False),
    "streaming": ("StreamingLLMPress", False),
    "keydiff": ("KeyDiffPress", False),
    "tova": ("TOVAPress", True),
    "snapkv": ("SnapKVPress", True),
    "expected": ("ExpectedAttentionPress", True),
    "think": ("ThinKPress", True),
}


@dataclass(frozen=True)
class Press:
    """A press by name; `ratio` is the share of tokens that it evicts.

    Of `think` it is the share of key channels that are set to zero, in every token read: ThinK
    of kvpress only zeroes channels, so the cache stays as large as it was.
    """

    name: str
    ratio: float

    def __post_init__(self) -> None:
        if self.name not in PRESSES:
            raise RapError(f"unknown press {self.name!r}: use one of {', '.join(PRESSES)}")
        if not 0 <= self.ratio < 1:
            raise RapError(f"a press cannot take {self.ratio:g}: give a share from 0 up to 1")

    def __str__(self) -> str:
        return f"{self.name}:{self.ratio:g}"


def parse_press(text: str) -> Press:
    """A press from NAME:RATIO, such as `knorm:0.5`; RapError if it is none."""
    name, _, ratio = text.partition(":")
    try:
        share = float(ratio)
    except ValueError:
        raise RapError(f"not a press: {text!r}; write NAME:RATIO, such as knorm:0.5") from None
    return Press(name, share)


@contextmanager
def pressed(model: PreTrainedModel, press: Press) -> Iterator[None]:
    """Inside, whatever the model reads in one go leaves a pressed cache behind.

    Read the prefix inside and continue outside, with `position_ids` that go on counting from the
    tokens that were read. Raises RapError for a missing kvpress, a model that the press cannot
    score (see `_refuse`), or a prefix shorter than the press looks at.
    """
    scorer = _scorer(model, press)
    modules: list[Any] = [
        layer.module for layer in attention_layers(model) if layer.shape is not None
    ]
    hook = partial(_press_layer, scorer)
    rotary = rotary_module(model)
    for module in modules:
        vars(module)["rotary_emb"] = rotary  # past nn.Module: it shall not become a submodule
    try:
        with removed([m.register_forward_hook(hook, with_kwargs=True) for m in modules]):
            yield
    finally:
        for module in modules:
            del vars(module)["rotary_emb"]


def check_press(press: Press) -> None:
    """Raise RapError if kvpress is not installed."""
    _kvpress(press)


def _scorer(model: PreTrainedModel, press: Press) -> Any:
    """The press of kvpress, or its refusal."""
    kvpress = _kvpress(press)
    class_name, needs_queries = PRESSES[press.name]
    for layer in attention_layers(model):
        _refuse(model, layer.module, press)
    plain = not any(isinstance(layer.module, RapAttention) for layer in attention_layers(model))
    supported = importlib.import_module("kvpress.presses.base_press").SUPPORTED_MODELS
    if needs_queries and plain and not isinstance(model, supported):
        raise RapError(
            f"kvpress does not know the queries of {type(model).__name__}: use knorm, streaming or"
            " keydiff, which look at keys alone"
        )
    share = "key_channel_compression_ratio" if press.name == "think" else "compression_ratio"
    return getattr(kvpress, class_name)(**{share: press.ratio})


def _refuse(model: PreTrainedModel, module: Any, press: Press) -> None:
    """RapError where tokens cannot be evicted from a layer, or cannot be scored."""
    own = module if isinstance(module, RapAttention) else None
    if own is not None and (own.reconstruction or own.places_by_slot):
        raise RapError(
            "tokens cannot be evicted: this method takes positions from places in the cache, which"
            " eviction changes; use a method that keeps RoPE pairs, such as rap"
        )
    if sliding_window(attention_spec(model.config), module) is not None:
        raise RapError("a sliding window already evicts tokens; use presses with full attention")
    if own is None:
        return
    if press.name == "think":
        raise RapError("think ranks the channels of dense heads: press the dense model with it")
    turned_last = type(own).position is RapAttention.position and own.norm is None
    if press.name == "expected" and not turned_last:
        raise RapError(
            "expected averages queries before their rotation, and here more than that follows it:"
            " use snapkv"
        )
    if PRESSES[press.name][1] and own.spec.query_scale is not None:
        raise RapError(f"{press.name} does not know this family's scaled queries: use knorm")


@torch.no_grad()
def _press_layer(scorer: Any, module: nn.Module, args: Any, kwargs: dict, output: Any) -> None:
    """Forward hook of an attention module: press what its layer of the cache holds."""
    hidden_BTE = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    layer = kwargs["past_key_values"].layers[module.layer_idx]
    keys, values = _states(layer)
    num_tokens = keys.shape[2]
    least = max(getattr(scorer, "window_size", 1), getattr(scorer, "n_sink", 1))
    if num_tokens <= least:
        raise RapError(
            f"{type(scorer).__name__} looks at {least} tokens, and {num_tokens} were read: give a"
            " longer prefix"
        )
    if not hasattr(scorer, "score"):
        keys, values = scorer.compress(module, hidden_BTE, keys, values, None, kwargs)
    elif scorer.compression_ratio > 0:
        score_BGT = _score(scorer, module, hidden_BTE, (keys, values), kwargs)
        kept = max(1, int(num_tokens * (1 - scorer.compression_ratio)))
        index_BGS = score_BGT.topk(kept, dim=-1).indices.sort(dim=-1).values
        keys, values = (
            states.gather(2, index_BGS[..., None].expand(-1, -1, -1, states.shape[-1]))
            for states in (keys, values)
        )
    _replace_states(layer, keys, values)


def _score(
    scorer: Any, module: nn.Module, hidden_BTE: Tensor, states: tuple[Tensor, Tensor], kwargs: dict
) -> Tensor:
    """kvpress's score [B, G, T]; a pruned module is asked for its own queries."""
    keys, values = states
    weights_BHNT = None
    if isinstance(module, RapAttention):
        name = type(scorer).__name__
        if name in ("SnapKVPress", "TOVAPress"):
            count = getattr(scorer, "window_size", 1)
            weights_BHNT = last_weights(module, hidden_BTE, keys, kwargs, count)
        elif name == "ExpectedAttentionPress":
            ahead = {"skip": scorer.n_sink, "ahead": scorer.n_future_positions}
            scorer.get_query_statistics = partial(future_queries, **ahead)
    score: Tensor = scorer.score(module, hidden_BTE, keys, values, weights_BHNT, kwargs)
    return score


def last_weights(
    module: Any, hidden_BTE: Tensor, keys_BGTW: Tensor, kwargs: dict, count: int
) -> Tensor:
    """Attention weights [B, H, N, T] of the last `count` tokens read, float32.

    `kwargs` are those of the module's forward, of which the rotary tables are used.
    """
    tables = kwargs["position_embeddings"]
    last = tuple(table[:, -count:] for table in tables) if isinstance(tables, tuple) else None
    q, k, _, _ = module.project(hidden_BTE[:, -count:])
    q_BHNW, _ = module.position(q, k, tables[:, -count:] if last is None else last)
    repeats = q_BHNW.shape[1] // keys_BGTW.shape[1]
    keys_BHTW = keys_BGTW.repeat_interleave(repeats, dim=1)
    logits: Tensor = (q_BHNW @ keys_BHTW.transpose(2, 3)).float() * module.scaling
    num_tokens = keys_BGTW.shape[2]
    later = torch.ones(count, num_tokens, dtype=torch.bool, device=logits.device)
    later = later.triu(num_tokens - count + 1)
    return logits.masked_fill(later, float("-inf")).softmax(-1)


def future_queries(
    module: Any, hidden_BTE: Tensor, *, skip: int, ahead: int
) -> tuple[Tensor, Tensor]:
    """Mean [B, H, W] and covariance [B, H, W, W] of queries at the `ahead` next positions.

    Queries after the first `skip` tokens, turned by the average rotation of those positions: a
    rotation is linear in its cosines and sines, so the average is the rotation by averaged tables.
    kvpress divides logits by sqrt(W); the queries make up for what the module divides by.
    """
    q_BHTW, k_BGTW, _, _ = module.project(hidden_BTE[:, skip:])
    num_heads, width = q_BHTW.shape[1], q_BHTW.shape[-1]
    mean_BHW = q_BHTW.mean(2)
    centred = q_BHTW - mean_BHW[:, :, None]
    covariance = centred.transpose(2, 3) @ centred / centred.shape[2]
    turn_HWW = torch.eye(width, dtype=q_BHTW.dtype, device=q_BHTW.device).expand(num_heads, -1, -1)
    if module.num_slots:
        start = hidden_BTE.shape[1]
        positions = torch.arange(start, start + ahead, device=hidden_BTE.device)[None]
        tables = module.rotary_emb(hidden_BTE, positions)
        mean = [table.mean(1, keepdim=True).expand(-1, width, -1) for table in _tensors(tables)]
        turned = module.rotate(
            turn_HWW[None],
            turn_HWW[None, : k_BGTW.shape[1]],
            tuple(mean) if isinstance(tables, tuple) else mean[0],
        )
        turn_HWW = turned[0][0]
    scale = module.scaling * math.sqrt(width)
    mean_BHW = (mean_BHW[:, :, None] @ turn_HWW)[:, :, 0] * scale
    return mean_BHW, turn_HWW.transpose(1, 2) @ covariance @ turn_HWW * scale**2


def _tensors(tables: Any) -> tuple[Tensor, ...]:
    return tables if isinstance(tables, tuple) else (tables,)


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values that a layer of a cache gives to attention."""
    if not isinstance(layer, QuantizedLayer):
        return layer.keys, layer.values
    return layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)


def _replace_states(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Let a layer of a cache hold these alone; a quantized one quantizes them."""
    if not isinstance(layer, QuantizedLayer):
        layer.keys, layer.values = keys, values
        return
    layer._quantized_keys = layer._quantize(keys.contiguous(), axis=layer.axis_key)
    layer._quantized_values = layer._quantize(values.contiguous(), axis=layer.axis_value)
    layer.cumulative_length = keys.shape[2]


def _kvpress(press: Press) -> Any:
    """kvpress, whose import wraps every attention function of transformers: put them back.

    It does that for presses that mask single heads, of which there are none here.
    """
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        return importlib.import_module("kvpress")
    except ImportError as error:
        raise RapError(
            f"the press {press} needs kvpress, which pins an older transformers: pip install"
            f" --no-deps kvpress cachetools fire termcolor ({error})"
        ) from error
    finally:
        for name, function in before.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not function:
                ALL_ATTENTION_FUNCTIONS[name] = function
