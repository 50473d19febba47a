"""What watches a layer during calibration: the layer as statistics see it, and their contract.

Shapes: B batch, T tokens, H query heads, G KV heads, N tokens of a group, D head dim, P pairs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..model.rope import AttentionShape
from ..model.specs import QKNorm


@dataclass(frozen=True)
class ObservedLayer:
    """One attention layer under calibration: its index, dense shape, and projections by name.

    `norm` is how it normalises queries and keys, if it does, and `norm_weights` the weights of the
    norms of q [H, D] and k [G, D]. `module` is its attention.
    `frequencies` float64 [P] are those of its pairs, per position, negative if they turn clockwise;
    `rotary_factor` is what rotation multiplies pairs by. `value_norm` is how it normalises values,
    if it does. `device` is where accumulators are, unless where their projection is.
    """

    index: int
    shape: AttentionShape
    linears: dict[str, Any]
    norm_weights: tuple[Tensor, ...] = ()
    frequencies: Tensor | None = None
    rotary_factor: float = 1.0
    norm: QKNorm | None = None
    value_norm: QKNorm | None = None
    module: Any = None
    device: torch.device | None = None

    def zeros(self, projection: str, *shape: int) -> Tensor:
        """A float32 accumulator on the device of a projection."""
        # A layer that reads another's keys has none.
        linear = self.linears.get(projection) or next(iter(self.linears.values()))
        device = self.device or linear.weight.device
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def canonical(self, x_HD: Tensor) -> Tensor:
        """Channels in canonical order: first of every pair, second of every pair, the rest."""
        return x_HD[:, self.shape.geometry.canonical_order().to(x_HD.device)]


@dataclass
class CalibrationStep:
    """Where calibration is in the text: the windows of this step, and which way it goes.

    Hooks look here: `forward` is false while checkpointing computes a second time what was seen.
    """

    windows: range = range(0)
    forward: bool = True


class Statistic(ABC):
    """What calibration accumulates for one layer; the three classes below define the kinds.

    As class variables: `need`, the name that methods ask for it by; `names`, what it leaves in
    `Statistics`, and `norm_names`, what it adds where queries and keys are normalised.
    """

    need: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    norm_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, layer: ObservedLayer): ...

    @classmethod
    def num_bytes(cls, layer: ObservedLayer, num_windows: int) -> int:
        """Bytes that it holds for the layer once it has seen so many windows.

        Those of the tensors that it begins with, which are made on the meta device; a statistic
        that holds more for what it sees overrides this.
        """
        return _num_bytes(cls(replace(layer, device=torch.device("meta"))))

    @abstractmethod
    def compute(self, count: int) -> dict[str, Tensor]:
        """The reduced sums by name; `count` tokens were seen, or windows if it sees windows."""


def _num_bytes(held: Any) -> int:
    """Of all tensors of a statistic: its own, in dicts and lists, and of its parts."""
    if isinstance(held, Tensor):
        return held.nbytes
    held = vars(held) if isinstance(held, Statistic) else held
    if not isinstance(held, dict | list):
        return 0
    return sum(map(_num_bytes, held.values() if isinstance(held, dict) else held))


class ForwardStatistic(Statistic):
    """Accumulates over activations of the projections named in `projections`."""

    projections: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        """Take in the input and output, [B, T, ...], of one projection."""

    def watch(self, step: CalibrationStep) -> list[RemovableHandle]:
        """Separate hooks, in addition to those that receive projections; subclasses define them."""
        return []


class BackwardStatistic(Statistic):
    """Accumulates over gradients of W_k and W_v (and their biases with `biases`), per window."""

    biases: ClassVar[bool] = False

    @abstractmethod
    def update(self, projection: str, parameter: Tensor, gradient: Tensor) -> None:
        """Take in one window's gradient of the weight (2-d) or bias (1-d) of k or v."""

    def end_window(self) -> None:
        """Called when all gradients of a window have been seen."""


class GradientStatistic(Statistic):
    """Accumulates over the loss gradient of what projections give (k), or read (o).

    The loss is the sum of a window's next-token losses, so that a gradient is in nats.
    """

    projections: ClassVar[tuple[str, ...]]

    def watched(self, layer: ObservedLayer, projection: str) -> Any:
        """The module whose output (k) or input (o) it is the gradient of; None for none."""
        return linear_of(layer, projection)[0]

    def taken(self, layer: ObservedLayer, projection: str, gradient: Tensor) -> Tensor:
        """The projection's part [B, T, ...] of what arrives there."""
        rows = linear_of(layer, projection)[1]
        return gradient if rows is None else gradient[..., rows.to(gradient.device)]

    @abstractmethod
    def update(self, projection: str, gradient: Tensor) -> None:
        """Take in one window's gradient [B, T, ...], float32."""


def linear_of(layer: ObservedLayer, projection: str) -> tuple[Any, Tensor | None]:
    """The linear of a projection, and its rows of it where it is shared with others."""
    part = layer.linears[projection]
    return getattr(part, "linear", part), getattr(part, "rows", None)


def by_kv_head(states_BTHD: Tensor, shape: AttentionShape) -> Tensor:
    """[B, T, H or G, D] to [G, N, D] with every token of every head of a group in N."""
    groups = states_BTHD.flatten(0, 1).unflatten(1, (shape.num_kv_heads, -1))
    return groups.transpose(0, 1).flatten(1, 2)


def by_query_head(states_BTHD: Tensor) -> Tensor:
    """[B, T, H, D] to [H, N, D] with every token in N."""
    return states_BTHD.flatten(0, 1).transpose(0, 1)


def free_channels(heads_GND: Tensor, shape: AttentionShape) -> Tensor:
    """The channels that never rotate, [G, N, F], of heads [G, N, D]."""
    geometry = shape.geometry
    free = geometry.canonical_order()[geometry.rotary_dim :]
    return heads_GND[..., free.to(heads_GND.device)]


def complex_pairs(heads: Tensor, shape: AttentionShape) -> Tensor:
    """Pairs [..., P] of heads [..., D], as first plus i times second channel."""
    first, second = shape.geometry.pair_channels().to(heads.device).unbind(1)
    return torch.complex(heads[..., first], heads[..., second])
