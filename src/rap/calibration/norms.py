"""What the norm of queries and keys divides by: its statistics.

Shapes: B batch, T tokens, H heads of q or k, G KV heads, D dense head dim.
"""

import torch
from torch import Tensor

from ..model.specs import QKNorm
from .observers import FLOAT, ForwardStatistic, ObservedLayer


def centred(states_BTHD: Tensor, norm: QKNorm | None) -> Tensor:
    """What the norm divides: states minus the mean of their head, where it is a LayerNorm."""
    if norm is None or not norm.centred:
        return states_BTHD
    return states_BTHD - states_BTHD.mean(-1, keepdim=True)


def shares(states_BTHD: Tensor, norm: QKNorm | None) -> Tensor:
    """Squares of what attention sees, up to the norm's weight: over the mean the norm divides by.

    Plain squares without a norm.
    """
    squares = centred(states_BTHD, norm).square()
    if norm is None:
        return squares
    over = (-2, -1) if norm.over == "all" else (-1,)
    mean = squares.mean(over, keepdim=True)
    return squares / mean.clamp_min(torch.finfo(squares.dtype).tiny)


class NormMoment(ForwardStatistic):
    """Second moments [H, D, D] of what every head's norm divides, for queries and for keys."""

    need = "norms"
    names = ("norm_moment_q", "norm_moment_k")
    projections = ("q", "k")

    def __init__(self, layer: ObservedLayer):
        shape = layer.shape
        self.norm, self.head_dim = layer.norm, shape.head_dim
        heads = {"q": shape.num_heads, "k": shape.num_kv_heads}
        self.sums = {r: layer.zeros(r, n, shape.head_dim, shape.head_dim) for r, n in heads.items()}

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        heads = layer.shape.num_heads + layer.shape.num_kv_heads
        return FLOAT * heads * layer.shape.head_dim**2

    def update(self, role: str, inputs: Tensor, outputs: Tensor) -> None:
        states_BTHD = centred(outputs.float().unflatten(-1, (-1, self.head_dim)), self.norm)
        states_HND = states_BTHD.flatten(0, 1).transpose(0, 1)
        self.sums[role] += states_HND.mT @ states_HND

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {f"norm_moment_{role}": total / num_tokens for role, total in self.sums.items()}
