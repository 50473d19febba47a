"""What every query head makes of the values of other KV heads: what merging values needs.

A merged head's latent combines the values of several KV heads, and each query head averages it by
an attention of its own. What a latent loses therefore depends on E[x x^T] of all the group's values
as that attention averages them, of which the dense model computes the query head's own part alone.
The others come from running a layer's attention again with values that changed places. No other
way reads the weights that attention gives, for families mask, cap and weigh in ways of their own.

Shapes: B batch, T tokens, N tokens of a batch, H query heads, G KV heads, D head dim, g heads of a
group, V = g D.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..model.layers import split_heads
from ..model.rope import AttentionShape
from .observers import FLOAT, CalibrationStep, ForwardStatistic, ObservedLayer, linear_of

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

    @staticmethod
    def num_bytes(layer: ObservedLayer, num_windows: int) -> int:
        width = averaged_group(layer.shape) * layer.shape.head_dim
        return FLOAT * layer.shape.num_heads * width**2

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

    def update(self, role: str, inputs: Tensor, outputs: Tensor) -> None:
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
