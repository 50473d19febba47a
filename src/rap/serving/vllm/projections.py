"""vLLM's linears, and this rank's rows of everything else, in a pruned attention of transformers.

The norms of queries and keys are divided too, where a rank has some of the heads.

Shapes: B batch, T tokens, H query heads, D dense head dim, G dense KV heads, N
cached heads, W key width, C value width, M slots.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.utils import divide
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.models.transformers.utils import replace_linear_class

from ...model.attention import RapAttention
from ...model.errors import CheckpointError, UnsupportedModelError
from ...model.norms import KeptNorm, norm_names
from ...model.rope import AttentionShape

MERGED, MERGED_CACHED = "qkv_proj", "kv_proj"
Rows = slice | Tensor
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
    shape, size = attention.dense_shape, get_tensor_model_parallel_world_size()
    query, key = _own_heads(shape.num_heads, attention.num_kept_heads)
    fused = _fused_rows(attention, query, key)
    mapped = _merge_projections(attention, name, vllm_config.quant_config)
    # Where heads are merged, dense keys are projected and normalised for all heads of a group.
    merge = attention.projection_heads["k"] // attention.num_kept_heads
    keys = slice(key.start * merge, key.stop * merge)
    if size > 1:
        divide_norms(attention, query, keys)
    maps = _own_maps(query, shape)
    rows = set()
    for path, tensor, part in chain(fused, _by_heads(attention, query, key, keys, maps)):
        _place(attention, path, tensor, part, f"{name}.{path}")
        rows.add(f"{name}.{path}")
    heads, groups = (part.stop - part.start for part in (query, key))
    attention.dense_shape = replace(shape, num_heads=heads, num_kv_heads=len(maps))
    attention.num_kept_heads, attention.num_key_value_groups = groups, heads // groups
    own = {"k": groups * merge, "v": groups}
    attention.projection_heads = {
        projection: own.get(projection, heads) for projection in attention.projection_heads
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


def _own_maps(query: slice, shape: AttentionShape) -> Tensor:
    """The dense KV heads whose maps this rank's query heads have, as many query heads for each.

    Where a rank has some query heads of one and others of another, one map for every query head.
    """
    every = torch.arange(query.start, query.stop, device="cpu") // shape.group_size
    heads, counts = every.unique_consecutive(return_counts=True)
    return heads if bool((counts == counts[0]).all()) else every


def _fused_rows(
    attention: RapAttention, query: slice, key: slice
) -> list[tuple[str, Tensor, Tensor]]:
    """This rank's rows of a linear for q, k and v whose heads vLLM's own has no sizes for.

    vLLM's has one width for q and k. Empty for every other layer.
    """
    linears = attention.spec.linears()
    fused = next((linear for linear, projections in linears.items() if projections == QKV), None)
    if fused is None or _alike(attention):
        return []
    widths, counts = attention.projection_widths, attention.projection_heads
    kept, first, rows = attention.num_kept_heads, 0, []
    for projection, part, total in (("q", query, counts["q"]), ("k", key, kept), ("v", key, kept)):
        width = widths[projection] * counts[projection] // total
        span = slice(first + part.start * width, first + part.stop * width)
        rows.append(torch.arange(span.start, span.stop, device="cpu"))
        first += total * width
    tensors = getattr(attention, fused).named_parameters()
    return [(f"{fused}.{leaf}", tensor, torch.cat(rows)) for leaf, tensor in tensors]


def _alike(attention: RapAttention) -> bool:
    """Whether queries and keys are projected to heads of one width, the keys' cached ones."""
    widths, counts = attention.projection_widths, attention.projection_heads
    return widths["q"] * attention.num_kept_heads == widths["k"] * counts.get("k", 0)


