"""Does a model rebuild keys or values from its cache at every decode step?

Seen from the products of a real decode step: reconstruction multiplies weights with something that
spans the cached tokens, while attention as such multiplies weights with the new token alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...runtime.state import evaluating

CONTEXT = 58  # cached tokens; with the new one 59, a prime, which divides no number of heads
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@torch.no_grad()
def reconstructs(model: Any) -> bool:
    """Whether a decode step multiplies the cache, or anything as long, with weights.

    Weights are parameters and whatever is computed from parameters alone. Eager attention is used,
    so that no product hides in a fused kernel; the model's own implementation is put back.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.zeros(1, CONTEXT + 1, dtype=torch.long, device=device)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            cache = model(input_ids=ids[:, :CONTEXT], use_cache=True).past_key_values
            with _WeightProducts(model.parameters(), CONTEXT + 1) as products:
                model(input_ids=ids[:, CONTEXT:], use_cache=True, past_key_values=cache)
    finally:
        model.set_attn_implementation(implementation)
    return products.found


class _WeightProducts(TorchDispatchMode):
    """Watches for a product of a weight with a tensor that has a dimension of `length`."""

    def __init__(self, parameters: Iterator[Tensor], length: int) -> None:
        super().__init__()
        self.length, self.found = length, False
        self.weights = {_storage(parameter): parameter for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        weights = [_storage(tensor) in self.weights for tensor in given]
        if func.overloadpacket.__name__ in _PRODUCTS and any(weights):
            left, right = given[-2:]
            # Heads are often folded into the rows of a product, so multiples count.
            rows = left.shape[-2] if not weights[-2] else right.shape[-1]
            self.found |= weights[-2] != weights[-1] and rows % self.length == 0
        result = func(*args, **(kwargs or {}))
        if weights and all(weights):
            # Kept, or a freed tensor's address could be taken for a weight's.
            self.weights |= {_storage(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
