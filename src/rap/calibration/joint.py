"""Second moments across the KV heads of a layer: what merging heads into one cached head needs.

They are collected from activations, not computed as W M W^T from `InputMoment`: that holds [E, E]
where this holds [G P, G P] and [G D, G D], smaller where queries share heads, and is exact with
biases and with values that are normalised.
The blocks of a group of g heads on the diagonal are the moments of that group, for any g.

Shapes: B batch, T tokens, N tokens of a batch, G KV heads, D head dim, P pairs, F channels that
never rotate.
"""

import torch
from torch import Tensor

from ..model.layers import split_heads
from .observers import (
    COMPLEX,
    FLOAT,
    ForwardStatistic,
    ObservedLayer,
    complex_pairs,
    free_channels,
)


class JointMoment(ForwardStatistic):
    """Second moments of all KV heads together: keys before they rotate, and values as projected.

    Keys as complex pairs E[x x^H] and, apart, their channels that never rotate, as in PairMoment.
    """

    need = "joint"
    names = ("joint_key_moment", "joint_free_moment", "joint_value_moment")
    projections = ("k", "v")

    def __init__(self, layer: ObservedLayer):
        self.shape, geometry = layer.shape, layer.shape.geometry
        heads = layer.shape.num_kv_heads
        pairs, free, dim = (
            heads * n for n in (geometry.num_pairs, geometry.num_free, geometry.head_dim)
        )
        self.pairs = layer.zeros("k", pairs, pairs).to(torch.complex64)
        self.free = layer.zeros("k", free, free)
        self.values = layer.zeros("v", dim, dim)

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        geometry = layer.shape.geometry
        squares = COMPLEX * geometry.num_pairs**2 + FLOAT * geometry.num_free**2
        return layer.shape.num_kv_heads**2 * (squares + FLOAT * geometry.head_dim**2)

    def update(self, role: str, inputs: Tensor, outputs: Tensor) -> None:
        states = outputs.float()
        heads_GND = split_heads(states, self.shape.head_dim).flatten(0, 1).transpose(0, 1)
        if role == "v":
            self.values += _square(heads_GND)
            return
        self.pairs += _square(complex_pairs(heads_GND, self.shape))
        self.free += _square(free_channels(heads_GND, self.shape))

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {
            "joint_key_moment": torch.view_as_real(self.pairs / num_tokens),
            "joint_free_moment": self.free / num_tokens,
            "joint_value_moment": self.values / num_tokens,
        }


def _square(heads_GNX: Tensor) -> Tensor:
    """Sum over tokens of x x^H [G X, G X], where x is the states of all heads, head by head."""
    rows = heads_GNX.transpose(0, 1).flatten(1)
    return rows.mT @ rows.conj()
