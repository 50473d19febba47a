"""What one attention layer keeps, as data, checked against the layer's shape.

Shapes: G KV heads, H query heads, M kept pairs (slots) of a head, P dense pairs, N kept
non-rotating channels, C kept value channels, D dense head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..model.errors import PlanError
from ..model.rope import AttentionShape

_PER_QUERY = ("query_ratio", "query_sketch")


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What one attention layer keeps, the same number of slots and channels for every KV head.

    `frequency_GM` is the dense pair whose frequency each key slot rotates at, ascending in a head.
    Without mixing matrices the slot is that dense pair itself. With them, slot s of head g is the
    complex combination `sum_p mix[g, s, p] * pair_p` of the dense rows (last axis real, imaginary).
    `free_GN` indexes the head's F non-rotating channels, counted from the first of them; with
    `query_free_mix` and `key_free_mix` it only numbers them, and each is that combination of the F.
    Values keep the dense channels `channels_GC`, or the subspace `value_down` folded back by
    `value_up`. `query_ratio` and `key_ratio` are what QK-norm multiplies the energy of kept
    channels by, to stand for that of the dense head (1 if not given); in mode `rows` that energy
    includes `query_sketch` and `key_sketch`, S combinations of dropped channels for every head.
    """

    frequency_GM: Tensor
    free_GN: Tensor
    channels_GC: Tensor | None = None
    query_mix_GMP2: Tensor | None = None
    key_mix_GMP2: Tensor | None = None
    value_down_GCD: Tensor | None = None
    value_up_GDC: Tensor | None = None
    query_ratio_H: Tensor | None = None
    key_ratio_G: Tensor | None = None
    query_free_mix_GNF: Tensor | None = None
    key_free_mix_GNF: Tensor | None = None
    query_sketch_HSD: Tensor | None = None
    key_sketch_GSD: Tensor | None = None

    @classmethod
    def of_indices(
        cls,
        pairs: Sequence[Sequence[int]],
        channels: Sequence[Sequence[int]],
        free: Sequence[Sequence[int]] | None = None,
    ) -> "LayerPlan":
        """Plain pruning: kept dense pairs, value channels and free channels, one list a KV head."""
        return cls(
            frequency_GM=_rectangle(pairs, "pairs"),
            free_GN=_rectangle(free or [[] for _ in pairs], "free channels"),
            channels_GC=_rectangle(channels, "value channels"),
        )

    @property
    def num_pairs(self) -> int:
        """M: rotated slots kept in every head."""
        return self.frequency_GM.shape[1]

    @property
    def num_free(self) -> int:
        """N: non-rotating key channels kept in every head."""
        return self.free_GN.shape[1]

    @property
    def key_width(self) -> int:
        """Cached key channels of a head, 2M + N."""
        return 2 * self.num_pairs + self.num_free

    @property
    def value_width(self) -> int:
        """Cached value channels of a head, C."""
        kept = self.channels_GC if self.channels_GC is not None else self.value_down_GCD
        assert kept is not None
        return kept.shape[1]

    @property
    def mixes_keys(self) -> bool:
        """Whether any kept key channel is a combination of dense ones."""
        return self.key_mix_GMP2 is not None or self.key_free_mix_GNF is not None

    @property
    def norm_rows(self) -> int:
        """S: rows of every head that only the norm sees."""
        # Queries and keys have as many; a layer that reads another's keys has queries alone.
        return 0 if self.query_sketch_HSD is None else self.query_sketch_HSD.shape[1]

    def kept_channels(self, shape: AttentionShape) -> Tensor:
        """Dense head channels a plain cut keeps, LongTensor [G, W] in canonical order."""
        pairs, free = self.frequency_GM.long(), self.free_GN.long()
        geometry = shape.geometry
        canonical = torch.cat([pairs, pairs + geometry.num_pairs, free + geometry.rotary_dim], 1)
        return geometry.canonical_order()[canonical]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set, by field name."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPlan):
            return NotImplemented
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)

    __hash__ = None  # type: ignore[assignment]

    def check(self, layer: int, shape: AttentionShape) -> None:
        """Raise PlanError, naming the layer, if this cannot be cut from a layer of that shape."""
        geometry = shape.geometry
        self._check_sizes(layer, shape)
        down, up = self.value_down_GCD, self.value_up_GDC
        if (down is None) != (up is None) or (self.channels_GC is None) == (down is None):
            raise PlanError(f"layer {layer}: values need either channels or a subspace, not both")
        if down is not None and up is not None and up.shape[2] != down.shape[1]:
            raise PlanError(
                f"layer {layer}: value_up_GDC folds {up.shape[2]} channels back, value_down_GCD "
                f"keeps {down.shape[1]}"
            )
        if self.key_width == 0 or self.value_width == 0:
            raise PlanError(f"layer {layer}: a head must keep at least one channel of K and of V")
        mixed = self.key_mix_GMP2 is not None
        if mixed != (self.query_mix_GMP2 is not None):
            raise PlanError(f"layer {layer}: key and query mixing must come together")
        if (self.key_free_mix_GNF is None) != (self.query_free_mix_GNF is None):
            raise PlanError(f"layer {layer}: key and query mixing must come together")
        _check_index(layer, "pair", self.frequency_GM, geometry.num_pairs, repeats=mixed)
        _check_index(layer, "free channel", self.free_GN, geometry.num_free)
        if self.channels_GC is not None:
            _check_index(layer, "value channel", self.channels_GC, geometry.head_dim)

    def _check_sizes(self, layer: int, shape: AttentionShape) -> None:
        heads, dim = shape.num_kv_heads, shape.head_dim
        mix = (heads, self.frequency_GM.shape[-1], shape.geometry.num_pairs, 2)
        free = (heads, self.num_free, shape.geometry.num_free)
        expected = {
            **dict.fromkeys(("frequency_GM", "free_GN", "channels_GC"), (heads, -1)),
            **dict.fromkeys(("query_mix_GMP2", "key_mix_GMP2"), mix),
            **dict.fromkeys(("query_free_mix_GNF", "key_free_mix_GNF"), free),
            "value_down_GCD": (heads, -1, dim),
            "value_up_GDC": (heads, dim, -1),
            "query_ratio_H": (shape.num_heads,),
            "key_ratio_G": (heads,),
            "query_sketch_HSD": (shape.num_heads, self.norm_rows, dim),
            "key_sketch_GSD": (heads, self.norm_rows, dim),
        }
        for name, tensor in self.tensors().items():
            sizes, found = expected[name], tuple(tensor.shape)
            if len(found) == len(sizes) and found[0] != heads and not name.startswith(_PER_QUERY):
                what = f"{name} has {found[0]} KV heads, the model has {heads}"
                raise PlanError(f"layer {layer}: {what}")
            fits = (want in (-1, got) for want, got in zip(sizes, found, strict=False))
            if len(found) != len(sizes) or not all(fits):
                raise PlanError(
                    f"layer {layer}: {name} is {list(found)}, expected {list(sizes)} (-1: any)"
                )


def _rectangle(rows: Sequence[Sequence[int]], what: str) -> Tensor:
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        raise PlanError(f"heads of one layer keep different numbers of {what}: {sorted(widths)}")
    return torch.tensor([list(row) for row in rows], dtype=torch.int32).reshape(len(rows), -1)


def _check_index(layer: int, what: str, index: Tensor, size: int, *, repeats: bool = False) -> None:
    if index.is_floating_point():
        raise PlanError(f"layer {layer}: {what} indices must be integers, not {index.dtype}")
    if index.numel() == 0:
        return
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= size:
        raise PlanError(
            f"layer {layer}: {what} {low if low < 0 else high} is outside 0..{size - 1}"
        )
    steps = index[:, 1:] - index[:, :-1]
    if repeats:
        if (steps < 0).any():
            raise PlanError(f"layer {layer}: {what} indices must ascend within a head")
        return
    for head, row in enumerate(index.tolist()):
        if len(set(row)) < len(row):
            again = next(value for value in row if row.count(value) > 1)
            raise PlanError(f"layer {layer}, KV head {head}: {what} {again} is kept twice")
    if (steps < 0).any():
        raise PlanError(f"layer {layer}: {what} indices must ascend within a head")
