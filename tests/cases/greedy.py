"""Greedy decoding step by step, with what was decided on."""

from typing import Any

import torch
from torch import Tensor


def greedy(model: Any, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` greedy tokens, step by step with a cache, and the logits [count, V] behind them."""
    cache, logits = None, []
    with torch.no_grad():
        for _ in range(count):
            found = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = found.past_key_values
            logits.append(found.logits[0, -1])
            ids = logits[-1].argmax()[None, None]
    return torch.stack(logits).argmax(-1), torch.stack(logits)
