"""What a set of weights is: one hash over every tensor's name, shape and values.

Values are hashed as float32, so a bfloat16 checkpoint loaded in float32 keeps its fingerprint.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

# Elements converted at a time: a whole embedding in float32 would be the largest thing in memory.
_CHUNK = 1 << 22


class Fingerprint:
    """Accumulates tensors in any order; `value()` does not depend on it."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash one tensor in chunks, on the CPU, floats as float32."""
        if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "dequantize"):
            tensor = tensor.dequantize()  # packed weights are what they stand for
        digest = hashlib.sha256(str(tuple(tensor.shape)).encode())
        for part in tensor.detach().reshape(-1).split(_CHUNK):
            values = part.float() if part.is_floating_point() else part
            digest.update(values.cpu().contiguous().view(torch.uint8).numpy())
        self._digests[name] = digest.hexdigest()

    def add_same(self, name: str, other: "Fingerprint") -> None:
        """Take over a tensor that `other` has hashed already."""
        self._digests[name] = other._digests[name]

    def names(self) -> set[str]:
        """Names of the tensors hashed so far."""
        return set(self._digests)

    def value(self) -> str:
        """64 hexadecimal digits."""
        lines = (f"{name} {digest}" for name, digest in sorted(self._digests.items()))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def fingerprint_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of (name, tensor) pairs."""
    result = Fingerprint()
    for name, tensor in named:
        result.add(name, tensor)
    return result.value()


def tied_names(model: nn.Module) -> set[str]:
    """State-dict names that repeat another weight and are not stored in a checkpoint.

    Weights that are called tied and differ are two: `save_pretrained` stores both.
    """
    called = dict(getattr(model, "all_tied_weights_keys", None) or {})
    weights = dict(model.named_parameters(remove_duplicate=False)) if called else {}
    return {name for name, of in called.items() if _same(weights.get(name), weights.get(of))}


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is second or first is None or second is None or first.is_meta or second.is_meta:
        return True
    return torch.equal(first, second.to(first.device))


def fingerprint_model(model: nn.Module) -> str:
    """Fingerprint of a model's stored weights: its state dict without tied repetitions."""
    skip = tied_names(model)
    return fingerprint_tensors(
        (name, tensor) for name, tensor in model.state_dict().items() if name not in skip
    )


def fingerprint_saved(model: nn.Module, state: Mapping[str, Tensor] | None) -> str | None:
    """Fingerprint of what `save_pretrained` stores: `state`, or all that the model has.

    None where some of it is on the disk, as a model with offloaded layers has it.
    """
    if state is None and any(tensor.is_meta for tensor in model.state_dict().values()):
        return None
    if state is None:
        return fingerprint_model(model)
    repeated = tied_names(model)
    return fingerprint_tensors((name, x) for name, x in state.items() if name not in repeated)
