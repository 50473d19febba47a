"""Plan and dense weights to smaller weights: one pure function per cut.

A cut takes one dense tensor and returns the kept rows or columns, so the same functions serve a
model in memory and a checkpoint streamed tensor by tensor. Layouts: [out, in] as in nn.Linear.

Shapes: H query heads, G KV heads, R = H/G, D dense head dim, P pairs, M slots, W = 2M + N kept key
channels, C kept value channels, E model dim (absent for a bias).
"""

import torch
from torch import Tensor

from .plan import LayerPlan
from .rope import AttentionShape


def cut(role: str, tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    """The pruned weight or bias of projection `role` (q, k, v or o), contiguous, same dtype.

    The output projection's bias is per model channel and stays as it is.
    """
    if role == "q":
        return _cut_rotated(tensor, layer, shape, layer.query_mix_GMP2, shape.num_heads)
    if role == "k":
        return _cut_rotated(tensor, layer, shape, layer.key_mix_GMP2, shape.num_kv_heads)
    if role == "v":
        return _cut_value(tensor, layer, shape)
    assert role == "o", role
    return tensor.clone() if tensor.ndim == 1 else _cut_output(tensor, layer, shape)


def kept_rows(layer: LayerPlan, shape: AttentionShape) -> Tensor:
    """Dense head channels a plain cut keeps, LongTensor [G, W] in canonical order."""
    pairs, free = layer.frequency_GM.long(), layer.free_GN.long()
    geometry = shape.geometry
    canonical = torch.cat([pairs, pairs + geometry.num_pairs, free + geometry.rotary_dim], dim=1)
    return geometry.canonical_order()[canonical]


def _cut_rotated(
    tensor: Tensor, layer: LayerPlan, shape: AttentionShape, mix: Tensor | None, heads: int
) -> Tensor:
    repeat = heads // shape.num_kv_heads
    rows_HDE = tensor.unflatten(0, (heads, shape.head_dim))
    if mix is not None:
        return _mix_pairs(rows_HDE, layer, shape, mix.repeat_interleave(repeat, 0))
    keep_HW = kept_rows(layer, shape).repeat_interleave(repeat, 0).to(tensor.device)
    head = torch.arange(heads, device=tensor.device)[:, None]
    return rows_HDE[head, keep_HW].flatten(0, 1)


def _mix_pairs(
    rows_HDE: Tensor, layer: LayerPlan, shape: AttentionShape, mix_HMP2: Tensor
) -> Tensor:
    geometry = shape.geometry
    rows = rows_HDE[:, geometry.canonical_order().to(rows_HDE.device)].double()
    first, second = rows[:, : geometry.num_pairs], rows[:, geometry.num_pairs : geometry.rotary_dim]
    real, imag = mix_HMP2.to(rows).unbind(-1)
    slots = [
        torch.einsum("hmp,hp...->hm...", real, first)
        - torch.einsum("hmp,hp...->hm...", imag, second),
        torch.einsum("hmp,hp...->hm...", imag, first)
        + torch.einsum("hmp,hp...->hm...", real, second),
    ]
    if layer.num_free:
        repeat = rows.shape[0] // shape.num_kv_heads
        free = layer.free_GN.long().repeat_interleave(repeat, 0).to(rows.device)
        head = torch.arange(rows.shape[0], device=rows.device)[:, None]
        slots.append(rows[head, free + geometry.rotary_dim])
    return torch.cat(slots, dim=1).flatten(0, 1).to(rows_HDE.dtype)


def _cut_value(tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    rows_GDE = tensor.unflatten(0, (shape.num_kv_heads, shape.head_dim))
    if layer.value_down_GCD is not None:
        down = layer.value_down_GCD.to(device=tensor.device, dtype=torch.float64)
        mixed = torch.einsum("gcd,gd...->gc...", down, rows_GDE.double())
        return mixed.flatten(0, 1).to(tensor.dtype)
    assert layer.channels_GC is not None
    head = torch.arange(shape.num_kv_heads, device=tensor.device)[:, None]
    return rows_GDE[head, layer.channels_GC.long().to(tensor.device)].flatten(0, 1)


def _cut_output(tensor: Tensor, layer: LayerPlan, shape: AttentionShape) -> Tensor:
    columns_EHD = tensor.unflatten(1, (shape.num_heads, shape.head_dim))
    if layer.value_up_GDC is not None:
        up = layer.value_up_GDC.to(device=tensor.device, dtype=torch.float64)
        up_HDC = up.repeat_interleave(shape.group_size, 0)
        mixed = torch.einsum("ehd,hdc->ehc", columns_EHD.double(), up_HDC)
        return mixed.flatten(1, 2).to(tensor.dtype)
    assert layer.channels_GC is not None
    keep_HC = layer.channels_GC.long().repeat_interleave(shape.group_size, 0).to(tensor.device)
    head = torch.arange(shape.num_heads, device=tensor.device)[:, None]
    return columns_EHD[:, head, keep_HC].flatten(1, 2).contiguous()
