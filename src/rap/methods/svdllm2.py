"""SVD-LLM v2 on keys and values: ranks that follow what each truncation is bound to lose.

https://arxiv.org/abs/2503.12340, for W_k and W_v alone, and at the same cache as all methods here.
No code of the original was released, so the allocation is our reading of its description: among
weights of one type, the share that a matrix loses goes with 1 / log(its least loss at `retain`).
Its second part, whitening by an eigendecomposition, is how every method whitens here
(`model.kinds.latent`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..calibration.statistics import Statistics
from ..planning.budgets import allocate
from .replacing import DenseLayer, nearest_rank
from .svdllm import SvdLlm, joint_rows


@dataclass(frozen=True, kw_only=True)
class SvdLlm2(SvdLlm):
    """SVD-LLM with separate ranks for each W_k and each W_v; each type keeps `retain` in all."""

    name: ClassVar[str] = "svdllm2"
    summary: ClassVar[str] = "as svdllm, with ranks of their own for every layer's keys and values"

    def ranks(
        self, layers: Sequence[DenseLayer], statistics: Statistics
    ) -> Sequence[tuple[int, int]]:
        """By the loss of each matrix over all calibration tokens, as the log depends on its unit.

        `allocate` caps ranks, keeps one at least, and spends what that leaves to the last one.
        """
        tokens = statistics.num_windows * statistics.window
        sizes, kept = [joint_rows(layer) for layer in layers], []
        for role in "kv":
            losses = [tokens * self._truncation_loss(layer, role) for layer in layers]
            shares = kept_shares(losses, self.retain)
            kept.append(allocate(shares, self.retain, sizes, unit=self.multiple))
        return list(zip(*kept, strict=True))

    def _truncation_loss(self, layer: DenseLayer, role: str) -> float:
        """The least E ||(W - Z) x||^2 of a token at the rank that `retain` asks for."""
        weight = layer.weight(role)
        rank = nearest_rank(self.retain, len(weight), self.multiple)
        moment = layer.statistics["input_moment"].double()
        squares = torch.linalg.eigvalsh(weight @ moment @ weight.mT)
        return float(squares.clamp_min(0)[: len(weight) - rank].sum())


def kept_shares(losses: Sequence[float], retain: float) -> list[float]:
    """What each matrix of a type keeps, `retain` on average: 1 - (1 - retain) w / mean(w).

    w = 1 / log(loss), where a loss of e or less, which has no such w or a senseless one, counts as
    e: that matrix gives most, no matter how little it loses. A share below zero is zero, so the
    mean may exceed `retain`; `allocate` scales to the budget. Losses or their squares, all alike,
    give the same shares.
    """
    weights = [1 / max(1.0, math.log(max(loss, 1.0))) for loss in losses]
    mean = sum(weights) / len(weights)
    return [max(0.0, 1 - (1 - retain) * weight / mean) for weight in weights]
