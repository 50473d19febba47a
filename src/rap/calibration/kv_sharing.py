"""Layers that read the keys and values of an earlier one, seen as query heads of that one.

What calibration leaves, and what methods plan on, has one layer for each set of keys and values:
its source's, with the query heads of all that read it. Readers themselves have none, like layers
without attention. The heads of KV head g are the source's own, then those of every reader in order;
moments of queries are summed over all of them, and gradients of keys and values have passed through
all of them anyway. So no score, budget, or subspace needs to know of readers.

Shapes: G KV heads, R query heads of each in one layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.layers import attention_layers, attention_spec
from ..model.rope import AttentionShape
from .observers import ObservedLayer, Statistic

# What is seen of a layer that has queries and an output alone: by query head, or summed over them.
# Logits and averages are not among them: they are for methods that such families do not have.
BY_HEAD = ("energy_q", "raw_energy_q", "norm_moment_q", "value_moment", "value_gradient")
SUMMED = ("query_moment", "query_free_moment")

Shapes = Sequence[AttentionShape | None]


def has_part(statistic: type[Statistic], layer: ObservedLayer) -> bool:
    """Whether a statistic has an entry for the layer."""
    names = {*statistic.names, *statistic.norm_names}
    return layer.shape.source is None or bool(names & {*BY_HEAD, *SUMMED})


def readers_of(shapes: Shapes) -> dict[int, list[int]]:
    """Every layer with separate keys and values, and the layers that read them, in order."""
    readers = {i: [i] for i, shape in enumerate(shapes) if shape and shape.source is None}
    for index, shape in enumerate(shapes):
        if shape is not None and shape.source is not None:
            readers[shape.source].append(index)
    return {source: both[1:] for source, both in readers.items()}


def joined_shapes(shapes: Shapes) -> list[AttentionShape | None]:
    """The shapes of sources with the query heads of all that read them; None of readers."""
    joined: list[AttentionShape | None] = [None] * len(shapes)
    for source, readers in readers_of(shapes).items():
        every = [shape for i in (source, *readers) if (shape := shapes[i]) is not None]
        joined[source] = replace(every[0], num_heads=sum(shape.num_heads for shape in every))
    return joined


def join_heads(parts: Sequence[Tensor], num_kv_heads: int) -> Tensor:
    """[G R, ...] of a source and of its readers to [G R', ...], group by group."""
    return torch.cat([x.unflatten(0, (num_kv_heads, -1)) for x in parts], 1).flatten(0, 1)


def join_statistics(
    layers: Sequence[Mapping[str, Tensor] | None], shapes: Shapes
) -> tuple[Mapping[str, Tensor] | None, ...]:
    """Statistics of every single layer to those of sources, including what readers add."""
    joined = list(layers)
    for source, readers in readers_of(shapes).items():
        own, shape = layers[source], shapes[source]
        if not readers or own is None or shape is None:
            continue
        found = dict(own)
        for name in (*BY_HEAD, *SUMMED):
            if name in found:
                parts = [own[name], *(one[name] for i in readers if (one := layers[i]) is not None)]
                by_head = name in BY_HEAD
                found[name] = (
                    join_heads(parts, shape.num_kv_heads) if by_head else torch.stack(parts).sum(0)
                )
        joined[source] = found
        for index in readers:
            joined[index] = None
    return tuple(joined)


@contextmanager
def values_apart(model: PreTrainedModel) -> Iterator[None]:
    """The model, with values projected by a linear of their own where they were by that of keys.

    It has the same weights, in the same memory, so that the two uses are seen one by one.
    """
    spec = attention_spec(model.config)
    tied = [x for x in attention_layers(model) if spec.of(x.module).ties_values and x.shape]
    key, value = spec.projections[1:3]
    for layer in tied:
        assert layer.module is not None
        linear = getattr(layer.module, key)
        with torch.device("meta"):
            apart = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
        for name, parameter in linear.named_parameters():
            setattr(apart, name, nn.Parameter(parameter.detach(), parameter.requires_grad))
        delattr(layer.module, value)
        setattr(layer.module, value, apart)
    try:
        yield
    finally:
        for layer in tied:
            delattr(layer.module, value)
            setattr(layer.module, value, None)
