"""Activations of projections, and statistics of them that the baselines and merging ask for.

What projections read, rotated states, sampled logits, and what every query head makes of the values
of other KV heads. A merged head's latent combines the values of several KV heads, and each query
head averages it by an attention of its own. What a latent loses therefore depends on E[x x^T] of
all the group's values as that attention averages them, of which the dense model computes the query
head's own part alone. The others come from running a layer's attention again with values that
changed places. No other way reads the weights that attention gives, for families mask, cap and
weigh in ways of their own.

Shapes: B batch, T tokens, N tokens of a batch or samples, H query heads, G KV heads, D head dim,
P pairs, E model dim, g heads of a group, V = g D.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..model.errors import CalibrationError
from ..model.layers import split_heads
from ..model.rope import AttentionShape
from .moments import normalized
from .observers import (
    CalibrationStep,
    ForwardStatistic,
    ObservedLayer,
    complex_pairs,
    linear_of,
)

# Query and key positions sampled from every window of a batch, for distances between logits.
SAMPLES_PER_WINDOW = 64
DRAWN_WINDOWS = 8  # how many are drawn at a time


class InputMoment(ForwardStatistic):
    """Second moment of the input that q, k and v share, [E, E]: what low-rank methods whiten by."""

    need = "inputs"
    names = ("input_moment",)
    projections = ("k",)

    def __init__(self, layer: ObservedLayer):
        width = layer.linears["k"].weight.shape[1]
        self.sum = layer.zeros("k", width, width)

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        x_NE = inputs.float().flatten(0, -2)
        self.sum += x_NE.mT @ x_NE

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {"input_moment": self.sum / num_tokens}


class RotatedMoment(ForwardStatistic):
    """Covariance of every head's rotated keys (canonical order), mean and covariance of values."""

    need = "rotated"
    names = ("rotated_key_moment", "value_moment_about_mean", "value_mean")
    projections = ("k", "v")

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        heads, width = layer.shape.num_kv_heads, layer.shape.head_dim
        self.moments = {
            projection: layer.zeros(projection, heads, width, width)
            for projection in self.projections
        }
        self.means = {
            projection: layer.zeros(projection, heads, width) for projection in self.projections
        }
        # About a mean of the first states: biases may be a hundred times what varies, and in
        # float32 the difference of two such squares would be noise.
        self.centers: dict[str, Tensor] = {}

    @classmethod
    def num_bytes(cls, layer: ObservedLayer, num_windows: int) -> int:
        centers = 2 * layer.shape.num_kv_heads * layer.shape.head_dim  # from the first states
        return super().num_bytes(layer, num_windows) + torch.float32.itemsize * centers

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        states_BTGD = split_heads(outputs, self.layer.shape.head_dim)
        if projection == "k":
            states_BTGD = _rotated(states_BTGD, self.layer)
        states_BTGD = states_BTGD.float()
        states_GND = states_BTGD.flatten(0, 1).transpose(0, 1)
        center_G1D = self.centers.setdefault(projection, states_GND.mean(1, keepdim=True))
        states_GND = states_GND - center_G1D
        self.moments[projection] += states_GND.mT @ states_GND
        self.means[projection] += states_GND.sum(1)

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        means = {projection: total / num_tokens for projection, total in self.means.items()}
        about = {
            projection: self.moments[projection] / num_tokens - mean[:, :, None] * mean[:, None, :]
            for projection, mean in means.items()
        }
        return {
            "rotated_key_moment": about["k"],
            "value_moment_about_mean": about["v"],
            "value_mean": means["v"] + self.centers["v"][:, 0],
        }


class LogitSamples(ForwardStatistic):
    """Products of sampled queries and keys, pair by pair, from which any partial logit follows.

    With z = q conj(k) of a pair (first + i second channel), its part of a logit is Re z without
    rotation, and Re(z exp(i theta d)) with it at distance d.
    """

    need = "logits"
    names = ("logit_products", "logit_distances")
    projections = ("q", "k")

    def __init__(self, layer: ObservedLayer):
        self.layer = layer
        self.generator = torch.Generator().manual_seed(layer.index)
        self.query = torch.empty(0)
        self.places: list[tuple[Tensor, Tensor]] = []
        self.products: list[Tensor] = []
        self.distances: list[Tensor] = []

    @classmethod
    def num_bytes(cls, layer: ObservedLayer, num_windows: int) -> int:
        products = layer.shape.num_heads * layer.shape.geometry.num_pairs
        sample = torch.complex64.itemsize * products + torch.long.itemsize
        return num_windows * SAMPLES_PER_WINDOW * sample

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        shape = self.layer.shape
        pairs_BTHP = complex_pairs(split_heads(outputs.float(), shape.head_dim), shape)
        if projection == "q":
            self.query = pairs_BTHP
            return
        batch, length = pairs_BTHP.shape[:2]
        drawn = [self._draw(length) for _ in range(batch)]
        query, key = (torch.stack(places) for places in zip(*drawn, strict=True))
        row = torch.arange(batch)[:, None]
        keys = pairs_BTHP[row, key].repeat_interleave(shape.group_size, 2)
        self.products.append((self.query[row, query] * keys.conj()).flatten(0, 1).cpu())
        self.distances.append((query - key).flatten())
        self.query = torch.empty(0)

    def _draw(self, length: int) -> tuple[Tensor, Tensor]:
        """Positions of queries, and of a key that each can see, both [N].

        Drawn for several windows at once, so that the size of a batch decides nothing.
        """
        if not self.places:
            samples = (DRAWN_WINDOWS, SAMPLES_PER_WINDOW)
            query = torch.randint(length, samples, generator=self.generator)
            key = (torch.rand(samples, generator=self.generator) * (query + 1)).long()
            self.places = list(zip(query, key, strict=True))
        return self.places.pop(0)

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        products_HNP = torch.cat(self.products).transpose(0, 1)
        return {
            "logit_products": torch.view_as_real(products_HNP.contiguous()),
            "logit_distances": torch.cat(self.distances).float(),
        }


