"""The denominators of QK-norm: what kept channels need to replace the dense head's energy.

Shapes: B batch, T tokens, H heads of q or k, G KV heads, D dense head dim, W kept key channels,
S norm rows of a head.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..calibration.moments import centred
from ..model.kinds.pairs import PairPlan
from ..model.rope import AttentionShape
from ..model.specs import QKNorm

NORM_ROWS = 8


def row_sizes(w_k: Tensor, shape: AttentionShape, norm: QKNorm, weight_GD: Tensor) -> Tensor:
    """Root mean squares [G, D] of normalized keys whose inputs are white, from W_k alone."""
    rows_EGD = w_k.detach().float().T.unflatten(1, (shape.num_kv_heads, shape.head_dim))
    rows_EGD = centred(rows_EGD, norm)
    sizes_GD = rows_EGD.square().sum(0).sqrt()
    over = (-2, -1) if norm.over == "all" else (-1,)
    return weight_GD.abs() * sizes_GD / sizes_GD.square().mean(over, keepdim=True).sqrt()


def with_denominators(
    layer: PairPlan,
    shape: AttentionShape,
    statistics: Mapping[str, Tensor] | None,
    num_rows: int = 0,
) -> PairPlan:
    """The plan of a normalized layer with energy ratios and, for mode `rows`, `num_rows` sketches.

    The rows of a head are the leading eigenvectors of the dropped channels' second moment: no other
    S rows carry as much of the dropped energy. The ratio is all energy over that of kept channels
    and rows. A layer without the statistics is left as it is.
    """
    if statistics is None or "raw_energy_k" not in statistics or layer.mixes_keys:
        return layer
    kept_GW = layer.kept_channels(shape)
    num_rows = min(num_rows, shape.head_dim - layer.key_width)
    fields: dict[str, Any] = {}
    for side, projection in (("query", "q"), ("key", "k")):
        all_HD = statistics[f"raw_energy_{projection}"][
            :, shape.geometry.canonical_order().argsort()
        ]
        kept_HW = kept_GW.repeat_interleave(len(all_HD) // len(kept_GW), 0)
        seen_H = all_HD.gather(1, kept_HW).sum(1)
        suffix = "H" if projection == "q" else "G"
        if num_rows:
            sketch_HSD, energy_H = _sketch(
                statistics[f"norm_moment_{projection}"], kept_HW, num_rows
            )
            fields[f"{side}_sketch_{suffix}SD"] = sketch_HSD
            seen_H = seen_H + energy_H
        # A head that no text moves has no energy, kept or not.
        ratio_H = (all_HD.sum(1) / seen_H).where(seen_H > 0, torch.ones(()))
        fields[f"{side}_ratio_{suffix}"] = ratio_H
    return dataclasses.replace(layer, **fields)


def _sketch(moment_HDD: Tensor, kept_HW: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Unit rows [H, S, D] over dropped channels, and the energy [H] that each head's rows carry."""
    dropped_HD = torch.ones(moment_HDD.shape[:2], dtype=torch.float64).scatter(1, kept_HW, 0.0)
    rest_HDD = moment_HDD.double() * dropped_HD[:, :, None] * dropped_HD[:, None, :]
    values, vectors = torch.linalg.eigh(rest_HDD)
    rows_HSD = vectors[:, :, -num_rows:].mT
    # Rounding leaves traces on kept channels, whose energy is counted already.
    rows_HSD = rows_HSD * dropped_HD[:, None]
    return rows_HSD.float().contiguous(), values[:, -num_rows:].sum(1).float()
