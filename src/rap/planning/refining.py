"""Refining what was chosen: slots for the distances they are read at, a latent for each reader.

Both choices of a subspace have a closed form only after something is left out. Slots are chosen as
if pairs of other frequencies had nothing in common, and rotate at one pair's frequency although
they combine several; a latent is chosen for the sums of moments, although each query head averages
values with an attention of its own. What is left out is least squares in the key's side or in the
query's for the other given, so the two are solved in turns (alternating least squares), beginning
with the closed form: no round loses more than the one before.

Shapes: P pairs, S = g P of g heads side by side, M slots, T distances, N groups, R query heads of a
KV head, D dense head dim, V = g D, C channels of a latent.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .folding import FoldedHead, logit_error, spaced
from .losses import Moments
from .subspace import Factors, hermitian_root

ROUNDS = 5
# Steps of conjugate gradients in a round, whose least squares have no matrix one could factor.
STEPS = 5
# Share of the mean eigenvalue below which a preconditioner does not look.
_FLOOR = 1e-6


def refine_slots(
    head: FoldedHead,
    query_SS: Tensor,
    key_SS: Tensor,
    frequencies: Tensor,
    reach: float,
    *,
    turned: bool = False,
    rounds: int = ROUNDS,
) -> FoldedHead:
    """The same slots at the same frequencies, mixed for the least `logit_error` up to `reach`.

    With X = B^H and C_d = R_d C_q R_d^H (C_q itself unless `turned`), the error is the mean over
    distances of half tr(C_d (R_d - X R'_d A) C_k (R_d - X R'_d A)^H). Slots of all pairs stay.
    """
    if len(head.frequency) == len(key_SS):
        return head
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
    for _ in range(rounds):
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
    roots = hermitian_root(query_SS), hermitian_root(key_SS)
    slots = (frequencies, head.frequency, key_mix, query_mix)
    error = logit_error(*roots, *slots, reach, turned=turned)
    return replace(head, key_mix=key_mix, query_mix=query_mix, error=error)


def refine_latent(values: Moments, factors: Factors, merge: int, rounds: int = ROUNDS) -> Factors:
    """The same number of channels, for the least sum over query heads of what each one loses.

    That is sum_h tr(O_h (1 - U W) C_h (1 - U W)^T) for moments [N, g R, V, V], where O_h is of the
    query head's own KV head alone. Singular values stay those of the closed form.
    """
    down_NCV, up_NVC = factors.down, factors.up
    dim = up_NVC.shape[1] // merge
    if down_NCV.shape[1] == up_NVC.shape[1]:
        return factors
    refined = [
        _latent(*group, dim, rounds) for group in zip(*values, down_NCV, up_NVC, strict=True)
    ]
    down, up = (torch.stack(side) for side in zip(*refined, strict=True))
    return replace(factors, down=down, up=up)


def _latent(
    moment_HVV: Tensor, reader_HVV: Tensor, down_CV: Tensor, up_VC: Tensor, dim: int, rounds: int
) -> tuple[Tensor, Tensor]:
    """Of one group, whose readers are taken as blocks of their own KV heads."""
    merge = len(up_VC) // dim
    moment = moment_HVV.unflatten(0, (merge, -1))  # [g, R, V, V]
    blocks = [slice(head * dim, (head + 1) * dim) for head in range(merge)]
    readers = zip(reader_HVV.unflatten(0, (merge, -1)), blocks, strict=True)
    reader = torch.stack([own[:, block, block] for own, block in readers])  # [g, R, D, D]
    # What each head reads of a group: its own rows of the moment, weighed by how it reads them.
    wanted = torch.stack([m[:, b] for m, b in zip(moment, blocks, strict=True)])  # [g, R, D, V]
    wanted = reader @ wanted
    across, heads = _inverse(moment_HVV.sum(0)), _inverse(reader.sum(1))
    up = up_VC.unflatten(0, (merge, dim))
    for _ in range(rounds):
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
        length = size / (step.conj() * moved).sum().real
        x, rest = x + length * step, rest - length * moved
        near = left @ rest @ right
        before, size = size, (rest.conj() * near).sum().real
        step = near + size / before * step
    return x


def _solved(gram: Tensor, aim: Tensor, x: Tensor) -> Tensor:
    """gram^-1 aim; where gram says nothing, x."""
    damped = 1e-9 * gram.diagonal().real.mean()
    return torch.linalg.solve(gram + damped * torch.eye(len(gram)), aim + damped * x)


def _inverse(moment: Tensor) -> Tensor:
    """The inverse of moments [..., n, n], of directions that carry something."""
    floor = _FLOOR * moment.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    return torch.linalg.inv(moment + floor * torch.eye(moment.shape[-1]).to(moment))


def _balance(inner: Tensor, outer: Tensor) -> Tensor:
    """What inner is multiplied by, and outer divided, to be of one size."""
    tiny = torch.finfo(torch.float64).tiny
    return (outer.clamp_min(tiny) / inner.clamp_min(tiny)).sqrt()
