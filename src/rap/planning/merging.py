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
values are taken as each query head's attention averages them (calibration.forward), and that slots
and latents are refined.

Both choices of a subspace have a closed form only after something is left out. Slots are chosen as
if pairs of other frequencies had nothing in common, and rotate at one pair's frequency although
they combine several; a latent is chosen for the sums of moments, although each query head averages
values with an attention of its own. What is left out is least squares in the key's side or in the
query's for the other given, so the two are solved in turns (alternating least squares), beginning
with the closed form: no round loses more than the one before. Moments that say nothing of some
directions, of few tokens or of keys that are copies, count these a little (`lifted`): nothing else
bounds what maps do there, and rounding errors would grow without end.

Shapes: G KV heads, g heads of a group, N = G/g groups, R query heads of a KV head, P pairs, F
channels that never rotate, D dense head dim, S = g P, M slots and C value channels of a merged
head, T distances, U = g F and V = g D.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..model.errors import RapError
from ..model.rope import AttentionShape
from .folding import FoldedHead, logit_error, spaced
from .losses import (
    Metric,
    Moments,
    as_complex,
    free_moments,
    key_moments,
    value_moments,
    value_subspace,
)
from .subspace import Factors, hermitian_root, shrunk, weighted_subspace

ROUNDS = 5  # of alternating least squares, of which none loses more than the one before
# Steps of conjugate gradients in a round, whose least squares have no matrix one could factor.
STEPS = 5
# Share of the mean eigenvalue below which a preconditioner does not look.
_FLOOR = 1e-6
# Share of the mean eigenvalue that every direction of a moment has at least, where it is refined.
# Moments are summed in float32, and of few tokens: less is noise, and may be negative.
_LEAST = 1e-4


