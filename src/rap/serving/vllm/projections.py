"""vLLM's linears, and this rank's rows of everything else, in a pruned attention of transformers.

Shapes: H query heads, N cached heads, W key width, C value width, M slots.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.utils import divide
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.models.transformers.utils import replace_linear_class

from ...model.attention import RapAttention
from ...model.errors import CheckpointError, UnsupportedModelError
from .head_norms import divide_norms, norms_by_heads

MERGED = "qkv_proj"
QKV = ("q", "k", "v")


class ServedAttention(RapAttention):
    """Pruned attention whose projections are vLLM's."""

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As ever, with values in one piece: vLLM views those narrower than keys to pad them."""
        q, k, v, gate = super().project(hidden_states)
        if self.value_width < self.key_width and not self.spec.reads:
            v = v.transpose(1, 2).contiguous().transpose(1, 2)
        return q, k, v, gate


@functools.cache
def served_class(pruned: type[RapAttention]) -> type[RapAttention]:
    """The class of a pruned attention in vLLM."""
    return type(pruned.__name__, (ServedAttention, pruned), {"__module__": __name__})


def place_attention(
    attention: RapAttention, name: str, vllm_config: Any
) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Give a pruned attention on the meta device vLLM's linears and this rank's share of the rest.

    Returns what vLLM must know to load it: names of linears that became one, with the new name and
    the part, and the names of tensors that are divided by heads. Raises UnsupportedModelError for
    projections that vLLM has no linear for.
    """
    mapped = _merge_projections(attention, name, vllm_config.quant_config)
    shape = attention.dense_shape
    query, key = _own_heads(shape.num_heads, attention.num_kept_heads)
    if get_tensor_model_parallel_world_size() > 1:
        divide_norms(attention, query, key)
    rows = set()
    for path, tensor, part in _by_heads(attention, query, key):
        _place(attention, path, tensor, part, f"{name}.{path}")
        rows.add(f"{name}.{path}")
    heads, groups = (part.stop - part.start for part in (query, key))
    attention.dense_shape = replace(shape, num_heads=heads, num_kv_heads=groups)
    attention.num_kept_heads, attention.num_key_value_groups = groups, heads // groups
    attention.role_heads = {
        role: groups if role in ("k", "v") else heads for role in attention.role_heads
    }
    kind: Any = type(attention)
    attention.__class__ = served_class(kind)
    return mapped, rows


