"""What engines really hold of the widths that a plan chose, told before one of them is started.

An attention backend takes some head sizes; others are padded, and the zeros are cached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.errors import RapError
from ..model.layers import base_model_type
from .layout import HeadLayout, dense_head_dim, head_layouts, padded_width
from .paths import serving_path
from .stock import STOCK_FAMILIES

# What vLLM 0.32 declares for CPUs; the sizes of the others are conditions (docs/serving.md).
CPU_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Backend, the sizes it takes, and the target whose widths it takes as they are.
BACKENDS: dict[str, tuple[Callable[[int], bool], str]] = {
    "vLLM on a CPU": (lambda size: size in CPU_SIZES, "--target cpu"),
    "vLLM, FlashAttention": (lambda size: size % 8 == 0 and size <= 256, "--target flash"),
    "vLLM, Triton": (lambda size: size >= 32, "--target vllm"),
    "vLLM, FlashInfer": (lambda size: size in (64, 128, 256, 512), "--align 64"),
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


def held_by_engines(config: Any) -> list[Held]:
    """A row per engine and backend for a pruned config; none for families that no engine takes."""
    family = base_model_type(config)
    try:
        serving_path(config)
    except RapError:
        return []  # `rap serve` says why
    layouts = head_layouts(config)
    dense = dense_head_dim(config)
    rows = [_backend(name, layouts, dense) for name in BACKENDS]
    return rows + ([_plain(layouts, dense)] if family in STOCK_FAMILIES else [])


def asked_ratio(layouts: Sequence[HeadLayout | None], dense: int) -> float:
    """How many times the dense tokens would fit if nothing were padded."""
    kept = [dense * 2 if one is None else one.key_width + one.value_width for one in layouts]
    return 2 * dense * len(layouts) / sum(kept)


def _backend(name: str, layouts: Sequence[HeadLayout | None], dense: int) -> Held:
    accepts, better = BACKENDS[name]
    wanted = sorted({dense if one is None else one.width for one in layouts})
    try:
        stored = {width: padded_width(width, accepts, name) for width in wanted}
    except RapError:
        return Held(name, "", None, f"takes no head of {wanted[-1]} channels")
    total = sum(stored[dense if one is None else one.width] for one in layouts)
    ratio = dense * len(layouts) / total
    lost = ratio < _LOSS * asked_ratio(layouts, dense)
    shown = [f"{width} as {size}" for width, size in stored.items() if width != size]
    return Held(name, ", ".join(shown) or "as they are", ratio, better if lost else "")


def _plain(layouts: Sequence[HeadLayout | None], dense: int) -> Held:
    name, first = "llama.cpp, MLX", layouts[0]
    if first is None or any(one != first for one in layouts) or first.key_width != first.width:
        return Held(name, "not runnable", None, "--target llamacpp")
    # The export itself tells a stock profile from equal widths with indices of their own.
    shown = "as they are, if of the stock profile"
    slow = first.width % 32 != 0
    advice = "--target llamacpp" if slow else ""
    ratio = asked_ratio(layouts, dense)
    return Held(name, shown + (", slowly" if slow else ""), ratio, advice)
