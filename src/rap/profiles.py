"""Deployment profiles: which pairs to keep when heads and layers must share one list.

Shapes: G KV heads, P pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import RapError


def shared_pairs(score_GP: Sequence[Tensor], num_pairs: int) -> list[int]:
    """The `num_pairs` pairs that all heads of all layers keep in the stock profile, ascending.

    A layer's scores are divided by their sum, so that every layer has one vote, then summed over
    heads and layers; the lower index wins a tie. Raises RapError if there are not that many pairs,
    layers differ in their number of pairs, or no score is positive.
    """
    sizes = sorted({scores.shape[-1] for scores in score_GP})
    if len(sizes) != 1:
        raise RapError(f"layers have {sizes} pairs: one list of pairs needs equal layers")
    if not 1 <= num_pairs <= sizes[0]:
        raise RapError(f"cannot keep {num_pairs} of {sizes[0]} pairs in every head")
    votes = torch.zeros(sizes[0], dtype=torch.float64)
    for scores in score_GP:
        total = scores.double().sum()
        if total > 0:
            votes += scores.double().sum(0).cpu() / total.cpu()
    if not votes.any():
        raise RapError("every score is zero: calibrate on a text that the model can read")
    kept: list[int] = votes.argsort(descending=True, stable=True)[:num_pairs].sort().values.tolist()
    return kept
