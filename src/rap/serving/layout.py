"""What an engine must know of a pruned checkpoint, read from config.json alone.

An engine's compile cache is keyed by the config, so everything that shapes its graph is here, and
nothing in the weights or the environment.

Shapes: D dense head dim, H query heads, G KV heads, N cached heads: G, or fewer merged ones.
"""

from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedConfig

from ..model.cache_layout import CacheLayout, Entry
from ..model.errors import CheckpointError, UnsupportedModelError
from ..model.families import FAMILIES
from ..model.layers import base_model_type
from ..model.modeling import layer_entries
from ..model.rope import AttentionShape, HeadGeometry

LARGEST_HEAD = 512


def head_dim(config: PreTrainedConfig) -> int:
    """D of a config with one size of head; a pruned config has that of its dense model."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_grouped(config: PreTrainedConfig) -> bool:
    """Whether several query heads may share a KV head.

    Families that fuse q, k and v head by head have as many of each, and read no field that says
    otherwise.
    """
    family = FAMILIES.get(base_model_type(config))
    return family is None or family.fused != "heads"


def dense_head_dims(config: PreTrainedConfig) -> list[int]:
    """D of every layer, which differs in families with wider heads in layers without a window."""
    return [head_dim(layer) for layer in _by_layer(config)]


def cached_heads(config: PreTrainedConfig) -> list[int]:
    """KV heads that every layer caches: G, and none where it reads the cache of another."""
    named = "num_key_value_heads" if is_grouped(config) else "num_attention_heads"
    # Some families without grouped queries do not name G.
    heads = [
        getattr(layer, named, None) or layer.num_attention_heads for layer in _by_layer(config)
    ]
    readers = getattr(config, "num_kv_shared_layers", None) or 0
    own = len(heads) - readers
    return heads[:own] + [0] * readers


def _by_layer(config: Any) -> list[Any]:
    """The config of every layer; on that of the whole, fields in which layers differ raise."""
    several = getattr(config, "is_heterogeneous", False)
    return [
        config.per_layer_config[index] if several else config
        for index in range(config.num_hidden_layers)
    ]


def dense_layouts(config: PreTrainedConfig) -> list[CacheLayout]:
    """What every layer of the dense model caches."""
    sizes = zip(cached_heads(config), dense_head_dims(config), strict=True)
    return [CacheLayout(heads, dim, dim) for heads, dim in sizes]


def cache_layouts(config: PreTrainedConfig) -> list[CacheLayout | None]:
    """What every layer of a pruned config caches, None where it was left dense.

    Raises CheckpointError if the `rap` section is missing, of a newer version, of the wrong length,
    or has widths that are impossible; UnsupportedModelError for attention that vLLM does not run.
    """
    entries = layer_entries(config, config.num_hidden_layers, "vllm")
    return [
        None if entry is None else _layout(index, entry, config.num_attention_heads, dense)
        for index, (entry, dense) in enumerate(zip(entries, dense_layouts(config), strict=True))
    ]


def _layout(layer: int, entry: Entry, num_heads: int, dense: CacheLayout) -> CacheLayout:
    # What does not depend on which channels rotate; a layer without heads reads another's.
    geometry, source = HeadGeometry(dense.key_width, 0), None if dense.num_heads else 0
    kept = entry.cache(AttentionShape(num_heads, dense.num_heads, 0, geometry, source))
    if kept.num_heads and dense.num_heads % kept.num_heads:
        raise CheckpointError(
            f"layer {layer} caches {kept.num_heads} heads, into which {dense.num_heads} KV heads "
            "cannot be merged: the `rap` section does not belong to this config"
        )
    if kept.num_heads * kept.width > dense.num_heads * dense.width and dense.num_heads:
        raise CheckpointError(
            f"layer {layer} keeps {kept.key_width} key and {kept.value_width} value channels "
            f"of a head with {dense.width}: the `rap` section does not belong to this config"
        )
    return kept


def check_division(config: PreTrainedConfig, num_devices: int) -> None:
    """Raise UnsupportedModelError if a layer's cached heads cannot be divided over the devices.

    Each device has N / num_devices of them, or one that num_devices / N of them have alike.
    """
    layouts = zip(cache_layouts(config), dense_layouts(config), strict=True)
    heads = [(dense if kept is None else kept).num_heads for kept, dense in layouts]
    total = config.num_attention_heads
    possible = [
        size
        for size in range(1, total + 1)
        if total % size == 0 and all(_is_divided(number, size) for number in heads)
    ]
    for layer, number in enumerate(heads):
        if not _is_divided(number, num_devices):
            shown = ", ".join(map(str, possible))
            raise UnsupportedModelError(
                f"layer {layer} caches {number} heads, which {num_devices} devices cannot divide; "
                f"use --tensor-parallel-size {shown}"
            )


def _is_divided(num_heads: int, num_devices: int) -> bool:
    # A layer that reads the cache of another has no heads: any number of devices will do.
    return num_heads % num_devices == 0 or num_devices % num_heads == 0


def padded_width(width: int, accepts: Callable[[int], bool], engine: str) -> int:
    """The smallest head size of at least `width` that an attention backend accepts.

    Raises CheckpointError, naming the sizes that would work, if there is none.
    """
    sizes = [size for size in range(1, LARGEST_HEAD + 1) if accepts(size)]
    fitting = [size for size in sizes if size >= width]
    if not fitting:
        raise CheckpointError(
            f"{engine} takes no head of {width} channels or more; it takes {_ranges(sizes)}: "
            "choose another backend, or prune to one of these sizes"
        )
    return fitting[0]


def _ranges(sizes: Iterable[int]) -> str:
    shown = [str(size) for size in sizes]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:8], "...", *shown[-2:]])
