"""What vLLM's backend for models of transformers cannot divide over devices by itself.

Shapes: G KV heads, P pairs, F channels that do not rotate, D head dim, I channels of this rank.
"""

from collections.abc import Iterable, Iterator
from statistics import NormalDist
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from ...model.errors import UnsupportedModelError
from ...model.kinds.pairs import PairPlan
from ...model.layers import AttentionLayer, attention_layers, attention_spec
from ...model.modeling import build_attention, norm_mode
from ...model.rope import AttentionShape
from ...model.specs import AttentionSpec
from ...surgery.weights import converted


class WholeLayers:
    """Layers that a plan left dense, as pruned ones that keep everything: those can be divided.

    vLLM divides what it finds in a module's code: q, k and v in linears of their own, and norms of
    each head whose weights all heads share. Of a layer that has something else it would take some
    heads of one thing and all of another.
    """

    def __init__(self, model: Any, *, quantized: bool = False):
        """Replace such layers of a model on the meta device.

        Raises UnsupportedModelError if there are any and the checkpoint is quantized: its scales
        would have to be put in another order too.
        """
        config = model.config
        self.spec, self.layers = attention_spec(config), attention_layers(model)
        planned = [
            _keep_all(layer.shape) if _is_beyond(layer, self.spec) else None
            for layer in self.layers
        ]
        first = next((index for index, kept in enumerate(planned) if kept is not None), None)
        if quantized and first is not None:
            raise UnsupportedModelError(
                f"layer {first} was left dense, and vLLM cannot divide quantized ones of "
                f"{self.spec.model_type}: serve with --tensor-parallel-size 1, or cut every layer"
            )
        self.planned, self.mode = planned, norm_mode(config)
        # Named while the modules are dense: they are replaced below.
        self.stored = {
            layer.path: {
                f"{layer.path}.{name}"
                for name, _ in cast(nn.Module, layer.module).named_parameters()
            }
            for layer, kept in zip(self.layers, planned, strict=True)
            if kept is not None
        }
        self.dense = {layer.path: layer for layer in self.layers if layer.path in self.stored}
        for layer, kept in zip(self.layers, planned, strict=True):
            if kept is not None:
                entry = kept.entry(self.mode)
                whole = build_attention(model, layer, self.spec, entry, layer.norm, self.mode)
                model.set_submodule(layer.path, whole)

    def converted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Stored weights with those of such layers as `rap apply` would have stored them.

        A layer's are held until all of them are there.
        """
        paths = {name: path for path, names in self.stored.items() for name in names}
        held: dict[str, dict[str, Tensor]] = {path: {} for path in self.stored}
        for stored, tensor in weights:
            # What comes before the layers is called otherwise in a model without its head.
            start = stored.find("layers.")
            path = paths.get(stored[start:])
            if path is None:
                yield stored, tensor
                continue
            held[path][stored[start:]] = tensor
            if held[path].keys() == self.stored[path]:
                layer = self.dense[path]
                kept = self.planned[layer.index]
                assert kept is not None
                made = converted(kept, layer, self.spec, held.pop(path), self.mode)
                yield from ((f"{stored[:start]}{name}", x) for name, x in made.items())


def divide_sparsity(model: nn.Module) -> None:
    """Let gates that keep the largest of their channels (Gemma 3n) know those of all ranks."""
    for module in model.modules():
        if getattr(module, "activation_sparsity", 0.0) and hasattr(module, "_gaussian_topk"):
            vars(module)["_gaussian_topk"] = MethodType(_sparse_gate, module)


def _sparse_gate(module: Any, gate_TI: Tensor) -> Tensor:
    """What a gate has above the quantile of a normal distribution with its mean and deviation."""
    count = gate_TI.shape[-1] * get_tensor_model_parallel_world_size()

    def mean(x_TI: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(x_TI.sum(-1, keepdim=True)) / count

    centre_T1 = mean(gate_TI)
    deviation_T1 = mean((gate_TI - centre_T1).square()).sqrt()
    quantile = NormalDist().inv_cdf(module.activation_sparsity)
    return functional.relu(gate_TI - (centre_T1 + deviation_T1 * quantile))


def _is_beyond(layer: AttentionLayer, spec: AttentionSpec) -> bool:
    """Whether a layer is dense and has what vLLM does not divide."""
    if layer.shape is None or layer.pruned:
        return False
    if spec.fused is not None or spec.gate is not None:
        return True
    if spec.norm is not None and spec.norm.one_module_per_head:
        # Its code also counts all heads where it has no norm.
        return True
    if layer.norm is None:
        return False
    if layer.norm.over == "all":
        return True
    weight = getattr(getattr(layer.module, layer.norm.names[0]), "weight", None)
    return weight is not None and weight.ndim > 1


def _keep_all(shape: AttentionShape | None) -> PairPlan:
    assert shape is not None
    geometry, heads = shape.geometry, shape.num_kv_heads
    sizes = (geometry.num_pairs, geometry.num_free, geometry.head_dim)
    pairs, free, values = (torch.arange(size).expand(heads, -1) for size in sizes)
    return PairPlan(pairs, free, values)
