"""Loss by position: how much a model gains from a longer context.

Shapes: N windows of T tokens.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class PositionBin:
    """Mean loss (nats per token) of the tokens with `start` <= position < `stop`."""

    start: int
    stop: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.no_grad()
def loss_by_position(
    model: torch.nn.Module,
    windows_NT: torch.Tensor,
    *,
    edges: Sequence[int] | None = None,
    batch_size: int = 4,
) -> list[PositionBin]:
    """Mean loss in bins of position of windows [N, T]; a token at position p sees p tokens.

    `edges` default to 1, 2, 4, ... T: the first token has no context and is left out.
    """
    length = windows_NT.shape[1]
    if length < 2:
        raise ValueError(f"windows of {length} tokens, at least 2 are needed")
    if edges is None:
        edges = [*(2**i for i in range((length - 1).bit_length())), length]
    if list(edges) != sorted(set(edges)) or edges[0] < 1 or edges[-1] > length:
        raise ValueError(f"edges must rise from 1 or more to {length} or less, got {list(edges)}")
    device = next(model.parameters()).device
    total_T = torch.zeros(length - 1, dtype=torch.float64)
    for batch in windows_NT.split(batch_size):
        ids_BT = batch.to(device)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits.transpose(1, 2), ids_BT[:, 1:], reduction="none")
        total_T += losses.double().sum(0).cpu()
    mean_T = total_T / len(windows_NT)
    return [
        PositionBin(start, stop, float(mean_T[start - 1 : stop - 1].mean()))
        for start, stop in itertools.pairwise(edges)
    ]
