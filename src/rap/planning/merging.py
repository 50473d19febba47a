"""Merging KV heads: g of them become one cached head, with one list of slots and one value latent.

At one RoPE frequency the pairs of all heads are multiplied by the same unit number, so that a
complex-linear map across heads commutes with the rotation exactly, as folding across near-equal
frequencies does nearly. A slot combines pairs of all heads of its group,

    c_s = sum over heads j and pairs p of key_mix[j, s, p] z_{j,p},

and a query head of KV head j reads it with sum over p of query_mix[j, s, p] q_p. The best slots are
those of folding.py for the g heads' pairs side by side; values are the same in real numbers, by the
subspace of all heads' channels. One head is a group of one: then everything here is what it is
without merging, to the bit.

A moment of a group says what its heads have in common. What reads it is of every head by itself
(block-diagonal): gradients across heads are worth nothing (docs/log.md). What is worth much is that
values are taken as each query head's attention averages them (calibration.averages), and that slots
and latents are refined.

Shapes: G KV heads, g heads of a group, N = G/g groups, R query heads of a KV head, P pairs, F
channels that never rotate, D dense head dim, S = g P, M slots and C value channels of a merged
head, U = g F and V = g D.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model.errors import RapError
from ..model.rope import AttentionShape
from .folding import FoldedHead
from .losses import Metric, Moments, free_moments, key_moments, value_moments, value_subspace
from .refining import refine_latent
from .subspace import shrunk, weighted_subspace

# Channels of a cached head that attention kernels take at most.
WIDEST = 256


def check_merge(merge: int, num_kv_heads: int) -> None:
    """Raise RapError unless groups of `merge` heads divide a layer's KV heads."""
    if merge < 1 or num_kv_heads % merge:
        sizes = [size for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
        raise RapError(
            f"{num_kv_heads} KV heads cannot be merged by {merge}: use one of "
            f"{', '.join(map(str, sizes))}"
        )


def merged_steps(head_dim: int, merge: int) -> int:
    """Steps of two channels that a merged head may keep: all of its heads', up to WIDEST channels.

    Estimated losses are of merge * head_dim / 2 steps: what `retain` is a share of.
    """
    return min(merge * head_dim, max(WIDEST, head_dim)) // 2


def merged_keys(
    statistics: Mapping[str, Tensor],
    shape: AttentionShape,
    merge: int,
    metric: Metric,
) -> Moments:
    """As `losses.key_moments`, of groups of `merge` heads: complex [N, S, S]."""
    if merge == 1:
        return key_moments(statistics, metric)
    moment = _complex(statistics["joint_key_moment"])
    reader = _side_by_side(key_moments(statistics, metric)[1], merge)
    return _groups(moment, shape.num_kv_heads // merge), reader


def merged_free(
    statistics: Mapping[str, Tensor],
    shape: AttentionShape,
    merge: int,
    metric: Metric,
) -> Moments:
    """As `losses.free_moments`, of groups of `merge` heads: [N, U, U]."""
    if merge == 1:
        return free_moments(statistics, metric)
    moment = statistics["joint_free_moment"].double()
    reader = _side_by_side(free_moments(statistics, metric)[1], merge)
    return _groups(moment, shape.num_kv_heads // merge), reader


def merged_values(
    statistics: Mapping[str, Tensor],
    w_o: Tensor,
    shape: AttentionShape,
    merge: int,
    metric: Metric,
) -> Moments:
    """As `losses.value_moments`, of groups of `merge` heads: [N, g R, V, V].

    By query head, of all values of its group as its own attention averages them, and of what it
    adds to by those of its own KV head. Where `averages` has no such groups the values count as
    they are before attention.
    """
    if merge == 1:
        return value_moments(statistics, w_o, shape, metric)
    num_groups = shape.num_kv_heads // merge
    raw_NVV = _groups(statistics["joint_value_moment"].double(), num_groups)
    averaged = _averaged(statistics.get("averaged_moment"), shape, merge)
    if averaged is None:
        averaged = raw_NVV[:, None].expand(-1, merge * shape.group_size, -1, -1)
    own_GRDD = value_moments(statistics, w_o, shape, metric)[1]
    dim = shape.head_dim
    reader = own_GRDD.new_zeros(*own_GRDD.shape[:2], merge * dim, merge * dim)
    for head, own in enumerate(own_GRDD):
        block = slice(head % merge * dim, (head % merge + 1) * dim)
        reader[head, :, block, block] = own
    return averaged, reader.unflatten(0, (num_groups, merge)).flatten(1, 2)


def merged_slots(groups: Sequence[FoldedHead], merge: int) -> dict[str, Tensor]:
    """Slots of N groups as fields of a plan: frequency [N, M] and mixes [G, M, P, 2] per head."""
    mixes = {
        "key_mix_GMP2": torch.stack([group.key_mix for group in groups]),
        "query_mix_GMP2": torch.stack([group.query_mix for group in groups]),
    }
    return {
        "frequency_NM": torch.stack([group.frequency for group in groups]).to(torch.int32),
        **{name: torch.view_as_real(_per_head(mix, merge)) for name, mix in mixes.items()},
    }


def merged_channels(moments: Moments, width: int, merge: int) -> dict[str, Tensor]:
    """The best `width` combinations of a group's channels that never rotate, as fields of a plan.

    Nothing for no channels, nor for all of those of a group of one, which stay as they are. All of
    those of merged heads are plain too, head by head, so that full width is exact.
    """
    groups, dim = moments[0].shape[:2]
    if width == 0 or (merge == 1 and width == dim):
        return {}
    if width == dim:
        unit = torch.eye(dim, dtype=torch.float64).expand(groups, -1, -1)
        down, up = unit, unit
    else:
        factors = weighted_subspace(*moments, width)
        down, up = factors.down, factors.up.mT
    return {
        "free_NN": torch.arange(width, dtype=torch.int32).expand(groups, -1).contiguous(),
        "key_free_mix_GNF": _per_head(down, merge),
        "query_free_mix_GNF": _per_head(up, merge),
    }


def merged_latent(
    moments: Moments, width: int, merge: int, shrinkage: float = 0.0
) -> dict[str, Tensor]:
    """The value latent of `width` channels of every group, as fields of a plan.

    down [G, C, D] is summed over the heads of a group, up [G, D, C] gives each of them its values.
    `shrinkage` as in `losses.value_subspace`. Of merged heads the subspace is refined for each of
    their query heads (refining.py).
    """
    factors = value_subspace(moments, width, shrinkage)
    if merge > 1 and moments[0].shape[1] > 1:
        each = (shrunk(part, shrinkage) for part in moments)
        factors = refine_latent((next(each), next(each)), factors, merge)
    return {
        "value_down_GCD": _per_head(factors.down, merge),
        "value_up_GDC": _per_head(factors.up.mT, merge).mT.contiguous(),
    }


def _per_head(mix_NMS: Tensor, merge: int) -> Tensor:
    """Combinations [N, M, g X] of all heads' channels to those of every head [G, M, X]."""
    return mix_NMS.unflatten(-1, (merge, -1)).transpose(1, 2).flatten(0, 1).contiguous()


def _groups(joint: Tensor, num_groups: int) -> Tensor:
    """The blocks [N, g X, g X] of groups on the diagonal of all heads' moment [G X, G X]."""
    size = len(joint) // num_groups
    blocks = joint.view(num_groups, size, num_groups, size)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()


def _averaged(moment_HVV: Tensor | None, shape: AttentionShape, merge: int) -> Tensor | None:
    """Blocks [N, g R, V, V] of groups of those that `averages` collected, if they are of these."""
    width = merge * shape.head_dim
    if moment_HVV is None or len(moment_HVV) != shape.num_heads or moment_HVV.shape[-1] % width:
        return None
    group, per_group = moment_HVV.shape[-1] // shape.head_dim, merge * shape.group_size
    blocks = []
    for begin in range(0, shape.num_heads, per_group):
        at = begin // shape.group_size % group * shape.head_dim
        rows = slice(at, at + width)
        blocks.append(moment_HVV[begin : begin + per_group, rows, rows].double())
    return torch.stack(blocks)


def _side_by_side(heads_GXX: Tensor, merge: int) -> Tensor:
    """[G, X, X] to [N, g X, g X] that know nothing of each other's heads."""
    return torch.stack([torch.block_diag(*heads) for heads in heads_GXX.split(merge)])


def _complex(moment: Tensor) -> Tensor:
    return torch.view_as_complex(moment.double().contiguous())
