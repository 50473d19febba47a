"""Whole KV heads: a checkpoint of the family's own class with fewer of them.

Shapes: G KV heads, D dense head dim, E model dim.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..cache_layout import CacheLayout, Entry
from ..errors import PlanError, UnsupportedModelError
from ..layers import text_config
from ..rope import AttentionShape
from .base import DenseAttention, Kind, LayerPlan


@dataclass(frozen=True)
class HeadsEntry(Entry):
    """`kept_heads`: the dense KV heads that stay, ascending; config.json has their number."""

    kind: ClassVar[str] = "heads"

    kept_heads: list[int]

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """Whole heads."""
        return CacheLayout(len(self.kept_heads), shape.head_dim, shape.head_dim)


@dataclass(frozen=True, eq=False)
class HeadsPlan(LayerPlan):
    """Kept KV heads, each with the query heads that read it and their columns of W_o."""

    form: ClassVar[str] = "heads"

    kept_heads: tuple[int, ...]

    def entry(self, norm_mode: str = "constant") -> HeadsEntry:
        """As of every plan."""
        return HeadsEntry(list(self.kept_heads))

    def check(self, layer: int, shape: AttentionShape) -> None:
        """As of every plan: PlanError for heads that are not there."""
        ascending = sorted(set(self.kept_heads))
        if not ascending or [*self.kept_heads] != ascending or ascending[-1] >= shape.num_kv_heads:
            raise PlanError(
                f"layer {layer}: kept heads {list(self.kept_heads)} must ascend within "
                f"0..{shape.num_kv_heads - 1}"
            )

    def convert(self, dense: DenseAttention) -> dict[str, Tensor]:
        """Rows (of W_o columns) of the kept heads."""
        kept, shape = torch.tensor(self.kept_heads), dense.shape
        return dense.changed(lambda which, x: _keep(which, x, kept, shape).clone())

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def record(self) -> dict[str, Any]:
        """The heads."""
        return {"kept_heads": list(self.kept_heads)}

    @classmethod
    def read(cls, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Self:
        """As of every plan."""
        return cls(tuple(record["kept_heads"]))

    @classmethod
    def family_config(
        cls,
        config: PreTrainedConfig,
        layers: Sequence[LayerPlan | None],
        shapes: Sequence[AttentionShape | None],
    ) -> Any:
        """As of every plan: the config with fewer heads.

        Raises UnsupportedModelError for a layer without attention, or unequal numbers of heads.
        """
        sizes = set()
        for layer, shape in zip(layers, shapes, strict=True):
            if shape is None or not isinstance(layer, cls):
                raise UnsupportedModelError("whole heads need attention in every layer")
            count = len(layer.kept_heads)
            sizes.add((count * shape.group_size, count, shape.head_dim))
        if len(sizes) > 1:
            raise UnsupportedModelError("whole heads need as many of them in every layer")
        return with_heads(config, *sizes.pop())


def with_heads(config: PreTrainedConfig, heads: int, kv_heads: int, head_dim: int) -> Any:
    """A copy of a config whose text model has fewer heads of the same width."""
    made = copy.deepcopy(config)
    text = text_config(made)
    text.num_attention_heads, text.num_key_value_heads = heads, kv_heads
    text.head_dim = head_dim
    return made


def _keep(projection: str, tensor: Tensor, kept_G: Tensor, shape: AttentionShape) -> Tensor:
    """Rows of the kept heads (for o columns, and all of its bias); norms serve every head."""
    if "norm" in projection or (projection == "o" and tensor.ndim == 1):
        return tensor
    rows = tensor.mT if projection == "o" else tensor
    groups = rows.unflatten(0, (shape.num_kv_heads, -1))[kept_G.to(tensor.device)].flatten(0, 1)
    return groups.mT.contiguous() if projection == "o" else groups


KIND = Kind(HeadsEntry, plan=HeadsPlan)
