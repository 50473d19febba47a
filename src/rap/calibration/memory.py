"""Estimated memory of calibration in addition to the weights."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from ..model.layers import attention_layers, text_config, text_decoder
from ..model.rope import AttentionShape
from ..runtime.layerwise import FLOAT
from ..runtime.logits import CHUNK_LOGITS
from ..runtime.memory import free_memory
from .observers import ForwardStatistic, ObservedLayer
from .registry import observed_layer, statistics_of, statistics_of_layer

FORWARD_BATCH = 8  # windows a forward pass, the default of `calibrate`


def estimate_memory(
    model: Any, windows: Tensor, needs: Collection[str], *, checkpointing: bool = True
) -> dict[str, int]:
    """Bytes that `calibrate` holds in addition to the weights, by part; `total` is their sum.

    The model may be on the meta device. Exact for `accumulators` and `gradients` (the largest one:
    each is freed as it comes), an upper estimate for `logits` (a chunk of tokens, in float32 with
    its gradient) and `activations` (all layers' inputs, or everything without checkpointing, and
    one layer's inside; for statistics that need no gradients one layer's inside for a batch of
    windows).
    """
    layers = [observed_layer(model, x) for x in attention_layers(model) if x.shape is not None]
    config, (_, tokens) = text_config(model.config), windows.shape
    weights = [
        x.linears[projection].weight
        for x in layers
        for projection in "kv"
        if projection in x.linears
    ]
    size = weights[0].element_size() if weights else 0
    wanted = statistics_of(needs)
    forward = any(issubclass(statistic, ForwardStatistic) for statistic in wanted)
    backward = any(not issubclass(statistic, ForwardStatistic) for statistic in wanted)
    inner = computed(config, [x.shape for x in layers])
    kept = config.hidden_size if checkpointing else inner
    batch = min(FORWARD_BATCH, len(windows)) if forward else 0
    activations = [tokens * size * (kept * len(layers) + inner)] if backward else [0]
    logits = min(tokens * config.vocab_size, CHUNK_LOGITS)
    estimate = {
        "accumulators": _accumulators(layers, len(windows), needs),
        "gradients": max((w.numel() * size for w in weights), default=0) if backward else 0,
        "logits": logits * (12 + 2 * size) if backward else 0,
        "activations": max(*activations, batch * tokens * size * inner),
    }
    return estimate | {"total": sum(estimate.values())}


def estimate_layers(
    model: Any, windows: Tensor, needs: Collection[str], *, kept: int = 1
) -> dict[str, int]:
    """Bytes that `calibrate` will hold of a model in files, weights included, by part.

    The model may be on the meta device. `layer` is the largest one in float32, `outside` what works
    before and after the layers with a chunk of logits, `streams` what they read, `kept` times,
    `activations` one layer's for a batch.
    """
    config, decoder = text_config(model.config), text_decoder(model)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in decoder.layers]
    below = sum(p.numel() for p in decoder.parameters()) - sum(sizes)
    head = sum(p.numel() for p in model.get_output_embeddings().parameters())
    watched = [observed_layer(model, x) for x in attention_layers(model) if x.shape is not None]
    inner = computed(config, [x.shape for x in watched])
    estimate = {
        "layer": FLOAT * max(sizes),
        "outside": FLOAT * (max(below, head) + CHUNK_LOGITS),
        "streams": kept * FLOAT * windows.numel() * config.hidden_size,
        "statistics": _accumulators(watched, len(windows), needs),
        "activations": FLOAT * min(FORWARD_BATCH, len(windows)) * windows.shape[1] * inner,
    }
    return estimate | {"total": sum(estimate.values())}


def _accumulators(layers: Sequence[ObservedLayer], num_windows: int, needs: Collection[str]) -> int:
    """Bytes of the statistics of all layers."""
    return sum(
        statistic.num_bytes(layer, num_windows)
        for layer in layers
        for statistic in statistics_of_layer(needs, layer)
    )


def computed(config: Any, shapes: Sequence[AttentionShape]) -> int:
    """Numbers that one layer computes of a token."""
    heads = max((4 * shape.num_heads * shape.head_dim for shape in shapes), default=0)
    inside = getattr(config, "intermediate_size", 0)
    inside = max(inside) if isinstance(inside, (list, tuple)) else inside  # one for each layer
    return int(6 * config.hidden_size + 3 * inside + heads)


def must_recompute(model: Any, windows: Tensor, needs: Collection[str]) -> bool:
    """Whether activations kept for the backward pass would take more than half of what is free."""
    kept = estimate_memory(model, windows, needs, checkpointing=False)["total"]
    return kept > free_memory(model.get_input_embeddings().weight.device) / 2
