"""What an engine must know of a pruned checkpoint, read from config.json alone.

An engine's compile cache is keyed by the config, so everything that shapes its graph is here, and
nothing in the weights or the environment.

Shapes: D dense head dim, P dense pairs, M slots, N free channels, W key width, C value width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..model.errors import CheckpointError
from ..model.families import FAMILIES
from ..model.layers import base_model_type
from ..model.modeling import configured_widths

LARGEST_HEAD = 512


@dataclass(frozen=True)
class HeadLayout:
    """Widths of one pruned layer's heads: M slots and N free, so W = 2M + N keys, and C values."""

    num_slots: int
    value_width: int
    num_free: int = 0

    @property
    def key_width(self) -> int:
        """W: channels of a query or key head."""
        return 2 * self.num_slots + self.num_free

    @property
    def width(self) -> int:
        """The channels a cache with one head size for keys and values needs."""
        return max(self.key_width, self.value_width)


def dense_head_dim(config: PreTrainedConfig) -> int:
    """D, which a pruned config keeps unchanged."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_kv_heads(config: PreTrainedConfig) -> int:
    """G; families without grouped queries do not name it, and read no field that does."""
    family = FAMILIES.get(base_model_type(config))
    if family is not None and family.fused == "heads":
        return int(config.num_attention_heads)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_layouts(config: PreTrainedConfig) -> list[HeadLayout | None]:
    """The layout of every layer, None where it was left dense.

    Raises CheckpointError if the `rap` section is missing, of a newer version, of the wrong length,
    or has widths that are impossible.
    """
    head_dim = dense_head_dim(config)
    return [
        None if widths is None else _layout(index, widths, head_dim)
        for index, widths in enumerate(configured_widths(config, config.num_hidden_layers))
    ]


def _layout(layer: int, widths: Any, head_dim: int) -> HeadLayout:
    layout = HeadLayout(widths["pairs"], widths["values"], widths["free"])
    if layout.width > head_dim:
        raise CheckpointError(
            f"layer {layer} keeps {layout.key_width} key and {layout.value_width} value channels "
            f"of a head with {head_dim}: the `rap` section does not belong to this config"
        )
    return layout


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
