"""MatryoshkaKV's attention: keys after rotation, and values, projected onto a basis of every head.

The cache holds coordinates in the bases. Nothing is reconstructed: queries take the same
coordinates, and the output projection reads those of the values. W_q, W_k and W_v stay dense.

Shapes: B batch, T tokens, H query heads, G KV heads, R = H/G, D head dim, E model dim, r width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention import RapAttention
from ..cache_layout import CacheLayout, Entry, PairEntry
from ..rope import AttentionShape, Tables
from ..specs import AttentionSpec, QKNorm
from .base import Kind


@dataclass(frozen=True)
class ProjectedEntry(Entry):
    """Coordinates r of every KV head's `keys` and `values`."""

    kind: ClassVar[str] = "projected"

    keys: int
    values: int

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """Coordinates, head by head."""
        return CacheLayout(shape.num_kv_heads, self.keys, self.values)


class ProjectedAttention(RapAttention):
    """RapAttention of which the cache sees r coordinates of every head's keys and values.

    `key_down.g` and `value_down.g` are KV head g's bases (rows), the latter with a bias that takes
    the values' mean away; `factors` names them. With QK-norm the rows of W_q and W_k are in the
    order of the dense model, and `kept_channels` [G, D] is the canonical order.
    """

    fusable = False

    def __init__(
        self,
        dense: nn.Module,
        spec: AttentionSpec,
        dense_shape: AttentionShape,
        entry: ProjectedEntry,
        norm: QKNorm | None = None,
        norm_mode: str = "exact",
    ):
        geometry, dim = dense_shape.geometry, dense_shape.head_dim
        sizes = PairEntry(geometry.num_pairs, geometry.num_free, dim)
        # The mode is that of cut heads, and these are whole before the bases.
        super().__init__(dense, spec, dense_shape, sizes, norm, "exact")
        output = getattr(self, spec.projections[3])
        like: dict[str, Any] = {"device": output.weight.device, "dtype": output.weight.dtype}
        inputs = dense_shape.num_heads * entry.values
        setattr(self, spec.projections[3], nn.Linear(inputs, output.out_features, **like))
        heads = range(dense_shape.num_kv_heads)
        keys, values = (dim, entry.keys), (dim, entry.values)
        self.key_down = nn.ModuleList([nn.Linear(*keys, bias=False, **like) for _ in heads])
        self.value_down = nn.ModuleList([nn.Linear(*values, **like) for _ in heads])
        self.factors = {
            "k": tuple(f"key_down.{head}" for head in heads),
            "v": tuple(f"value_down.{head}" for head in heads),
        }

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As RapAttention, with values in coordinates."""
        q, k, v, gate = super().project(hidden_states)
        return q, k, _each_head(self.value_down, v), gate

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """Rotated queries [B, H, T, r] and keys [B, G, T, r] in coordinates."""
        q, k = super().position(q, k, tables)
        return _each_head(self.key_down, q), _each_head(self.key_down, k)


def projected_tensors(
    key_basis_GDR: Tensor,
    value_basis_GDR: Tensor,
    value_mean_GD: Tensor,
    w_o: Tensor,
    b_o: Tensor | None,
    output: str = "o_proj",
) -> dict[str, Tensor]:
    """The bases, and the output projection [E, H D] with the values' basis and mean folded in.

    The mean of the keys needs no place: what it adds to a query's logits is the same for all keys.
    """
    tensors: dict[str, Tensor] = {}
    for head, (key, value) in enumerate(zip(key_basis_GDR, value_basis_GDR, strict=True)):
        tensors[f"key_down.{head}.weight"] = key.mT.contiguous()
        tensors[f"value_down.{head}.weight"] = value.mT.contiguous()
        tensors[f"value_down.{head}.bias"] = -(value_mean_GD[head] @ value)
    groups, dim = value_mean_GD.shape
    columns = w_o.unflatten(1, (groups, -1, dim))
    folded = torch.einsum("egqd,gdr->egqr", columns, value_basis_GDR)
    added = torch.einsum("egqd,gd->e", columns, value_mean_GD)
    tensors[f"{output}.weight"] = folded.flatten(1)
    tensors[f"{output}.bias"] = added if b_o is None else added + b_o
    return tensors


def _each_head(bases: nn.ModuleList, x_BHTD: Tensor) -> Tensor:
    """Every head's states in the coordinates of its KV head."""
    heads = x_BHTD.unflatten(1, (len(bases), -1)).unbind(1)
    return torch.stack([down(x) for down, x in zip(bases, heads, strict=True)], 1).flatten(1, 2)


KIND = Kind(
    ProjectedEntry,
    ProjectedAttention,
    normed=True,
    unsupported={
        "vllm": "keys are projected after their rotation, which vLLM's attention classes have no "
        "place for",
        "plain": "no plain config describes keys that are projected after their rotation",
    },
)