def _merge_projections(
    attention: RapAttention, name: str, quant_config: Any
) -> dict[str, tuple[str, str]]:
    """One linear for q, k and v, or for what a layer has of them; the others one each."""
    linears = attention.spec.linears()
    sources = [linear for linear, projections in linears.items() if set(projections) & set(QKV)]
    found = [linears[source] for source in sources]
    target, merged = "", sources
    if found == [("q",), ("k", "v")]:
        # Values are made of the same weights as keys: the two are one linear already.
        merged = sources[1:]
        target = merged[0]
    elif found == [("q",)]:
        # The layer attends to the cache of another.
        merged = []
    elif found == [("q",), ("k",), ("v",)]:
        merged = sources if _alike(attention) else sources[1:]
        target = MERGED if _alike(attention) else MERGED_CACHED
    elif found == [QKV] and _alike(attention):
        target = sources[0]
    elif found == [QKV]:
        merged = []
        if quant_config is not None:
            raise UnsupportedModelError(f"{name} is factored and quantized: not served by vLLM")
    else:
        raise UnsupportedModelError(f"{name} mixes q, k and v with a gate: not served by vLLM")
    attention.inputs = []
    if merged:
        projections = tuple(projection for source in merged for projection in linears[source])
        linear = _merged_linear(attention, merged, projections, quant_config, f"{name}.{target}")
        for source in merged:
            delattr(attention, source)
        setattr(attention, target, linear)
        attention.inputs.append((target, projections))
    for linear, several in linears.items():
        if linear in merged:
            continue
        style = "rowwise" if several == ("o",) else "colwise"
        if several == QKV:
            # As many rows on every rank, some of them on several: `_fused_rows` are placed in it.
            _widen(attention, linear)
        placed = replace_linear_class(
            getattr(attention, linear), style, quant_config, prefix=f"{name}.{linear}"
        )
        setattr(attention, linear, placed)
        if isinstance(placed, ColumnParallelLinear):
            attention.inputs.append((linear, several))
    if len(merged) < 2:
        return {}
    return {
        f"{name}.{source}": (f"{name}.{target}", projection)
        for source in merged
        for projection in linears[source]
    }


def _widen(attention: RapAttention, linear: str) -> None:
    """Give a meta linear of q, k and v the rows that all ranks together have of it."""
    query, key = _own_heads(attention.dense_shape.num_heads, attention.num_kept_heads)
    [(_, _, rows), *_] = _fused_rows(attention, query, key)
    old, size = getattr(attention, linear), get_tensor_model_parallel_world_size()
    sizes = (old.in_features, len(rows) * size)
    setattr(attention, linear, nn.Linear(*sizes, bias=old.bias is not None, device="meta"))


def _merged_linear(
    attention: RapAttention,
    sources: list[str],
    projections: tuple[str, ...],
    quant_config: Any,
    name: str,
) -> QKVParallelLinear:
    """The linear that gives the rows of several; without "q" among them, it has no queries."""
    modules = [getattr(attention, source) for source in sources]
    if len({module.bias is None for module in modules}) > 1:
        raise UnsupportedModelError(f"{name} has a bias in some of q, k and v: not served by vLLM")
    shape, widths = attention.dense_shape, attention.projection_widths
    return QKVParallelLinear(
        modules[0].in_features,
        widths["k"] * attention.projection_heads["k"] // attention.num_kept_heads,
        shape.num_heads if "q" in projections else 0,
        attention.num_kept_heads,
        bias=modules[0].bias is not None,
        quant_config=quant_config,
        prefix=name,
        return_bias=False,
        v_head_size=widths["v"],
    )


def _by_heads(
    attention: RapAttention, query: slice, key: slice, dense_key: slice, maps: Tensor
) -> Iterator[tuple[str, Tensor, Rows]]:
    """Every tensor with a row per head: its name, itself, and the rows of this rank."""
    for name in ("frequency_index", "kept_channels"):
        if hasattr(attention, name):
            yield name, getattr(attention, name), key
    for projection, names in attention.factors.items():
        # Maps of keys are of cached heads, all others of dense ones.
        part = key if projection == "k" else maps
        for name in names:
            yield f"{name}.weight", attention.get_parameter(f"{name}.weight"), part
    yield from norms_by_heads(attention, query, dense_key)