def refine_slots(
    head: FoldedHead,
    query_SS: Tensor,
    key_SS: Tensor,
    frequencies: Tensor,
    reach: float,
    *,
    turned: bool = False,
) -> FoldedHead:
    """The same slots at the same frequencies, mixed for the least `logit_error` up to `reach`.

    With X = B^H and C_d = R_d C_q R_d^H (C_q itself unless `turned`), the error is the mean over
    distances of half tr(C_d (R_d - X R'_d A) C_k (R_d - X R'_d A)^H). Slots of all pairs stay.
    """
    if len(head.frequency) == len(key_SS):
        return head
    roots = hermitian_root(query_SS), hermitian_root(key_SS)
    query_SS, key_SS = lifted(query_SS), lifted(key_SS)
    one, distances = torch.ones(()).double(), -spaced(reach)[:, None]
    dense_TS = torch.polar(one, distances * frequencies.repeat(len(key_SS) // len(frequencies)))
    slots_TM = torch.polar(one, distances * frequencies[head.frequency])
    shared_MM = (slots_TM[:, :, None] * slots_TM[:, None].conj()).mean(0)

    def read(x_TSM: Tensor) -> Tensor:
        if not turned:
            return query_SS @ x_TSM
        return dense_TS[:, :, None] * (query_SS @ (dense_TS.conj()[:, :, None] * x_TSM))

    def kept(x_SM: Tensor, kept_MM: Tensor) -> Tensor:
        return (read(x_SM * slots_TM[:, None]) @ kept_MM * slots_TM.conj()[:, None]).mean(0)

    key_mix, up_SM = head.key_mix, head.query_mix.mH
    for _ in range(ROUNDS):
        kept_MM = key_mix @ key_SS @ key_mix.mH
        wanted = dense_TS[:, :, None] * (key_SS @ key_mix.mH) * slots_TM.conj()[:, None]
        up_SM = _least_squares(
            partial(kept, kept_MM=kept_MM),
            read(wanted).mean(0),
            up_SM,
            _inverse(query_SS),
            _inverse(kept_MM * shared_MM),
        )
        turned_TSM = up_SM * slots_TM[:, None]
        read_TSM = read(turned_TSM)
        gram_MM = (turned_TSM.mH @ read_TSM).mean(0)
        aim_MS = (read_TSM.mH * dense_TS[:, None]).mean(0)
        key_mix = _solved(gram_MM, aim_MS, key_mix)
    scale_M = _balance(key_mix.norm(dim=1), up_SM.norm(dim=0))
    key_mix, query_mix = key_mix * scale_M[:, None], up_SM.mH / scale_M[:, None]
    slots = (frequencies, head.frequency, key_mix, query_mix)
    error = logit_error(*roots, *slots, reach, turned=turned)
    return replace(head, key_mix=key_mix, query_mix=query_mix, error=error)


def refine_latent(values: Moments, factors: Factors, merge: int) -> Factors:
    """The same number of channels, for the least sum over query heads of what each one loses.

    That is sum_h tr(O_h (1 - U W) C_h (1 - U W)^T) for moments [N, g R, V, V], where O_h is of the
    query head's own KV head alone. Singular values stay those of the closed form.
    """
    down_NCV, up_NVC = factors.down, factors.up
    dim = up_NVC.shape[1] // merge
    if down_NCV.shape[1] == up_NVC.shape[1]:
        return factors
    refined = [_latent(*group, dim) for group in zip(*values, down_NCV, up_NVC, strict=True)]
    down, up = (torch.stack(side) for side in zip(*refined, strict=True))
    return replace(factors, down=down, up=up)


def _latent(
    moment_HVV: Tensor, reader_HVV: Tensor, down_CV: Tensor, up_VC: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Of one group, whose readers are taken as blocks of their own KV heads."""
    merge = len(up_VC) // dim
    moment_HVV = lifted(moment_HVV)
    moment = moment_HVV.unflatten(0, (merge, -1))  # [g, R, V, V]
    blocks = [slice(head * dim, (head + 1) * dim) for head in range(merge)]
    readers = zip(reader_HVV.unflatten(0, (merge, -1)), blocks, strict=True)
    reader = torch.stack([lifted(own[:, block, block]) for own, block in readers])  # [g, R, D, D]
    # What each head reads of a group: its own rows of the moment, weighed by how it reads them.
    wanted = torch.stack([m[:, b] for m, b in zip(moment, blocks, strict=True)])  # [g, R, D, V]
    wanted = reader @ wanted
    across, heads = _inverse(moment_HVV.sum(0)), _inverse(reader.sum(1))
    up = up_VC.unflatten(0, (merge, dim))
    for _ in range(ROUNDS):
        kept = down_CV @ moment @ down_CV.mT  # [g, R, C, C]
        up = _least_squares(
            partial(_to_heads, reader, kept),
            (wanted @ down_CV.mT).sum(1),
            up,
            heads,
            _inverse(kept.sum(1)),
        )
        read = up.mT[:, None] @ reader @ up[:, None]  # [g, R, C, C]
        down_CV = _least_squares(
            partial(_from_heads, read, moment),
            (up.mT[:, None] @ wanted).sum((0, 1)),
            down_CV,
            _inverse(read.sum((0, 1))),
            across,
        )
    up_VC = up.flatten(0, 1)
    scale_C = _balance(down_CV.norm(dim=1), up_VC.norm(dim=0))
    return down_CV * scale_C[:, None], up_VC / scale_C


def _to_heads(reader: Tensor, kept: Tensor, up_gDC: Tensor) -> Tensor:
    return (reader @ up_gDC[:, None] @ kept).sum(1)


def _from_heads(read: Tensor, moment: Tensor, down_CV: Tensor) -> Tensor:
    return (read @ (down_CV @ moment)).sum((0, 1))


def _least_squares(
    normal: Callable[[Tensor], Tensor], aim: Tensor, x: Tensor, left: Tensor, right: Tensor
) -> Tensor:
    """Nearer to normal(x) = aim by conjugate gradients, preconditioned on both sides."""
    rest = aim - normal(x)
    step = near = left @ rest @ right
    size = (rest.conj() * near).sum().real
    for _ in range(STEPS):
        if size <= 0:
            break
        moved = normal(step)
        curvature = (step.conj() * moved).sum().real
        if curvature <= 0:
            break
        length = size / curvature
        x, rest = x + length * step, rest - length * moved
        near = left @ rest @ right
        before, size = size, (rest.conj() * near).sum().real
        step = near + size / before * step
    return x


def lifted(moment: Tensor) -> Tensor:
    """Moments [..., n, n] whose least eigenvalue is a share of the mean one: most are so already.

    >>> lifted(torch.ones(2, 2).double()).round(decimals=4).tolist()
    [[1.0001, 1.0], [1.0, 1.0001]]
    """
    moment = (moment + moment.mH) / 2
    least = torch.linalg.eigvalsh(moment)[..., 0]
    mean = moment.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    lift = (_LEAST * mean - least).clamp_min(0)[..., None, None]
    return moment + lift * torch.eye(moment.shape[-1]).to(moment)


def _solved(gram: Tensor, aim: Tensor, x: Tensor) -> Tensor:
    """gram^-1 aim; where gram says nothing, x."""
    damped = 1e-9 * gram.diagonal().real.mean()
    if damped <= 0:
        return x
    return torch.linalg.solve(gram + damped * torch.eye(len(gram)), aim + damped * x)


def _inverse(moment: Tensor) -> Tensor:
    """The inverse of moments [..., n, n], of directions that carry something; of none, 1."""
    floor = _FLOOR * moment.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    floor = floor.where(floor > 0, torch.ones_like(floor))
    return torch.linalg.inv(moment + floor * torch.eye(moment.shape[-1]).to(moment))


def _balance(inner: Tensor, outer: Tensor) -> Tensor:
    """What inner is multiplied by, and outer divided, to be of one size."""
    tiny = torch.finfo(torch.float64).tiny
    return (outer.clamp_min(tiny) / inner.clamp_min(tiny)).sqrt()


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
    moment = as_complex(statistics["joint_key_moment"])
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
    """Slots of N groups of `merge` heads as fields of a plan: mixes [G, M, P, 2] per head."""
    mixes = {
        "key_mix_GMP2": torch.stack([group.key_mix for group in groups]),
        "query_mix_GMP2": torch.stack([group.query_mix for group in groups]),
    }
    return {
        "frequency_GM": torch.stack([group.frequency for group in groups]).to(torch.int32),
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
        "free_GN": torch.arange(width, dtype=torch.int32).expand(groups, -1).contiguous(),
        "key_free_mix_GNF": _per_head(down, merge),
        "query_free_mix_GNF": _per_head(up, merge),
    }


def merged_latent(
    moments: Moments, width: int, merge: int, shrinkage: float = 0.0
) -> dict[str, Tensor]:
    """The value latent of `width` channels of every group, as fields of a plan.

    down [G, C, D] is summed over the heads of a group, up [G, D, C] gives each of them its values.
    `shrinkage` as in `losses.value_subspace`. Of merged heads the subspace is refined for each of
    their query heads (`refine_slots`).
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
