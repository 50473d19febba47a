"""Bytes that a decode step reads, and what of it memory does not hold."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...model.errors import out_of_memory
from ...model.layers import text_config

Found = TypeVar("Found")
# How configs of families with experts say how many there are.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def weight_bytes(model: Any, batch: int = 1) -> int:
    """Bytes of the weights that a decode step reads: all but the input embedding, unless tied.

    Of experts, those that `batch` tokens choose if no two choose the same.
    """
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is embedding
    whole = sum(parameter.nbytes for parameter in model.parameters())
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    unread = round(experts * (1 - _read_share(model, batch))) if experts else 0
    return whole - unread - (0 if tied else embedding.nbytes)


def _read_share(model: Any, batch: int) -> float:
    config = text_config(model.config)
    number, chosen = (_first(config, names) for names in (_EXPERTS, _CHOSEN))
    return min(1.0, batch * chosen / number) if number and chosen else 1.0


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def if_it_fits(measure: Callable[..., Found], *given: Any, **named: Any) -> Found | None:
    """What `measure` returns, or None if memory did not suffice."""
    try:
        return measure(*given, **named)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not (isinstance(error, torch.OutOfMemoryError) or out_of_memory(error)):
            raise
        # The error holds on to what was built, so the next attempt must wait until it is gone.
        return None
