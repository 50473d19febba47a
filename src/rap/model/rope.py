"""RoPE geometry: which channels of a head rotate together, and the rotation of kept pairs.

Shapes: B batch, T tokens, H query heads, G KV heads, R = H/G query heads per KV head, D dense head
dim, P rotated pairs, M kept pairs of a head, W = 2M + kept pass-through channels.

The canonical order of a head's channels is [first of every pair | second of every pair | rest].
Everything past the conversion of weights works in it, so only this file knows a dense layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .errors import UnsupportedModelError

Pairing = Literal["half", "interleaved"]
TableKind = Literal["repeated", "interleaved", "half", "complex"]
# What a model's rotary module gives every layer: cos and sin, or one complex tensor.
Tables = tuple[Tensor, Tensor] | Tensor


@dataclass(frozen=True)
class HeadGeometry:
    """How the `head_dim` channels of one dense head rotate.

    `rotary_dim` channels at the front rotate (0 for a layer without positions); `pairing` says
    whether pair j is (j, j + rotary_dim/2) (`half`) or (2j, 2j + 1) (`interleaved`).
    """

    head_dim: int
    rotary_dim: int
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        assert 0 <= self.rotary_dim <= self.head_dim, self
        assert self.rotary_dim % 2 == 0, self

    @property
    def num_pairs(self) -> int:
        """P: the number of 2x2 rotation planes of a head."""
        return self.rotary_dim // 2

    @property
    def num_free(self) -> int:
        """The number of channels that never rotate."""
        return self.head_dim - self.rotary_dim

    def canonical_order(self) -> Tensor:
        """Dense channel of every canonical position, LongTensor [D]."""
        pairs = torch.arange(self.num_pairs)
        if self.pairing == "half":
            first, second = pairs, pairs + self.num_pairs
        else:
            first, second = 2 * pairs, 2 * pairs + 1
        return torch.cat([first, second, torch.arange(self.rotary_dim, self.head_dim)])

    def pair_channels(self) -> Tensor:
        """Dense channels (first, second) of every pair, LongTensor [P, 2].

        >>> HeadGeometry(head_dim=8, rotary_dim=6).pair_channels().tolist()
        [[0, 3], [1, 4], [2, 5]]
        >>> HeadGeometry(head_dim=8, rotary_dim=6, pairing="interleaved").pair_channels().tolist()
        [[0, 1], [2, 3], [4, 5]]
        """
        order = self.canonical_order()
        return torch.stack([order[: self.num_pairs], order[self.num_pairs : self.rotary_dim]], 1)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer: H query heads, G KV heads, model dim E, the head's geometry.

    `source` is the earlier layer whose keys and values it attends to, where it has none of its own.
    """

    num_heads: int
    num_kv_heads: int
    hidden_size: int
    geometry: HeadGeometry
    source: int | None = None

    @property
    def num_cached_heads(self) -> int:
        """KV heads of which the layer itself caches anything: none where it reads another's."""
        return self.num_kv_heads if self.source is None else 0

    @property
    def group_size(self) -> int:
        """R: query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """D of the dense head."""
        return self.geometry.head_dim


def read_frequencies(rotary: nn.Module) -> Tensor:
    """Angular frequency per position of every pair, float64 [P], read from a model's rotary module.

    Recomputing them from a base would miss llama3, yarn, linear and longrope scaling. Raises
    UnsupportedModelError if the module has none.
    """
    frequencies = getattr(rotary, "inv_freq", None)
    if not isinstance(frequencies, Tensor):
        raise UnsupportedModelError(
            f"{type(rotary).__name__} has no inv_freq: its RoPE frequencies cannot be read"
        )
    return frequencies.detach().double().cpu()


def pair_tables(
    tables: Tables, num_pairs: int, kind: TableKind, sections: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin with one column per pair, views [1|B, T, P] of model-level ones in any layout.

    Tables [3, B, T, .] of all axes of positions give every pair that of its own: the axes take
    turns in the blocks of pairs that `sections` counts.
    """
    cos, sin = (tables.real, tables.imag) if isinstance(tables, Tensor) else tables
    if sections is not None and cos.dim() == 4:
        # Since 5.19 at the latest, transformers does this once for all layers.
        cos, sin = (
            torch.cat([x[axis % 3] for axis, x in enumerate(blocks)], -1)
            for blocks in (
                x[..., :num_pairs].split_with_sizes(list(sections), -1) for x in (cos, sin)
            )
        )
    if kind == "interleaved":
        return cos[..., : 2 * num_pairs : 2], sin[..., : 2 * num_pairs : 2]
    return cos[..., :num_pairs], sin[..., :num_pairs]


def gather_pairs(table_BTP: Tensor, index_GM: Tensor) -> Tensor:
    """cos or sin of every kept slot, [1|B, G, T, M]. An index may repeat within a head."""
    return table_BTP[:, :, index_GM].transpose(1, 2)


def rotate_pairs(x_BHTW: Tensor, cos_BGTM: Tensor, sin_BGTM: Tensor) -> Tensor:
    """Rotate the first 2M canonical channels of every head; the rest passes through.

    `x` has H query heads or G KV heads; head h uses the slots of KV head h // (H/G). The arithmetic
    is x1 cos - x2 sin, x2 cos + x1 sin: per channel the same as in the dense model (eq. `rope`).
    """
    batch, heads, tokens, width = x_BHTW.shape
    num_kv, num_slots = cos_BGTM.shape[1], cos_BGTM.shape[-1]
    x = x_BHTW.reshape(batch, num_kv, heads // num_kv, tokens, width)
    cos, sin = cos_BGTM.unsqueeze(2), sin_BGTM.unsqueeze(2)
    x1, x2 = x[..., :num_slots], x[..., num_slots : 2 * num_slots]
    parts = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    if width > 2 * num_slots:
        parts.append(x[..., 2 * num_slots :])
    return torch.cat(parts, dim=-1).reshape(batch, heads, tokens, width)


def rotate_step(
    q_BHTW: Tensor,
    k_BGTW: Tensor,
    cos_BTP: Tensor,
    sin_BTP: Tensor,
    index_GM: Tensor,
    *,
    clockwise: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rotate_pairs` of one token's queries and keys, bit for bit, in half the operations.

    For so few numbers the count of operations is what a rotation costs. Nothing that follows from
    the index is kept for the next step: torch cannot tell every way in which a tensor changes.
    """
    (batch, heads, _, width), (num_kv, num_slots) = q_BHTW.shape, index_GM.shape
    table = torch.cat([cos_BTP, sin_BTP], dim=1).index_select(2, index_GM.flatten())
    cos, sin = table.view(-1, 2, num_kv, 1, num_slots).unbind(1)
    # The key is one more row beside the queries of its group.
    x = torch.cat([q_BHTW.reshape(batch, num_kv, -1, width), k_BGTW], dim=2)
    x1, x2 = x[..., :num_slots], x[..., num_slots : 2 * num_slots]
    if clockwise:
        x1, x2 = x2, x1
    parts = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    if clockwise:
        parts.reverse()
    if width > 2 * num_slots:
        parts.append(x[..., 2 * num_slots :])
    turned = torch.cat(parts, dim=-1)
    return turned[:, :, :-1].reshape(batch, heads, 1, width), turned[:, :, -1:]