def _place(attention: RapAttention, path: str, tensor: Tensor, part: Rows, name: str) -> None:
    """Put this rank's rows of a tensor on its device, with a loader that takes them."""
    device = torch.get_default_device()
    total, bound = tuple(tensor.shape), _bound(attention, path)
    held = len(range(total[0])[part]) if isinstance(part, slice) else len(part)
    own = torch.zeros((held, *total[1:]), dtype=tensor.dtype, device=device)
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
            f"{name} has shape {tuple(loaded.shape)}, but {shape} by config.json; the checkpoint "
            "is damaged"
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


def over_ranks(mean: Tensor) -> Tensor:
    """The mean of every rank's mean, each of the same number of channels."""
    return tensor_model_parallel_all_reduce(mean) / get_tensor_model_parallel_world_size()


class DividedNorm(KeptNorm):
    """A norm of kept channels over all heads. Where heads are replicated, all are, as often."""

    def over_heads(self, mean_BHT1: Tensor) -> Tensor:
        """The mean of what the heads of all ranks have, [B, 1, T, 1]."""
        return over_ranks(super().over_heads(mean_BHT1))


class DividedDenseNorm(nn.Module):
    """A root mean square over all heads: weight [H D], those of this rank."""

    def __init__(self, dense: Any):
        super().__init__()
        self.weight, self.eps = dense.weight, dense.variance_epsilon

    def forward(self, x_BTE: Tensor) -> Tensor:
        """x [B, T, H D] over the root mean square of the heads of all ranks, times the weight."""
        x = x_BTE.float()
        x = x * torch.rsqrt(over_ranks(x.square().mean(-1, keepdim=True)) + self.eps)
        return (self.weight * x).to(x_BTE.dtype)


class OwnHeadNorms(nn.Module):
    """One module for every head of the model, and those of this rank applied."""

    def __init__(self, dense: Any, part: slice):
        super().__init__()
        self.norms, self.part = dense.norms, part

    def forward(self, x_BHTD: Tensor) -> Tensor:
        """x [B, H, T, D], every head by its own norm."""
        own = zip(self.norms[self.part], x_BHTD.unbind(1), strict=True)
        return torch.stack([norm(x_BTD) for norm, x_BTD in own], 1)


def _norms(attention: RapAttention, query: slice, key: slice) -> Iterator[tuple[str, Any, slice]]:
    """The norms of queries and keys: name, module and this rank's heads."""
    if attention.norm is None:
        return
    names = norm_names(attention.norm, exact=attention.exact_norm)
    for name, part in zip(names, (query, key), strict=True):
        norm = getattr(attention, name, None)
        if norm is not None:  # as it is of keys, where they are another layer's
            yield name, norm, part


def divide_norms(attention: RapAttention, query: slice, key: slice) -> None:
    """Let the norms of a pruned attention know that a rank has these heads of q and of k."""
    spec: Any = attention.norm
    for name, norm, part in _norms(attention, query, key):
        if spec.one_module_per_head:
            setattr(attention, name, OwnHeadNorms(norm, part))
        elif spec.over == "all" and attention.exact_norm:
            setattr(attention, name, DividedDenseNorm(norm))
        elif spec.over == "all":
            norm.__class__ = DividedNorm


def norms_by_heads(
    attention: RapAttention, query: slice, key: slice
) -> Iterator[tuple[str, Tensor, slice]]:
    """Every tensor of the norms with a row per head, or D: its name, itself, this rank's rows."""
    spec: Any = attention.norm
    for name, norm, part in _norms(attention, query, key):
        if spec.one_module_per_head:
            continue
        if not attention.exact_norm:
            for leaf, tensor in (*norm.named_parameters(), *norm.named_buffers()):
                yield f"{name}.{leaf}", tensor, part
            continue
        # Dense norms: one weight [D] for all heads is whole on every rank.
        size = attention.dense_shape.head_dim
        for leaf, weight in norm.named_parameters():
            if spec.over == "all":
                yield f"{name}.{leaf}", weight, slice(part.start * size, part.stop * size)
            elif weight.ndim > 1:
                yield f"{name}.{leaf}", weight, part
