"""What engines really hold of the widths that a plan chose, told before one of them is started.

An attention backend takes some head sizes; others are padded, and the zeros are cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.errors import RapError
from ..model.layers import base_model_type
from .layout import HeadLayout, cached_heads, dense_head_dims, head_layouts, padded_width
from .refusals import check_served
from .stock import STOCK_FAMILIES

# What vLLM 0.32 declares for CPUs; the sizes of the others are conditions (docs/serving.md).
CPU_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Backend, the sizes it takes, and what makes widths that it takes as they are: multiples of what.
BACKENDS: dict[str, tuple[Callable[[int], bool], str, int]] = {
    "vLLM on a CPU": (lambda size: size in CPU_SIZES, "--target cpu", 32),
    "vLLM, FlashAttention": (lambda size: size % 8 == 0 and size <= 256, "--target flash", 8),
    "vLLM, Triton": (lambda size: size >= 32, "--align 32", 32),
    "vLLM, FlashInfer": (lambda size: size in (64, 128, 256, 512), "--align 64", 64),
}
_LOSS = 0.98  # of the capacity asked for; less is told as a loss


@dataclass(frozen=True)
class Held:
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
    """What one layer caches: heads of the layout's widths, of `head_dim` channels where dense.

    No heads where it reads the cache of another.
    """

    layout: HeadLayout | None
    head_dim: int
    num_heads: int

    @property
    def width(self) -> int:
        """The channels of keys or of values, whichever are more."""
        return self.head_dim if self.layout is None else self.layout.width


def held_by_engines(config: Any) -> list[Held]:
    """A row per engine and backend for a pruned config; none for families that no engine takes."""
    family = base_model_type(config)
    try:
        check_served(config)
    except RapError:
        return []  # `rap serve` says why
    sizes = zip(head_layouts(config), dense_head_dims(config), cached_heads(config), strict=True)
    caches = [LayerCache(*each) for each in sizes]
    rows = [_backend(name, caches) for name in BACKENDS]
    return rows + ([_plain(caches)] if family in STOCK_FAMILIES else [])


def asked_ratio(caches: Sequence[LayerCache]) -> float:
    """How many times the dense tokens would fit if nothing were padded."""
    kept = [
        2 * one.head_dim if one.layout is None else one.layout.key_width + one.layout.value_width
        for one in caches
    ]
    asked = sum(one.num_heads * width for one, width in zip(caches, kept, strict=True))
    return 2 * _dense(caches) / asked


def _dense(caches: Sequence[LayerCache]) -> int:
    return sum(one.num_heads * one.head_dim for one in caches)


def _backend(name: str, caches: Sequence[LayerCache]) -> Held:
    accepts, better, step = BACKENDS[name]
    wanted = sorted({one.width for one in caches})
    try:
        stored = {width: padded_width(width, accepts, name) for width in wanted}
    except RapError:
        return Held(name, "", None, f"takes no head of {wanted[-1]} channels")
    ratio = _dense(caches) / sum(one.num_heads * stored[one.width] for one in caches)
    # Heads no wider than a step leave no width to choose, and multiples of it nothing to advise.
    other = any(
        one.head_dim > step and (one.layout.key_width % step or one.layout.value_width % step)
        for one in caches
        if one.layout is not None
    )
    lost = other and ratio < _LOSS * asked_ratio(caches)
    shown = [f"{width} as {size}" for width, size in stored.items() if width != size]
    return Held(name, ", ".join(shown) or "as they are", ratio, better if lost else "")


def _plain(caches: Sequence[LayerCache]) -> Held:
    name, layouts = "llama.cpp, MLX", [one.layout for one in caches]
    first = layouts[0]
    if first is None or any(one != first for one in layouts) or first.key_width != first.width:
        return Held(name, "not runnable", None, "--target llamacpp")
    # The export itself tells a stock profile from equal widths with indices of their own.
    shown = "as they are, if of the stock profile"
    slow = first.width % 32 != 0
    advice = "--target llamacpp" if slow else ""
    ratio = asked_ratio(caches)
    return Held(name, shown + (", slowly" if slow else ""), ratio, advice)
