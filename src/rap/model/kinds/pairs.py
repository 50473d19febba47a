"""RoPE pairs (or merged slots) of keys and queries, channels or directions of values.

What a plan says of a layer, checked against the layer's shape, and one pure function per cut of its
projections: one dense tensor in, its kept rows or columns out. Layouts: [out, in] as in nn.Linear.

Shapes: G KV heads, H query heads, R = H/G, M kept pairs (slots) of a head, P dense pairs, N kept
non-rotating channels, W = 2M + N kept key channels, C kept value channels, D dense head dim,
E model dim (absent for a bias).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..cache_layout import PairEntry
from ..errors import PlanError
from ..norms import norm_names
from ..projections import projection_rows
from ..rope import AttentionShape
from ..specs import QKNorm
from .base import DenseAttention, Kind, LayerPlan

_PER_QUERY = ("query_ratio", "query_sketch")


@dataclass(frozen=True, eq=False)
class PairPlan(LayerPlan):
    """What one attention layer keeps, the same number of slots and channels for every cached head.

    Cached heads are the G dense KV heads, or N merged ones: then `frequency_GM` and `free_GN` have
    N rows, and a slot, free channel and value channel of a merged head are sums over its g = G/N
    dense heads of what the mixes, of G heads each, make of them (rap.planning.merging).

    `frequency_GM` is the dense pair whose frequency each key slot rotates at, ascending in a head.
    Without mixing matrices the slot is that dense pair itself. With them, slot s of head g is the
    complex combination `sum_p mix[g, s, p] * pair_p` of the dense rows (last axis real, imaginary).
    `free_GN` indexes the head's F non-rotating channels, counted from the first of them; with
    `query_free_mix` and `key_free_mix` it only numbers them, and each is that combination of the F.
    Values keep the dense channels `channels_GC`, or the subspace `value_down` folded back by
    `value_up`. `query_ratio` and `key_ratio` are what QK-norm multiplies the energy of kept
    channels by, to stand for that of the dense head (1 if not given); in mode `rows` that energy
    includes `query_sketch` and `key_sketch`, S combinations of dropped channels for every head.
    `note` says why the layer is not as the method was asked for.
    """

    form: ClassVar[str] = "pairs"

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
    note: str = ""

    @classmethod
    def of_indices(
        cls,
        pairs: Sequence[Sequence[int]],
        channels: Sequence[Sequence[int]],
        free: Sequence[Sequence[int]] | None = None,
    ) -> "PairPlan":
        """Plain pruning: kept dense pairs, value channels and free channels, one list a KV head."""
        return cls(
            frequency_GM=_rectangle(pairs, "pairs"),
            free_GN=_rectangle(free or [[] for _ in pairs], "free channels"),
            channels_GC=_rectangle(channels, "value channels"),
        )

    @property
    def num_heads(self) -> int:
        """Cached heads: the dense KV heads, or fewer that are merged of them."""
        return len(self.frequency_GM)

    @property
    def merge(self) -> int:
        """g: dense KV heads of a cached head."""
        down = self.value_down_GCD
        return 1 if down is None else len(down) // self.num_heads

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
        """Dense head channels that plain pruning keeps, LongTensor [G, W] in canonical order."""
        pairs, free = self.frequency_GM.long(), self.free_GN.long()
        geometry = shape.geometry
        canonical = torch.cat([pairs, pairs + geometry.num_pairs, free + geometry.rotary_dim], 1)
        return geometry.canonical_order()[canonical]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set, by field name."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def record(self) -> dict[str, Any]:
        """The note, if there is one."""
        return {"note": self.note} if self.note else {}

    @classmethod
    def read(cls, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Self:
        """As of every plan: its fields are its tensors."""
        return cls(**tensors, note=record.get("note", ""))

    def entry(self, norm_mode: str = "constant") -> PairEntry:
        """As of every plan; rows that only a norm sees are of mode `rows`."""
        rows = self.norm_rows if norm_mode == "rows" else 0
        heads = self.num_heads if self.merge > 1 else None
        return PairEntry(self.num_pairs, self.num_free, self.value_width, rows, heads)

    def convert(self, dense: DenseAttention) -> dict[str, Tensor]:
        """As of every plan: every pruned projection and norm, and what the dense module lacks.

        That is `frequency_index` int32 [G, M]; with QK-norm also the dense channel of every kept
        one, `kept_channels` int32 [G, W] (mode `exact`), or each norm's energy `ratio` [heads].
        """
        spec, own = dense.spec, dense.layer
        how: dict[str, Any] = {
            "norm": own.norm,
            "norm_mode": dense.norm_mode,
            "per_head": spec.per_head,
            "value_norm": spec.value_norm is not None,
        }
        made = dense.changed(lambda which, x: cut(which, x, self, dense.shape, **how))
        device = next(dense.tensors[name] for name in dense.projections()).device
        return made | {name: x.to(device) for name, x in self._added(dense).items()}

    def _added(self, dense: DenseAttention) -> dict[str, Tensor]:
        """What the dense module has not; copies, because readers share their source's."""
        norm, shape = dense.layer.norm, dense.shape
        added = {"frequency_index": self.frequency_GM.to(torch.int32, copy=True).contiguous()}
        if norm is not None and dense.norm_mode == "exact":
            added["kept_channels"] = self.kept_channels(shape).to(torch.int32)
        elif norm is not None:
            names = norm_names(norm, exact=False)
            ratios = (self.query_ratio_H, self.key_ratio_G)
            counts = (shape.num_heads, shape.num_kv_heads)
            for name, ratio, count in zip(names, ratios, counts, strict=True):
                if name == names[1] and shape.source is not None:
                    continue
                ratio = torch.ones(count) if ratio is None else ratio
                added[f"{name}.ratio"] = ratio.to(torch.float32, copy=True)
        return added

    def about(self, shape: AttentionShape) -> str:
        """As of every plan: which heads are merged, what became of W_q and W_o, and the note."""
        if self.merge == 1:
            return self.note
        wide = f"{self.key_width / shape.head_dim:.2f}"
        kept = f"queries absorbed: W_q and W_o have {wide} of their dense size"
        return f"{shape.num_kv_heads} KV heads merged into {self.num_heads}, {kept}"

    def check(self, layer: int, shape: AttentionShape) -> None:
        """Raise PlanError, naming the layer, if this does not fit a layer of that shape."""
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
        if self.merge > 1 and (mixed < (self.num_pairs > 0) or self.query_ratio_H is not None):
            raise PlanError(f"layer {layer}: merged heads need mixes, and no norms of keys")
        if self.merge > 1 and self.num_free and self.key_free_mix_GNF is None:
            raise PlanError(f"layer {layer}: merged heads need mixes of channels without rotation")
        _check_index(layer, "pair", self.frequency_GM, geometry.num_pairs, repeats=mixed)
        _check_index(layer, "free channel", self.free_GN, self.merge * geometry.num_free)
        if self.channels_GC is not None:
            _check_index(layer, "value channel", self.channels_GC, geometry.head_dim)

    def _check_sizes(self, layer: int, shape: AttentionShape) -> None:
        heads, dim = shape.num_kv_heads, shape.head_dim
        merged = self.num_heads != heads
        if self.num_heads < 1 or heads % self.num_heads or (merged and self.value_down_GCD is None):
            raise PlanError(
                f"layer {layer}: frequency_GM has {self.num_heads} KV heads, the model has {heads}"
            )
        mix = (heads, self.frequency_GM.shape[-1], shape.geometry.num_pairs, 2)
        free = (heads, self.num_free, shape.geometry.num_free)
        expected = {
            **dict.fromkeys(("frequency_GM", "free_GN"), (self.num_heads, -1)),
            "channels_GC": (heads, -1),
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
            wrong = len(found) == len(sizes) and found[0] != sizes[0]
            if wrong and not name.startswith(_PER_QUERY):
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


def cut(
    projection: str,
    tensor: Tensor,
    layer: PairPlan,
    shape: AttentionShape,
    *,
    norm: QKNorm | None = None,
    norm_mode: str = "constant",
    per_head: bool = False,
    value_norm: bool = False,
) -> Tensor:
    """The pruned weight or bias of a projection or norm, contiguous, same dtype.

    `projection` is q, k, v, o or gate, several of them joined by "+" for a linear they share
    (head by head if `per_head`; the pruned one lists one after another) or by "=" for one whose
    rows are all of them, or a norm's tensor, such as "q_norm.weight". With a `value_norm` all rows
    of v stay, rotated so that the kept ones come first. The output projection's bias is per model
    channel and stays as it is.
    Raises PlanError for a mixed plan of a layer whose norm or gate works on single channels.
    """
    exact = norm is not None and norm_mode == "exact"
    if norm is not None and layer.mixes_keys:
        raise PlanError(
            "keys of a layer with QK-norm cannot be folded; prune RoPE pairs (keys=pairs)"
        )
    if "+" in projection or "=" in projection:
        parts = split_projections(projection, tensor, shape, per_head=per_head)
        how: dict[str, Any] = {"norm": norm, "norm_mode": norm_mode, "value_norm": value_norm}
        return torch.cat([cut(part, rows, layer, shape, **how) for part, rows in parts.items()])
    if "norm" in projection:
        return tensor.clone() if exact else _cut_norm(projection, tensor, layer, shape)
    if projection in "qk":
        if exact:
            return tensor.clone()
        if norm is not None and norm.centred:
            tensor = _centre(tensor, shape.head_dim)
        if projection == "q":
            heads, sketch, merge = shape.num_heads, layer.query_sketch_HSD, 1
            mixes = layer.query_mix_GMP2, layer.query_free_mix_GNF
        else:
            heads, sketch, merge = shape.num_kv_heads, layer.key_sketch_GSD, layer.merge
            mixes = layer.key_mix_GMP2, layer.key_free_mix_GNF
        kept = _cut_keys(tensor, layer, shape, heads, mixes, merge)
        return kept if sketch is None or norm_mode != "rows" else _add_rows(kept, tensor, sketch)
    if projection == "v":
        return (_rotate_value if value_norm else _cut_value)(tensor, layer, shape)
    if projection == "gate":
        return _cut_gate(tensor, layer, shape)
    assert projection == "o", projection
    up = layer.value_up_GDC
    if up is not None and value_norm:
        up = up.double() @ value_rotation(layer, shape)[1]
    return tensor.clone() if tensor.ndim == 1 else _cut_output(tensor, layer, shape, up)


def split_projections(
    projection: str, tensor: Tensor, shape: AttentionShape, *, per_head: bool
) -> dict[str, Tensor]:
    """The rows of every projection of a dense linear that several share."""
    if "=" in projection:
        return dict.fromkeys(projection.split("="), tensor)
    projections = tuple(projection.split("+"))
    counts = {one: shape.num_kv_heads if one in "kv" else shape.num_heads for one in projections}
    sizes = {one: (count, shape.head_dim) for one, count in counts.items()}
    rows = projection_rows(projections, sizes, per_head=per_head)
    return {part: tensor[index.to(tensor.device)] for part, index in rows.items()}


def _cut_norm(projection: str, tensor: Tensor, layer: PairPlan, shape: AttentionShape) -> Tensor:
    """Kept entries of a norm's weight or bias, per head, [H, W]."""
    heads = shape.num_heads if projection.startswith("q") else shape.num_kv_heads
    dense_HD = tensor.reshape(-1, shape.head_dim).expand(heads, -1)
    keep_HW = layer.kept_channels(shape).repeat_interleave(heads // shape.num_kv_heads, 0)
    return dense_HD.gather(1, keep_HW.to(tensor.device))


def _centre(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of every head minus their mean, as LayerNorm subtracts from what they project."""
    rows = tensor.unflatten(0, (-1, head_dim)).double()
    return (rows - rows.mean(1, keepdim=True)).flatten(0, 1).to(tensor.dtype)


def _cut_gate(tensor: Tensor, layer: PairPlan, shape: AttentionShape) -> Tensor:
    if layer.channels_GC is None:
        raise PlanError("values behind a gate cannot be a subspace: prune whole channels")
    rows = tensor.unflatten(0, (shape.num_heads, shape.head_dim))
    keep_HC = layer.channels_GC.long().repeat_interleave(shape.group_size, 0).to(tensor.device)
    return _rows(rows, keep_HC).flatten(0, 1)


def _cut_keys(
    tensor: Tensor,
    layer: PairPlan,
    shape: AttentionShape,
    heads: int,
    mixes: tuple[Tensor | None, Tensor | None],
    merge: int = 1,
) -> Tensor:
    """Kept rows of every head of q or k: pairs, then free channels, each as they are or mixed.

    Those of `merge` heads after each other are summed.
    """
    rows_HDE, repeat = tensor.unflatten(0, (heads, shape.head_dim)), heads // shape.num_kv_heads
    if not layer.mixes_keys:
        keep_HW = layer.kept_channels(shape).repeat_interleave(repeat, 0).to(tensor.device)
        return _rows(rows_HDE, keep_HW).flatten(0, 1)
    pair_mix, free_mix = (
        None if mix is None else mix.repeat_interleave(repeat, 0).to(tensor.device).double()
        for mix in mixes
    )
    geometry = shape.geometry
    rows = rows_HDE[:, geometry.canonical_order().to(tensor.device)].double()
    if not layer.num_pairs:
        slots = []
    elif pair_mix is None:
        pairs = layer.frequency_GM.long().repeat_interleave(repeat, 0).to(tensor.device)
        slots = [_rows(rows, pairs), _rows(rows, pairs + geometry.num_pairs)]
    else:
        slots = _mix_pairs(rows, geometry.num_pairs, pair_mix)
    if free_mix is None:
        free = layer.free_GN.long().repeat_interleave(repeat, 0).to(tensor.device)
        slots.append(_rows(rows, free + geometry.rotary_dim) if layer.num_free else rows[:, :0])
    else:
        still = rows[:, geometry.rotary_dim :]
        slots.append(torch.einsum("hnf,hf...->hn...", free_mix, still))
    mixed = _merged(torch.cat(slots, dim=1), merge)
    return mixed.flatten(0, 1).to(tensor.dtype)


def _merged(heads: Tensor, merge: int) -> Tensor:
    """[G, ...] to [N, ...], summed over the heads of every group."""
    return heads if merge == 1 else heads.unflatten(0, (-1, merge)).sum(1)


def _rows(rows_HDE: Tensor, index_HK: Tensor) -> Tensor:
    head = torch.arange(len(rows_HDE), device=rows_HDE.device)[:, None]
    return rows_HDE[head, index_HK]


def _mix_pairs(rows: Tensor, num_pairs: int, mix_HMP2: Tensor) -> list[Tensor]:
    """First and second rows of every slot, complex combinations of the dense pairs."""
    first, second = rows[:, :num_pairs], rows[:, num_pairs : 2 * num_pairs]
    real, imag = mix_HMP2.unbind(-1)
    return [
        torch.einsum("hmp,hp...->hm...", real, first)
        - torch.einsum("hmp,hp...->hm...", imag, second),
        torch.einsum("hmp,hp...->hm...", imag, first)
        + torch.einsum("hmp,hp...->hm...", real, second),
    ]


def _add_rows(kept: Tensor, dense: Tensor, sketch_HSD: Tensor) -> Tensor:
    """Behind the kept rows of every head, the rows that only its norm sees."""
    heads, _, head_dim = sketch_HSD.shape
    sketch = sketch_HSD.to(device=dense.device, dtype=torch.float64)
    rows = torch.einsum("hsd,hd...->hs...", sketch, dense.unflatten(0, (heads, head_dim)).double())
    return torch.cat([kept.unflatten(0, (heads, -1)), rows.to(kept.dtype)], dim=1).flatten(0, 1)


def _cut_value(tensor: Tensor, layer: PairPlan, shape: AttentionShape) -> Tensor:
    rows_GDE = tensor.unflatten(0, (shape.num_kv_heads, shape.head_dim))
    if layer.value_down_GCD is not None:
        down = layer.value_down_GCD.to(device=tensor.device, dtype=torch.float64)
        mixed = torch.einsum("gcd,gd...->gc...", down, rows_GDE.double())
        return _merged(mixed, layer.merge).flatten(0, 1).to(tensor.dtype)
    assert layer.channels_GC is not None
    return _rows(rows_GDE, layer.channels_GC.long().to(tensor.device)).flatten(0, 1)


def value_rotation(layer: PairPlan, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Rotations [G, D, D] whose first C rows span the kept values, and what makes these of them.

    The second, [G, C, C], times the first C rows is `value_down`; 1 for kept channels, which a
    permutation brings to the front. Float64, on the CPU, so that every device gets the same.
    """
    if layer.value_down_GCD is not None:
        turn_GDD, factor_GDC = torch.linalg.qr(layer.value_down_GCD.double().cpu().mT, "complete")
        return turn_GDD.mT, factor_GDC[:, : layer.value_width].mT
    assert layer.channels_GC is not None
    orders = []
    for kept in layer.channels_GC.tolist():
        # In the order in which the output projection has them.
        orders.append([*kept, *sorted(set(range(shape.head_dim)) - set(kept))])
    every_DD = torch.eye(shape.head_dim, dtype=torch.float64)
    return every_DD[torch.tensor(orders)], torch.eye(layer.value_width, dtype=torch.float64)


def _rotate_value(tensor: Tensor, layer: PairPlan, shape: AttentionShape) -> Tensor:
    rows_GDE = tensor.unflatten(0, (shape.num_kv_heads, shape.head_dim))
    turn_GDD = value_rotation(layer, shape)[0].to(tensor.device)
    return torch.einsum("gcd,gd...->gc...", turn_GDD, rows_GDE.double()).flatten(0, 1).to(tensor)


def _cut_output(
    tensor: Tensor, layer: PairPlan, shape: AttentionShape, up: Tensor | None
) -> Tensor:
    columns_EHD = tensor.unflatten(1, (shape.num_heads, shape.head_dim))
    if up is not None:
        up = up.to(device=tensor.device, dtype=torch.float64)
        up_HDC = up.repeat_interleave(shape.group_size, 0)
        mixed = torch.einsum("ehd,hdc->ehc", columns_EHD.double(), up_HDC)
        return mixed.flatten(1, 2).to(tensor.dtype)
    assert layer.channels_GC is not None
    keep_HC = layer.channels_GC.long().repeat_interleave(shape.group_size, 0).to(tensor.device)
    head = torch.arange(shape.num_heads, device=tensor.device)[:, None]
    return columns_EHD[:, head, keep_HC].flatten(1, 2).contiguous()


KIND = Kind(PairEntry, plan=PairPlan)