def _own_heads(num_heads: int, num_kv_heads: int) -> tuple[slice, slice]:
    """The query heads and cached heads of this rank, as QKVParallelLinear takes them."""
    size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    replicas, heads = max(1, size // num_kv_heads), divide(num_heads, size)
    groups = divide(num_kv_heads * replicas, size)
    query, key = rank * heads, rank // replicas * groups
    return slice(query, query + heads), slice(key, key + groups)


def _merge_projections(
    attention: RapAttention, name: str, quant_config: Any
) -> dict[str, tuple[str, str]]:
    """One linear for q, k and v, or for what a layer has of them; the others one each."""
    linears = attention.spec.linears()
    sources = [linear for linear, roles in linears.items() if set(roles) & set(QKV)]
    found = [linears[source] for source in sources]
    target, merged = "", sources
    if found == [("q",), ("k", "v")]:
        # Values are made of the same weights as keys: the two are one linear already.
        merged = sources[1:]
        target = merged[0]
    elif found == [("q",)]:
        # The layer attends to the cache of another.
        merged = []
    elif found in ([QKV], [("q",), ("k",), ("v",)]):
        target = sources[0] if len(sources) == 1 else MERGED
    else:
        raise UnsupportedModelError(f"{name} mixes q, k and v with a gate: not served by vLLM")
    attention.inputs = []
    if merged:
        roles = tuple(role for source in merged for role in linears[source])
        linear = _merged_linear(attention, merged, roles, quant_config, f"{name}.{target}")
        for source in merged:
            delattr(attention, source)
        setattr(attention, target, linear)
        attention.inputs.append((target, roles))
    for linear, several in linears.items():
        if linear in merged:
            continue
        style = "rowwise" if several == ("o",) else "colwise"
        placed = replace_linear_class(
            getattr(attention, linear), style, quant_config, prefix=f"{name}.{linear}"
        )
        setattr(attention, linear, placed)
        if isinstance(placed, ColumnParallelLinear):
            attention.inputs.append((linear, several))
    if len(merged) < 2:
        return {}
    return {
        f"{name}.{source}": (f"{name}.{target}", role)
        for source, role in zip(merged, QKV, strict=True)
    }


def _merged_linear(
    attention: RapAttention,
    sources: list[str],
    roles: tuple[str, ...],
    quant_config: Any,
    name: str,
) -> QKVParallelLinear:
    """The linear that gives the rows of several; without "q" among the roles, it has no queries."""
    modules = [getattr(attention, source) for source in sources]
    if len({module.bias is None for module in modules}) > 1:
        raise UnsupportedModelError(f"{name} has a bias in some of q, k and v: not served by vLLM")
    shape, widths = attention.dense_shape, attention.role_widths
    return QKVParallelLinear(
        modules[0].in_features,
        widths["k"],
        shape.num_heads if "q" in roles else 0,
        attention.num_kept_heads,
        bias=modules[0].bias is not None,
        quant_config=quant_config,
        prefix=name,
        return_bias=False,
        v_head_size=widths["v"],
    )


def _by_heads(
    attention: RapAttention, query: slice, key: slice
) -> Iterator[tuple[str, Tensor, slice]]:
    """Every tensor with a row per head: its name, itself, and the rows of this rank."""
    for name in ("frequency_index", "kept_channels"):
        if hasattr(attention, name):
            yield name, getattr(attention, name), key
    yield from norms_by_heads(attention, query, key)


def _place(attention: RapAttention, path: str, tensor: Tensor, part: slice, name: str) -> None:
    """Put this rank's rows of a tensor on its device, with a loader that takes them."""
    device = torch.get_default_device()
    total, bound = tuple(tensor.shape), _bound(attention, path)
    own = torch.zeros(tensor[part].shape, dtype=tensor.dtype, device=device)
    if tensor.is_floating_point() and not path.endswith("ratio"):
        own = own.to(torch.get_default_dtype())

    def load(target: Tensor, loaded: Tensor) -> None:
        check_stored(name, loaded, total, bound)
        target.data.copy_(loaded[part])

    parent, _, leaf = path.rpartition(".")
    module = attention.get_submodule(parent)
    placed: Any = nn.Parameter(own, requires_grad=False) if leaf in module._parameters else own
    placed.weight_loader = load
    setattr(module, leaf, placed)


def _bound(attention: RapAttention, path: str) -> tuple[str, int] | None:
    geometry = attention.dense_shape.geometry
    return {
        "frequency_index": ("pairs", geometry.num_pairs),
        "kept_channels": ("channels", geometry.head_dim),
    }.get(path)


def check_stored(
    name: str, loaded: Tensor, shape: tuple[int, ...], bound: tuple[str, int] | None = None
) -> None:
    """Raise CheckpointError for a stored tensor of another shape, or with an index out of range.

    `bound` says of an index what it counts, and how many of it a head has.
    """
    if tuple(loaded.shape) != shape:
        raise CheckpointError(
            f"{name} has shape {tuple(loaded.shape)}, config.json says {shape}: the checkpoint is "
            "damaged"
        )
    if bound is None or not loaded.numel():
        return
    what, count = bound
    low, high = int(loaded.min()), int(loaded.max())
    if not 0 <= low <= high < count:
        raise CheckpointError(
            f"{name} names {what} {low} to {high}, a head has {what} 0 to {count - 1}: the "
            "checkpoint is damaged"
        )
