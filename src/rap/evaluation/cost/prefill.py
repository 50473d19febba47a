"""Time to read a prompt, dense and pruned in turns: most of the wait for the first token."""

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...runtime.state import evaluating
from .latency import interleaved, synchronize


def time_prefill(
    models: Mapping[str, Any],
    *,
    tokens: int,
    rounds: int,
    batch: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds in which each model reads `batch` prompts of `tokens` tokens, of every round.

    One forward pass into a new cache, as `generate` begins: logits of the last position alone,
    where the model can leave out the others. Models read in turns, as `latency.interleaved` has it.
    """
    tasks = {name: _reading(model, batch, tokens) for name, model in models.items()}
    return interleaved(tasks, rounds, clock=clock)


def _reading(model: Any, batch: int, tokens: int) -> Callable[[], None]:
    device = model.get_input_embeddings().weight.device
    ids_BT = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    last = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if last else {}

    @torch.no_grad()
    def read() -> None:
        with evaluating(model):
            model(input_ids=ids_BT, use_cache=True, **options)
        synchronize(device)

    return read
