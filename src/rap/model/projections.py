"""Projections of attention (q, k, v, o, gate), and the rows of a linear layer that each has.

Copied into checkpoints as remote code with `modeling`.

Shapes: B batch, T tokens, H query heads, G KV heads, D head dim.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ProjectionPart:
    """The rows of one projection, where several share a linear layer."""

    def __init__(self, linear: nn.Linear, rows: Tensor):
        self.linear, self.rows = linear, rows

    @property
    def weight(self) -> Tensor:
        """These rows of the weight, a copy."""
        return self.linear.weight[self.rows.to(self.linear.weight.device)]

    @property
    def bias(self) -> Tensor | None:
        """These entries of the bias, a copy."""
        bias = self.linear.bias
        return None if bias is None else bias[self.rows.to(bias.device)]

    def register_forward_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """As for the linear layer itself, with these columns of its output."""
        return self.linear.register_forward_hook(
            lambda module, inputs, output: hook(module, inputs, output[..., self.rows])
        )


def projection_rows(
    projections: tuple[str, ...], sizes: Mapping[str, tuple[int, int]], *, per_head: bool
) -> dict[str, Tensor]:
    """Rows that each of `projections` has of a linear they share: by head, or one after another.

    `sizes` are the heads of each projection, and the rows of one of them.
    """
    heads = {projection: sizes[projection][0] for projection in projections}
    widths = {projection: sizes[projection][1] for projection in projections}
    by_projection, start = {}, 0
    for projection in projections:
        rows = torch.arange(heads[projection] * widths[projection])
        if per_head:
            step = sum(widths[other] for other in projections)
            rows = rows % widths[projection] + rows // widths[projection] * step
        by_projection[projection] = rows + start
        start += widths[projection] if per_head else len(rows)
    return by_projection
