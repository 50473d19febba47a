"""Second moments of queries and keys before they rotate: what keys are folded by.

Shapes: B batch, T tokens, G KV heads, N tokens of a group, P pairs, F channels that never rotate.
"""

import torch
from torch import Tensor

from ..model.layers import split_heads
from .observers import (
    COMPLEX,
    FLOAT,
    ForwardStatistic,
    ObservedLayer,
    by_kv_head,
    complex_pairs,
    free_channels,
)


class PairMoment(ForwardStatistic):
    """Second moments E[x x^H] of q (summed over the group) and of k, before they rotate.

    Complex ones of pairs: a pair is its first plus i times its second channel, and a rotation
    multiplies it by a unit number. Real ones of the channels that never rotate.
    """

    need = "pairs"
    names = ("query_moment", "query_free_moment", "key_moment", "key_free_moment")
    projections = ("q", "k")

    def __init__(self, layer: ObservedLayer):
        self.shape, pairs = layer.shape, layer.shape.geometry.num_pairs
        heads, free = layer.shape.num_kv_heads, layer.shape.geometry.num_free
        self.sums = {r: layer.zeros(r, heads, pairs, pairs).to(torch.complex64) for r in "qk"}
        self.free = {role: layer.zeros(role, heads, free, free) for role in "qk"}

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        geometry = layer.shape.geometry
        matrices = COMPLEX * geometry.num_pairs**2 + FLOAT * geometry.num_free**2
        return 2 * layer.shape.num_kv_heads * matrices

    def update(self, role: str, inputs: Tensor, outputs: Tensor) -> None:
        heads_GND = by_kv_head(split_heads(outputs.float(), self.shape.head_dim), self.shape)
        pairs_GNP = complex_pairs(heads_GND, self.shape)
        self.sums[role] += pairs_GNP.mT @ pairs_GNP.conj()
        free_GNF = free_channels(heads_GND, self.shape)
        self.free[role] += free_GNF.mT @ free_GNF

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        moments = {}
        for role, side in (("q", "query"), ("k", "key")):
            moments[f"{side}_moment"] = torch.view_as_real(self.sums[role] / num_tokens)
            moments[f"{side}_free_moment"] = self.free[role] / num_tokens
        return moments
