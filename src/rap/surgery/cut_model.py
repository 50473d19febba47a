"""Step 3 without the model, tensor by tensor: what a plan makes of weights on disk."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.stored import StoredModel, without_weights
from ..model.layers import attention_layers, attention_spec, base_model_type, projection_tensors
from ..planning.plan import Plan
from .apply import added_tensors, cut_layer, pruned_config


class CutModel:
    """The weights of what a plan makes of a stored dense model, none of them in memory.

    As `checkpoint.stored.Weights`. `changed` are those that were fitted since, by name. Raises
    PlanError if the plan is of another model.
    """

    def __init__(self, dense: StoredModel, plan: Plan, changed: Mapping[str, Tensor] | None = None):
        self.dense, self.plan, self.changed = dense, plan, changed or {}
        self.spec, layers = attention_spec(dense.model.config), attention_layers(dense.model)
        shapes = [layer.shape for layer in layers]
        plan.check_model(base_model_type(dense.model.config), shapes)
        self.cuts = projection_tensors(layers, self.spec)
        self.added = {
            f"{path}.{name}": value
            for path, added in added_tensors(plan, layers).items()
            for name, value in added.items()
        }
        self.model: Any = without_weights(pruned_config(dense.model.config, plan))

    def tensor(self, name: str) -> Tensor:
        """A tensor by the pruned model's name: added, fitted, cut, or as the dense one."""
        if name in self.added:
            return self.added[name]
        if name in self.changed:
            return self.changed[name].to(self.dtype(name))
        tensor = self.dense.tensor(name)
        layer, role = self.cuts.get(name, (None, ""))
        if layer is None or self.plan.layers[layer.index] is None:
            return tensor
        return cut_layer(role, tensor, layer, self.plan, self.spec)

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is stored in."""
        return self.added[name].dtype if name in self.added else self.dense.dtype(name)

    @cached_property
    def fingerprint(self) -> str:
        """Of the dense weights and the plan; what was fitted does not count."""
        digest = hashlib.sha256(self.dense.fingerprint.encode())
        digest.update(repr(sorted(self.plan.method.items())).encode())
        for index, layer in enumerate(self.plan.layers):
            for name, tensor in sorted((layer.tensors() if layer else {}).items()):
                digest.update(f"{index} {name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
