"""KV-cache capacity by engine for the widths of a plan, computed before an engine starts.

An attention backend takes some head sizes; others are padded, and the zeros are cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.cache_layout import CacheLayout
from ..model.errors import RapError
from ..model.layers import base_model_type, windowed_layers
from .layout import cache_layouts, dense_layouts, padded_width
from .plain_forms import WIDELY_READ, plain_form
from .refusals import check_served
from .targets import TARGETS

# What vLLM 0.32 declares for CPUs; sizes of the others are conditions
# (docs/reference/vllm-support.md).
CPU_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Backend, the sizes it takes, and the target or alignment of widths that it takes as they are.
BACKENDS: dict[str, tuple[Callable[[int], bool], str | int]] = {
    "vLLM on a CPU": (lambda size: size in CPU_SIZES, "cpu"),
    "vLLM, FlashAttention": (lambda size: size % 8 == 0 and size <= 256, "flash"),
    "vLLM, Triton": (lambda size: size >= 32, 32),
    "vLLM, FlashInfer": (lambda size: size in (64, 128, 256, 512), 64),
}
_LOSS = 0.98  # of the capacity asked for; less is told as a loss


@dataclass(frozen=True)
class EngineCapacity:
    """One backend: how many times the dense model's tokens fit, and what would do better.

    `ratio` is None where the engine cannot run this checkpoint; `advice` is empty where nothing is
    lost.
    """

    backend: str
    widths: str
    ratio: float | None
    advice: str


@dataclass(frozen=True)
class LayerCache:
    """What one layer and its dense layer cache; no heads where it reads another layer's.

    `windowed` says that a sliding window bounds it, and not other layers.
    """

    dense: CacheLayout
    kept: CacheLayout
    pruned: bool
    windowed: bool = False

    @property
    def is_merged(self) -> bool:
        """Whether the layer caches fewer heads than the dense layer."""
        return self.kept.num_heads < self.dense.num_heads

    @property
    def widest(self) -> int:
        """The most channels a cached head may have: those of all the dense heads it is made of."""
        return self.dense.width * self.dense.num_heads // max(1, self.kept.num_heads)


def held_by_engines(config: Any) -> list[EngineCapacity]:
    """A row per engine and backend for a pruned config; none for families that no engine takes."""
    family = base_model_type(config)
    try:
        check_served(config)
    except RapError:
        return []  # `rap serve` says why
    windowed = windowed_layers(config)
    both = zip(dense_layouts(config), cache_layouts(config), strict=True)
    caches = [
        LayerCache(dense, kept or dense, kept is not None, index in windowed)
        for index, (dense, kept) in enumerate(both)
    ]
    rows = [_backend(name, caches) for name in BACKENDS]
    return rows + ([_plain(caches)] if plain_form(family) in WIDELY_READ else [])


def asked_ratio(caches: Sequence[LayerCache]) -> float:
    """How many times the dense tokens would fit if nothing were padded."""
    return _dense(caches) / sum(one.kept.elements for one in caches if not one.windowed)


def _dense(caches: Sequence[LayerCache]) -> int:
    return sum(one.dense.elements for one in caches if not one.windowed)


def _backend(name: str, caches: Sequence[LayerCache]) -> EngineCapacity:
    accepts, suited = BACKENDS[name]
    if isinstance(suited, str):
        better, step = f"--target {suited}", TARGETS[suited].step
    else:
        better, step = f"--align {suited}", suited
    wanted = sorted({one.kept.width for one in caches})
    try:
        stored = {width: padded_width(width, accepts, name) for width in wanted}
    except RapError:
        return EngineCapacity(name, "", None, f"takes no head of {wanted[-1]} channels")
    every = [one.kept.num_heads * stored[one.kept.width] for one in caches]
    sizes = [size for size, one in zip(every, caches, strict=True) if not one.windowed]
    # vLLM gives layers with a window and layers without one pages of the same number of bytes.
    paged = len(sizes) < len(every)
    pages = [_page(size, max(every)) for size in sizes] if paged else sizes
    ratio = _dense(caches) / (2 * sum(pages))
    # Heads no wider than a step leave no width to choose, and multiples of it nothing to advise.
    other = any(
        one.widest > step and (one.kept.key_width % step or one.kept.value_width % step)
        for one in caches
        if one.pruned
    )
    lost = other and ratio < _LOSS * asked_ratio(caches)
    if sum(pages) * _LOSS > sum(sizes):
        beside_dense = any(not one.pruned for one in caches if one.windowed)
        lost, better = True, "--layers all" if beside_dense else "--budget uniform"
    shown = [f"{width} as {size}" for width, size in stored.items() if width != size]
    return EngineCapacity(name, ", ".join(shown) or "unpadded", ratio, better if lost else "")


def _page(size: int, widest: int) -> int:
    """What a layer costs beside the widest one: a size that divides its gets longer pages."""
    return size if not size or widest % size == 0 else widest


def _plain(caches: Sequence[LayerCache]) -> EngineCapacity:
    name, first = "llama.cpp, MLX", caches[0].kept
    alike = all(one.pruned and one.kept == first for one in caches)
    target = "--target plain" if any(one.is_merged for one in caches) else "--target llamacpp"
    if not alike or first.key_width != first.value_width:
        return EngineCapacity(name, "not runnable", None, target)
    # The export itself tells a stock profile from equal widths with indices of their own.
    shown = "unpadded, in the uniform layout"
    slow = first.width % TARGETS["llamacpp"].step != 0
    advice = target if slow else ""
    ratio = asked_ratio(caches)
    return EngineCapacity(name, shown + (", slowly" if slow else ""), ratio, advice)
