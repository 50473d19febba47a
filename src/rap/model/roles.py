"""The linear layers of attention by role (q, k, v, o, gate): which rows of one each role has.

Copied into checkpoints as remote code with `modeling`.

Shapes: B batch, T tokens, H query heads, G KV heads, D head dim.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ProjectionPart:
    """The rows of a linear layer that play one role, where several roles share the layer."""

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


def role_rows(
    roles: tuple[str, ...], sizes: Mapping[str, tuple[int, int]], *, per_head: bool
) -> dict[str, Tensor]:
    """Which rows of a linear shared by `roles` each has: head by head, or one role after another.

    `sizes` are the heads of each role, and the rows of one of them.
    """
    heads = {role: sizes[role][0] for role in roles}
    widths = {role: sizes[role][1] for role in roles}
    by_role, start = {}, 0
    for role in roles:
        rows = torch.arange(heads[role] * widths[role])
        if per_head:
            step = sum(widths[other] for other in roles)
            rows = rows % widths[role] + rows // widths[role] * step
        by_role[role] = rows + start
        start += widths[role] if per_head else len(rows)
    return by_role
