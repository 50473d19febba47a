"""Whole KV heads, with the query heads that read them: coarse, and a stock checkpoint.

As in LLM-Pruner, https://arxiv.org/abs/2305.11627: a KV head, its query heads and their columns of
W_o go together. The budget moves in steps of one head; `kept_fraction` says where it landed.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..calibration.statistics import Statistics
from ..model.errors import UnsupportedModelError
from ..model.layers import attention_layers, attention_spec, projections, text_config
from ..model.rope import AttentionShape
from ..surgery.apply import assemble
from ..surgery.replace import ReplacedLayer, Replacement, check_made_for
from .base import Ships
from .replacing import DenseLayer, Replacing, nearest_rank


@dataclass(frozen=True, kw_only=True)
class Heads(Replacing):
    """The KV heads with the largest sum of root-Fisher of K and V, as many in every layer."""

    name: ClassVar[str] = "heads"
    family: ClassVar[str] = "head pruning"
    summary: ClassVar[str] = "whole KV heads with the query heads that read them"
    ships: ClassVar[Ships] = "stock"

    @property
    def needs(self) -> frozenset[str]:
        """Gradients of W_k and W_v."""
        return frozenset({"fisher"})

    def replaced(
        self, layers: Sequence[DenseLayer], model: PreTrainedModel, statistics: Statistics
    ) -> list[ReplacedLayer]:
        """Kept KV heads, ascending, as the only entry of a layer's `widths`."""
        made = []
        for layer in layers:
            score_G = sum(layer.statistics[f"root_fisher_{role}"].sum(1) for role in "kv")
            assert isinstance(score_G, Tensor)
            count = nearest_rank(self.retain, layer.shape.num_kv_heads)
            kept = score_G.argsort(descending=True, stable=True)[:count].sort().values
            widths = {"kept_heads": kept.tolist()}
            made.append(ReplacedLayer(widths, {}, 2 * count * layer.shape.head_dim))
        return made

    def check_model(self, model: PreTrainedModel) -> None:
        """As of every replacing method; every layer attends, and heads are a setting of the family.

        Raises UnsupportedModelError where its class would make projections of another size.
        """
        super().check_model(model)
        layers, spec = attention_layers(model), attention_spec(model.config)
        if any(layer.shape is None for layer in layers):
            raise UnsupportedModelError("whole heads need attention in every layer")
        shape = layers[0].shape
        assert shape is not None
        fewer = (shape.group_size, 1, shape.head_dim)
        with torch.device("meta"):
            made = attention_layers(type(model)(_with_heads(model.config, *fewer)))[0]
        found = projections(made, spec)
        sizes = found["q"].out_features, found["k"].out_features, found["o"].in_features
        queries = shape.group_size * shape.head_dim
        if sizes != (queries, shape.head_dim, queries):
            raise UnsupportedModelError(
                f"{model.config.model_type} makes its heads of the hidden size, and has no plain "
                "form with fewer of them: use another method"
            )

    def apply(self, model: PreTrainedModel, plan: Replacement) -> Any:
        """A stock model with fewer heads; `model` is left untouched.

        Raises UnsupportedModelError if a layer has no attention.
        """
        check_made_for(plan, model)
        spec, state, counts = attention_spec(model.config), dict(model.state_dict()), set()
        for layer, planned in zip(attention_layers(model), plan.layers, strict=True):
            if planned is None or layer.shape is None:
                raise UnsupportedModelError("whole heads need attention in every layer")
            kept, shape = torch.tensor(planned.widths["kept_heads"]), layer.shape
            counts.add((len(kept) * shape.group_size, len(kept), shape.head_dim))
            for role, linear in projections(layer, spec).items():
                for leaf, tensor in linear.named_parameters():
                    name = f"{layer.path}.{spec.projection_names()[role]}.{leaf}"
                    state[name] = _keep(role, tensor.detach(), kept, shape)
        heads, kv_heads, head_dim = counts.pop()
        config = _with_heads(model.config, heads, kv_heads, head_dim)
        kept_state = {name: tensor.detach().clone() for name, tensor in state.items()}
        return assemble(model, config, kept_state)


def _with_heads(config: PreTrainedConfig, heads: int, kv_heads: int, head_dim: int) -> Any:
    """A copy of a config whose text model has fewer heads of the same width."""
    made = copy.deepcopy(config)
    text = text_config(made)
    text.num_attention_heads, text.num_key_value_heads = heads, kv_heads
    text.head_dim = head_dim
    return made


def _keep(role: str, tensor: Tensor, kept_G: Tensor, shape: AttentionShape) -> Tensor:
    """Rows of the kept heads (for o columns, and all of its bias)."""
    if role == "o" and tensor.ndim == 1:
        return tensor
    rows = tensor.mT if role == "o" else tensor
    groups = rows.unflatten(0, (shape.num_kv_heads, -1))[kept_G.to(tensor.device)].flatten(0, 1)
    return groups.mT.contiguous() if role == "o" else groups
