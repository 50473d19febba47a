"""Factored layers: cached as pairs are, with W_q and W_o dense and a map of every head instead.

The plan is that of pairs and says beside it which projections stay dense; the module is
`rap.model.factored`, which checkpoints ship.

Shapes: G KV heads, N cached heads of g = G/N, D dense head dim, W key width, C value width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..cache_layout import FactoredEntry, PairEntry
from ..errors import PlanError
from ..factored import FactoredAttention
from ..rope import AttentionShape
from .base import DenseAttention, Kind
from .pairs import PairPlan, cut, split_projections


@dataclass(frozen=True, eq=False)
class FactoredPlan(PairPlan):
    """A PairPlan whose mixes become maps: of queries (and normalized keys), of outputs, or both."""

    form: ClassVar[str] = "factored"

    queries: bool = True
    outputs: bool = False

    @classmethod
    def of(cls, plan: PairPlan, *, queries: bool, outputs: bool) -> "FactoredPlan":
        """The same choice with dense W_q, dense W_o, or both."""
        named = {item.name: getattr(plan, item.name) for item in fields(PairPlan)}
        return cls(**named, queries=queries, outputs=outputs)

    def record(self) -> dict[str, Any]:
        """What is mapped, and the note."""
        return {"queries": self.queries, "outputs": self.outputs, **super().record()}

    @classmethod
    def read(cls, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Self:
        """As of every plan."""
        plan = super().read(record, tensors)
        return replace(plan, queries=record["queries"], outputs=record["outputs"])

    def entry(self, norm_mode: str = "constant") -> PairEntry:
        """As of every plan; norms are exact in every mode."""
        heads = self.num_heads if self.merge > 1 else None
        sizes = (self.num_pairs, self.num_free, self.value_width)
        return FactoredEntry(*sizes, heads=heads, queries=self.queries, outputs=self.outputs)

    def about(self, shape: AttentionShape) -> str:
        """As of every plan: what is merged, and what stays dense alongside its maps."""
        heads = shape.num_kv_heads
        merged = f"{heads} KV heads merged into {self.num_heads}, " if self.merge > 1 else ""
        stays = " and ".join(["W_q"] * self.queries + ["W_o"] * self.outputs)
        return f"{merged}queries factored: {stays} stay dense, with a map per head"

    def check(self, layer: int, shape: AttentionShape) -> None:
        """As of every plan: PlanError also for maps without mixes or a subspace of values."""
        super().check(layer, shape)
        if not (self.queries or self.outputs):
            raise PlanError(f"layer {layer}: a factored layer maps queries or outputs")
        if self.outputs and self.value_up_GDC is None:
            raise PlanError(f"layer {layer}: mapped outputs need a subspace of values")
        if self.norm_rows or self.query_ratio_H is not None:
            raise PlanError(f"layer {layer}: a factored layer has the family's own norms")

    def convert(self, dense: DenseAttention) -> dict[str, Tensor]:
        """As of every plan: `frequency_index` and the maps are what the dense module has not.

        Raises PlanError for normalised queries and keys that are not mapped.
        """
        shape, normed = dense.shape, dense.layer.norm is not None
        if normed and not self.queries:
            raise PlanError("normalized queries and keys can be combined only after their norm")
        stays = {"q"} if self.queries else set()
        stays |= {"k"} if normed else set()
        stays |= {"o", "gate"} if self.outputs else set()

        def converted(projection: str, tensor: Tensor) -> Tensor:
            if "+" in projection:
                parts = split_projections(projection, tensor, shape, per_head=dense.spec.per_head)
                return torch.cat([converted(part, rows) for part, rows in parts.items()])
            if projection in stays or "norm" in projection:
                return tensor.clone()
            return cut(projection, tensor, self, shape)

        made = dense.changed(converted)
        like = next(dense.tensors[name] for name in dense.projections())
        index = self.frequency_GM.to(torch.int32, copy=True).contiguous()
        made["frequency_index"] = index.to(like.device)
        maps = self.maps(shape, normed=normed)
        return made | {name: x.to(like.device, like.dtype) for name, x in maps.items()}

    def maps(self, shape: AttentionShape, *, normed: bool) -> dict[str, Tensor]:
        """The maps by parameter name, float64: [G, W, D], [N, W, g D] and [G, D, C]."""
        maps = {}
        if self.queries:
            maps["query_map.weight"] = _rows(self, shape)
        if self.queries and normed:
            of_keys: dict[str, Any] = {
                "query_mix_GMP2": self.key_mix_GMP2,
                "query_free_mix_GNF": self.key_free_mix_GNF,
            }
            groups = _rows(replace(self, **of_keys), shape).unflatten(0, (self.num_heads, -1))
            maps["key_map.weight"] = groups.transpose(1, 2).flatten(-2)
        if self.outputs:
            assert self.value_up_GDC is not None
            maps["value_map.weight"] = self.value_up_GDC.double()
        return {name: x.contiguous() for name, x in maps.items()}


def _rows(plan: PairPlan, shape: AttentionShape) -> Tensor:
    """What the dense channels of every KV head's queries are multiplied by, float64 [G, W, D]."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    every = torch.eye(dim, dtype=torch.float64).repeat(heads, 1)
    rows = cut("q", every, plan, replace(shape, num_heads=heads))
    return rows.unflatten(0, (heads, -1))


KIND = Kind(
    FactoredEntry,
    FactoredAttention,
    normed=True,
    unsupported={
        "plain": "no plain config describes the maps of every head (prune with queries=absorbed)",
    },
    plan=FactoredPlan,
)
