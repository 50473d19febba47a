"""Loss by position, window by window: how much a model gains from a longer context."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def perplexity_by_position(model: Any, windows_NT: Tensor) -> dict[tuple[int, int], float]:
    """Perplexity of the tokens of windows [N, T] from one position to another, both included.

    A token at position p sees p tokens. The bins double: (1, 1), (2, 3), (4, 7), ...
    """
    length = windows_NT.shape[1]
    total_T = torch.zeros(length - 1, dtype=torch.float64)
    for ids_T in windows_NT:
        logits = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
        total_T += F.cross_entropy(logits, ids_T[1:], reduction="none").double()
    mean_T = total_T / len(windows_NT)
    starts = [2**power for power in range((length - 1).bit_length())]
    bins = [(start, min(2 * start, length) - 1) for start in starts]
    return {(low, high): float(mean_T[low - 1 : high].mean().exp()) for low, high in bins}
