"""Plan and dense weights to smaller weights: one pure function per cut.

A cut takes one dense tensor and returns the kept rows or columns, so the same functions serve a
model in memory and a checkpoint streamed tensor by tensor. Layouts: [out, in] as in nn.Linear.

Shapes: H query heads, G KV heads, R = H/G, D dense head dim, P pairs, M slots, W = 2M + N kept key
channels, C kept value channels, E model dim (absent for a bias).
"""

from typing import Any

import torch
from torch import Tensor

from ..model.errors import PlanError
from ..model.roles import role_rows
from ..model.rope import AttentionShape
from ..model.specs import QKNorm
from ..planning.plan import LayerPlan


def cut(
    role: str,
    tensor: Tensor,
    layer: LayerPlan,
    shape: AttentionShape,
    *,
    norm: QKNorm | None = None,
    norm_mode: str = "constant",
    per_head: bool = False,
    value_norm: bool = False,
) -> Tensor:
    """The pruned weight or bias of a projection or norm, contiguous, same dtype.

    `role` is q, k, v, o or gate, several of them joined by "+" for a linear they share (head by
    head if `per_head`; the pruned one lists one role after another) or by "=" for one whose rows
    are all of them, or a norm's tensor, such as "q_norm.weight". With a `value_norm` all rows of v
    stay, rotated so that the kept ones come first. The output projection's bias is per model
    channel and stays as it is.
    Raises PlanError for a mixed plan of a layer whose norm or gate works on single channels.
    """
    exact = norm is not None and norm_mode == "exact"
    if norm is not None and layer.mixes_keys:
        raise PlanError("keys of a layer with QK-norm cannot be folded: prune whole pairs")
    if "+" in role or "=" in role:
        parts = split_roles(role, tensor, shape, per_head=per_head)
        how: dict[str, Any] = {"norm": norm, "norm_mode": norm_mode, "value_norm": value_norm}
        return torch.cat([cut(part, rows, layer, shape, **how) for part, rows in parts.items()])
    if "norm" in role:
        return tensor.clone() if exact else _cut_norm(role, tensor, layer, shape)
    if role in "qk":
        if exact:
            return tensor.clone()
        if norm is not None and norm.centred:
            tensor = _centre(tensor, shape.head_dim)
        if role == "q":
            heads, sketch = shape.num_heads, layer.query_sketch_HSD
            mixes = layer.query_mix_GMP2, layer.query_free_mix_GNF
        else:
            heads, sketch = shape.num_kv_heads, layer.key_sketch_GSD
            mixes = layer.key_mix_GMP2, layer.key_free_mix_GNF
        kept = _cut_keys(tensor, layer, shape, heads, mixes)
        return kept if sketch is None or norm_mode != "rows" else _add_rows(kept, tensor, sketch)
    if role == "v":
        return (_rotate_value if value_norm else _cut_value)(tensor, layer, shape)
    if role == "gate":
        return _cut_gate(tensor, layer, shape)
    assert role == "o", role
    up = layer.value_up_GDC
    if up is not None and value_norm:
        up = up.double() @ value_rotation(layer, shape)[1]
    return tensor.clone() if tensor.ndim == 1 else _cut_output(tensor, layer, shape, up)


def split_roles(
    role: str, tensor: Tensor, shape: AttentionShape, *, per_head: bool
) -> dict[str, Tensor]:
    """The rows of every role of a dense linear that several share."""
    if "=" in role:
        return dict.fromkeys(role.split("="), tensor)
    roles = tuple(role.split("+"))
    widths = dict.fromkeys(roles, shape.head_dim)
    rows = role_rows(roles, widths, shape, per_head=per_head)
    return {part: tensor[index.to(tensor.device)] for part, index in rows.items()}


def _cut_norm(role: str, tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    """Kept entries of a norm's weight or bias, per head, [H, W]."""
    heads = shape.num_heads if role.startswith("q") else shape.num_kv_heads
    dense_HD = tensor.reshape(-1, shape.head_dim).expand(heads, -1)
    keep_HW = layer.kept_channels(shape).repeat_interleave(heads // shape.num_kv_heads, 0)
    return dense_HD.gather(1, keep_HW.to(tensor.device))


def _centre(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of every head minus their mean, as LayerNorm subtracts from what they project."""
    rows = tensor.unflatten(0, (-1, head_dim)).double()
    return (rows - rows.mean(1, keepdim=True)).flatten(0, 1).to(tensor.dtype)


def _cut_gate(tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    if layer.channels_GC is None:
        raise PlanError("values behind a gate cannot be a subspace: prune whole channels")
    rows = tensor.unflatten(0, (shape.num_heads, shape.head_dim))
    keep_HC = layer.channels_GC.long().repeat_interleave(shape.group_size, 0).to(tensor.device)
    head = torch.arange(shape.num_heads, device=tensor.device)[:, None]
    return rows[head, keep_HC].flatten(0, 1)


def _cut_keys(
    tensor: Tensor,
    layer: LayerPlan,
    shape: AttentionShape,
    heads: int,
    mixes: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Kept rows of every head of q or k: pairs, then free channels, each as they are or mixed."""
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
    pairs = layer.frequency_GM.long().repeat_interleave(repeat, 0).to(tensor.device)
    free = layer.free_GN.long().repeat_interleave(repeat, 0).to(tensor.device)
    if pair_mix is None:
        slots = [_rows(rows, pairs), _rows(rows, pairs + geometry.num_pairs)]
    else:
        slots = _mix_pairs(rows, geometry.num_pairs, pair_mix)
    if free_mix is None:
        slots.append(_rows(rows, free + geometry.rotary_dim))
    else:
        still = rows[:, geometry.rotary_dim :]
        slots.append(torch.einsum("hnf,hf...->hn...", free_mix, still))
    return torch.cat(slots, dim=1).flatten(0, 1).to(tensor.dtype)


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


def _cut_value(tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    rows_GDE = tensor.unflatten(0, (shape.num_kv_heads, shape.head_dim))
    if layer.value_down_GCD is not None:
        down = layer.value_down_GCD.to(device=tensor.device, dtype=torch.float64)
        mixed = torch.einsum("gcd,gd...->gc...", down, rows_GDE.double())
        return mixed.flatten(0, 1).to(tensor.dtype)
    assert layer.channels_GC is not None
    head = torch.arange(shape.num_kv_heads, device=tensor.device)[:, None]
    return rows_GDE[head, layer.channels_GC.long().to(tensor.device)].flatten(0, 1)


def value_rotation(layer: LayerPlan, shape: AttentionShape) -> tuple[Tensor, Tensor]:
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


def _rotate_value(tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    rows_GDE = tensor.unflatten(0, (shape.num_kv_heads, shape.head_dim))
    turn_GDD = value_rotation(layer, shape)[0].to(tensor.device)
    return torch.einsum("gcd,gd...->gc...", turn_GDD, rows_GDE.double()).flatten(0, 1).to(tensor)


def _cut_output(
    tensor: Tensor, layer: LayerPlan, shape: AttentionShape, up: Tensor | None
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