def watch_activations(
    statistics: list[tuple[ObservedLayer, ForwardStatistic]], step: CalibrationStep
) -> list[RemovableHandle]:
    """Hooks that hand inputs and outputs of projections to their statistics."""

    @torch.no_grad()
    def see(
        layer: ObservedLayer,
        statistic: ForwardStatistic,
        projection: str,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        outputs: Tensor,
    ) -> None:
        if not step.forward:
            return
        if not torch.isfinite(outputs).all():
            first, last = step.windows[0], step.windows[-1]
            raise CalibrationError(
                f"layer {layer.index}: {projection}_proj gives values that are not finite in "
                f"windows {first} to {last}: check the weights of this layer"
            )
        statistic.update(projection, inputs[0].detach(), outputs.detach())

    handles = [
        layer.linears[projection].register_forward_hook(partial(see, layer, statistic, projection))
        for layer, statistic in statistics
        for projection in statistic.projections
        if projection in layer.linears
    ]
    return handles + [hook for _, statistic in statistics for hook in statistic.watch(step)]


def _rotated(states_BTGD: Tensor, layer: ObservedLayer) -> Tensor:
    """Keys at their positions in the window, in canonical order, normalized if the family does."""
    geometry, norm = layer.shape.geometry, layer.norm
    if norm is not None and not norm.after_rotation:
        states_BTGD = normalized(states_BTGD, layer, "k")
    assert layer.frequencies is not None
    frequencies = layer.frequencies[: geometry.num_pairs].to(states_BTGD.device)
    position = torch.arange(states_BTGD.shape[1], device=states_BTGD.device)
    angle_TP = position[:, None].double() * frequencies
    size_TP = torch.full_like(angle_TP, layer.rotary_factor)
    turn = torch.polar(size_TP, angle_TP).to(torch.complex64)
    pairs = complex_pairs(states_BTGD.float(), layer.shape) * turn[:, None]
    free = states_BTGD[..., geometry.rotary_dim :].float()
    states = torch.cat([pairs.real, pairs.imag, free], dim=-1)
    if norm is None or not norm.after_rotation:
        return states
    order = geometry.canonical_order().to(states.device)
    back = states[..., order.argsort()].to(states_BTGD.dtype)
    return normalized(back, layer, "k")[..., order]


# Channels of a group at most: twice what a cached head may have (planning.merging).
WIDEST_GROUP = 512


def averaged_group(shape: AttentionShape) -> int:
    """Heads whose values are averaged together: the most that divide a layer's, up to 512 channels.

    Groups of a divisor of it are blocks on the diagonal of its moments.
    """
    heads = shape.num_kv_heads
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and n * shape.head_dim <= WIDEST_GROUP]
    return max(fits, default=1)


class AveragedValues(ForwardStatistic):
    """Second moments [H, V, V] of all values of a group as each query head averages them.

    The block of a query head's own KV head is that of `values`, unless something between attention
    and o_proj works on them. A layer's attention runs g times, without gradients.
    """

    need = "averages"
    names = ("averaged_moment",)
    projections = ("o",)

    def __init__(self, layer: ObservedLayer):
        self.layer, self.group = layer, averaged_group(layer.shape)
        width = self.group * layer.shape.head_dim
        self.sum = layer.zeros("o", layer.shape.num_heads, width, width)
        self.moved: list[Tensor] = []

    def watch(self, step: CalibrationStep) -> list[RemovableHandle]:
        """A hook that runs attention with moved values, each time before it runs as it is."""
        module = self.layer.module
        return [module.register_forward_pre_hook(partial(self._before, step), with_kwargs=True)]

    def _before(
        self, step: CalibrationStep, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not step.forward:
            return
        step.forward = False  # for all that watches the same projections
        value, rows = linear_of(self.layer, "v")
        output, _ = linear_of(self.layer, "o")
        self.moved.clear()
        try:
            for distance in range(1, self.group):
                handles = [
                    value.register_forward_hook(partial(self._move, distance, rows)),
                    output.register_forward_pre_hook(self._keep),
                ]
                try:
                    with torch.no_grad():
                        module.forward(*args, **kwargs)
                finally:
                    for handle in handles:
                        handle.remove()
        finally:
            step.forward = True

    def _move(
        self, distance: int, rows: Tensor | None, module: Any, inputs: Any, outputs: Tensor
    ) -> Tensor:
        """Values of which every head has those of the head `distance` further in its group."""
        place = slice(None) if rows is None else rows.to(outputs.device)
        heads = split_heads(outputs[..., place], self.layer.shape.head_dim)
        groups = heads.unflatten(-2, (-1, self.group)).roll(-distance, -2)
        moved = outputs.clone()
        moved[..., place] = groups.flatten(-3)
        return moved

    def _keep(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self.moved.append(inputs[0].detach())

    def update(self, projection: str, inputs: Tensor, outputs: Tensor) -> None:
        dim, per_head = self.layer.shape.head_dim, self.layer.shape.group_size
        parts = [split_heads(x.float(), dim).flatten(0, 1) for x in (inputs, *self.moved)]
        for head in range(self.layer.shape.num_heads):
            own = head // per_head % self.group
            # The part of distance d has the values of head own + d.
            x_NV = torch.cat(
                [parts[(at - own) % self.group][:, head] for at in range(self.group)], 1
            )
            self.sum[head] += x_NV.mT @ x_NV
        self.moved.clear()

    def compute(self, num_tokens: int) -> dict[str, Tensor]:
        return {"averaged_moment": self.sum / num_tokens}
