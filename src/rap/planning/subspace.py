"""The optimal subspace: the best r directions of a head's values, or of a group of slow pairs.

Both are one weighted low-rank problem: minimise ||B^1/2 (I - P) C^1/2||_F over projections P of
rank r, whose optimum comes from the SVD of B^1/2 C^1/2 (Eckart-Young). P = up @ down is folded into
the weights on either side, so nothing is reconstructed at run time.

Shapes: H query heads, D head dim, E model dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.kinds.latent import floored
from ..model.rope import AttentionShape


@dataclass(frozen=True, eq=False)
class Factors:
    """down [..., r, n] and up [..., n, r] with P = up @ down, and all n singular values."""

    down: Tensor
    up: Tensor
    singular: Tensor


def weighted_subspace(inner: Tensor, outer: Tensor, rank: int) -> Factors:
    """The rank-r projection P minimising tr(outer (I - P) inner (I - P)^H), batched, float64.

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


def output_gram(w_o: Tensor, shape: AttentionShape) -> Tensor:
    """W_o^T W_o of every query head, float64 [H, D, D]: what reads the values."""
    columns_EHD = w_o.detach().double().unflatten(1, (shape.num_heads, shape.head_dim))
    return torch.einsum("ehd,ehf->hdf", columns_EHD, columns_EHD)
