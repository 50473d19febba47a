"""The optimal subspace: the best r directions of a head's values, or of a group of slow pairs.

Both are one weighted low-rank problem: minimise ||B^1/2 (I - P) C^1/2||_F over projections P of
rank r, whose optimum comes from the SVD of B^1/2 C^1/2 (Eckart-Young). P = up @ down is folded into
the weights on either side, so nothing is reconstructed at run time.

Shapes: H query heads, D head dim, E model dim, r rank.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.rope import AttentionShape

# Directions with less than this share of the largest second moment carry rounding noise only.
EIGENVALUE_FLOOR = 1e-12


@dataclass(frozen=True, eq=False)
class Factors:
    """down [..., r, n] and up [..., n, r] with P = up @ down, and all n singular values."""

    down: Tensor
    up: Tensor
    singular: Tensor


def weighted_subspace(inner: Tensor, outer: Tensor, rank: int) -> Factors:
    """The rank-r projection P minimizing tr(outer (I - P) inner (I - P)^H), batched, float64.

    `inner` is the second moment of what is projected, `outer` the Gram matrix of what reads it,
    both [..., n, n], Hermitian, real or complex. The minimum is the sum of the squared singular
    values beyond the first r. At r = n, P is the identity. The factors are balanced: a direction's
    row of `down` and column of `up` have the same norm (1 if P is orthogonal), whatever the units
    of the moments, so that weights and caches keep the range of the dense ones.
    """
    inner_root, outer_root = hermitian_root(inner), hermitian_root(outer)
    u, singular, v_h = torch.linalg.svd(outer_root @ inner_root)
    scale = singular[..., :rank].clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
    # S^-1/2 U^H B^1/2 = S^1/2 V^H C^-1/2: the same factor without inverting C.
    down = scale[..., :, None] * u[..., :, :rank].mH @ outer_root
    up = inner_root @ v_h[..., :rank, :].mH * scale[..., None, :]
    norms = down.norm(dim=-1), up.norm(dim=-2)
    tiny = torch.finfo(torch.float64).tiny
    balance = (norms[1].clamp_min(tiny) / norms[0].clamp_min(tiny)).sqrt()
    return Factors(down * balance[..., :, None], up / balance[..., None, :], singular)


def hermitian_root(moment: Tensor) -> Tensor:
    """The principal square root of a Hermitian second moment, with floored eigenvalues."""
    exact = torch.complex128 if moment.is_complex() else torch.float64
    values, vectors = torch.linalg.eigh(moment.to(exact))
    return vectors * floored(values).sqrt()[..., None, :] @ vectors.mH


def shrunk(moment: Tensor, shrinkage: float) -> Tensor:
    """Second moments [..., n, n] and `shrinkage` times their mean eigenvalue on the diagonal."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return moment + shrinkage * mean * torch.eye(moment.shape[-1]).to(moment)


def output_gram(w_o: Tensor, shape: AttentionShape) -> Tensor:
    """W_o^T W_o of every query head, float64 [H, D, D]: what reads the values."""
    columns_EHD = w_o.detach().double().unflatten(1, (shape.num_heads, shape.head_dim))
    return torch.einsum("ehd,ehf->hdf", columns_EHD, columns_EHD)


def floored(eigenvalues: Tensor) -> Tensor:
    """Ascending eigenvalues [..., n] of second moments, float64: positive, none below the floor."""
    top = eigenvalues[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    return torch.maximum(eigenvalues, top * EIGENVALUE_FLOOR)


class WeightFactors(NamedTuple):
    """up [out, r] and down [r, in], whose product replaces a weight [out, in]."""

    up: Tensor
    down: Tensor


def whitened_factors(weight: Tensor, moment_EE: Tensor | None, rank: int) -> WeightFactors:
    """The rank-r product minimizing E ||(W - up down) x||^2, float64, for E[x x^T] = `moment`.

    The SVD of W C^1/2, as in SVD-LLM and PaLU: with its left vectors U the optimum is U U^T W, so
    nothing is inverted, and U are the eigenvectors of W C W^T. Factors are balanced. Without a
    moment it is the plain SVD of W.
    """
    weight = weight.detach().double().cpu()
    moved = weight if moment_EE is None else weight @ moment_EE.double()
    squares, vectors = torch.linalg.eigh(moved @ weight.mT)
    scale, vectors = floored(squares).pow(0.25).flip(-1)[:rank], vectors.flip(-1)[:, :rank]
    return WeightFactors(vectors * scale, (vectors / scale).mT @ weight)
