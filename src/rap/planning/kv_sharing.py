"""Plans of layers that read the keys and values of an earlier one: one choice, an entry for each.

Methods plan joined layers (`calibration.kv_sharing`). What they decide for one is divided here: the
source keeps its part, and every reader repeats the choice of pairs and values with what is of its
own query heads.

Shapes: G KV heads, D head dim, E model dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..calibration.kv_sharing import Shapes, join_heads, joined_shapes, readers_of
from ..model.errors import PlanError
from ..model.kinds.base import LayerPlan
from ..model.kinds.pairs import PairPlan
from ..model.rope import AttentionShape
from .scores import Named

# What is of query heads, and of keys alone; all else of a plan is of the choice itself.
_OF_QUERIES = ("query_ratio_H", "query_sketch_HSD")
_OF_KEYS = ("key_ratio_G", "key_sketch_GSD")


def check_reader(index: int, layer: LayerPlan | None, source: int, kept: LayerPlan | None) -> None:
    """Raise PlanError unless a reader keeps exactly what its source does."""
    if (layer is None) != (kept is None):
        raise PlanError(f"layers {source} and {index} share keys and values: plan both or neither")
    if layer is None or kept is None:
        return
    mine, theirs = _choice(layer), _choice(kept)
    if mine.keys() != theirs.keys() or any(not torch.equal(mine[k], theirs[k]) for k in mine):
        raise PlanError(
            f"layer {index} reads the keys and values of layer {source}: it must keep the same "
            "pairs and the same values"
        )


def _choice(layer: LayerPlan) -> dict[str, Tensor]:
    named = layer.tensors()
    return {k: x for k, x in named.items() if k not in (*_OF_QUERIES, *_OF_KEYS)}


def divide(layers: Sequence[PairPlan | None], shapes: Shapes) -> tuple[PairPlan | None, ...]:
    """Plans of joined layers to those of every layer."""
    divided = list(layers)
    for source, readers in readers_of(shapes).items():
        joined, shape = layers[source], shapes[source]
        if not readers or joined is None or shape is None:
            continue
        own = {name: x for name in _OF_QUERIES if (x := getattr(joined, name)) is not None}
        for position, index in enumerate((source, *readers)):
            begin, size = position * shape.group_size, shape.group_size
            parts: dict[str, Any] = {
                name: _grouped(x, shape)[:, begin : begin + size].flatten(0, 1).contiguous()
                for name, x in own.items()
            }
            if index != source:
                parts |= dict.fromkeys(_OF_KEYS)
            divided[index] = replace(joined, **parts)
    return tuple(divided)


def _grouped(x: Tensor, shape: AttentionShape) -> Tensor:
    return x.unflatten(0, (shape.num_kv_heads, -1))


class JoinedWeights(Sequence[Named | None]):
    """Weights of joined layers by projection, put together when they are asked for."""

    def __init__(self, weights: Sequence[Named | None], shapes: Shapes):
        self._weights, self._shapes, self._readers = weights, shapes, readers_of(shapes)

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, index: Any) -> Any:
        own, shape = self._weights[index], self._shapes[index]
        if own is None or shape is None or shape.source is not None:
            return None
        if not self._readers[index]:
            return own
        every = [own, *(x for i in self._readers[index] if (x := self._weights[i]) is not None)]
        queries = [x["q"].unflatten(0, (shape.num_heads, -1)) for x in every]
        outputs = [x["o"].mT.unflatten(0, (shape.num_heads, -1)) for x in every]
        q, o = (join_heads(parts, shape.num_kv_heads).flatten(0, 1) for parts in (queries, outputs))
        return {**own, "q": q, "o": o.mT}

    def __iter__(self) -> Iterator[Named | None]:
        return (self[index] for index in range(len(self)))


def joined(shapes: Shapes, weights: Sequence[Named | None]) -> tuple[Shapes, Sequence[Any]]:
    """Shapes and weights of joined layers; as they are where no layer reads another's."""
    if all(shape is None or shape.source is None for shape in shapes):
        return shapes, weights
    return joined_shapes(shapes), JoinedWeights(weights, shapes)
