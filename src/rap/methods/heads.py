"""Whole KV heads, with the query heads that read them: coarse, in a uniform layout.

As in LLM-Pruner, https://arxiv.org/abs/2305.11627: a KV head, its query heads and their columns of
W_o go together. The budget moves in steps of one head; `kept_fraction` says where it landed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..calibration.statistics import Statistics
from ..model.errors import UnsupportedModelError
from ..model.kinds.heads import HeadsPlan, with_heads
from ..model.layers import attention_layers, attention_spec, projections
from ..runtime.sources import LayerSource
from .base import Ships
from .replacing import DenseLayer, Replacing, nearest_rank


@dataclass(frozen=True, kw_only=True)
class Heads(Replacing):
    """The KV heads with the largest sum of root-Fisher of K and V, as many in every layer."""

    name: ClassVar[str] = "heads"
    family: ClassVar[str] = "head pruning"
    summary: ClassVar[str] = "whole KV heads with the query heads that read them"
    ships: ClassVar[Ships] = "stock"
    whole_keys: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Gradients of W_k and W_v."""
        return frozenset({"fisher"})

    def spared(self, config: PreTrainedConfig) -> frozenset[int]:
        """None: the number of heads is one setting of all layers."""
        return frozenset()

    def replaced(
        self, layers: Sequence[DenseLayer], source: LayerSource, statistics: Statistics
    ) -> list[HeadsPlan]:
        """The best KV heads of every layer."""
        made = []
        for layer in layers:
            score_G = sum(
                layer.statistics[f"root_fisher_{projection}"].sum(1) for projection in "kv"
            )
            assert isinstance(score_G, Tensor)
            count = nearest_rank(self.retain, layer.shape.num_kv_heads)
            kept = score_G.argsort(descending=True, stable=True)[:count].sort().values
            made.append(HeadsPlan(tuple(kept.tolist())))
        return made

    def check_model(self, model: PreTrainedModel) -> None:
        """As of every replacing method; every layer attends, and heads are a setting of the family.

        Raises UnsupportedModelError where its class would make projections of another size, and
        where a norm is not the same for every head.
        """
        super().check_model(model)
        layers, spec = attention_layers(model), attention_spec(model.config)
        norms = [layer.norm for layer in layers if layer.norm is not None]
        if any(norm.over == "all" or norm.one_module_per_head for norm in norms):
            raise UnsupportedModelError("norms of queries and keys differ from head to head")
        if any(layer.shape is None for layer in layers):
            raise UnsupportedModelError("whole heads need attention in every layer")
        shape = layers[0].shape
        assert shape is not None
        fewer = (shape.group_size, 1, shape.head_dim)
        with torch.device("meta"):
            made = attention_layers(type(model)(with_heads(model.config, *fewer)))[0]
        found = projections(made, spec)
        sizes = found["q"].out_features, found["k"].out_features, found["o"].in_features
        queries = shape.group_size * shape.head_dim
        if sizes != (queries, shape.head_dim, queries):
            raise UnsupportedModelError(
                f"{model.config.model_type} makes its heads of the hidden size, and has no plain "
                "form with fewer of them: use another method"
            )
