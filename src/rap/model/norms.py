"""QK-norm of pruned heads: kept channels are divided by what the dense head would divide by.

Three modes, for every layer of a model alike:

* `exact`: q_proj and k_proj keep all rows, the family's own norm sees them, and kept channels are
  taken after it. Saves cache and attention, not the two projections. Equal to the dense model with
  the dropped channels masked.
* `constant`: q_proj and k_proj are cut, and the mean square of a dense head is estimated as the sum
  over kept channels, times a constant per head (`ratio`: all energy over kept energy, measured at
  calibration), over D. Saves everything; the error is how that ratio varies from token to token.
* `rows`: as `constant`, but q_proj and k_proj also keep a few rows a head that only the norm sees,
  combinations of dropped channels that carry most of their energy. They are neither cached nor
  attended to, and the ratio has less to make up for. With as many rows as channels were dropped
  the norm is exact.

Shapes: B batch, T tokens, H heads of q or k, G KV heads, D dense head dim, W kept key channels,
S norm rows.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from .errors import UnsupportedModelError
from .rope import AttentionShape
from .specs import QKNorm

NORM_PER_HEAD = (
    "this family has a norm module per head, which cannot be cut: plan with qk_norm='exact'"
)


class KeptNorm(nn.Module):
    """The norm of `constant` and `rows`: weight (and bias) [H, W] in kept order, `ratio` [H].

    The weight is that of the dense norm, to which `weight_offset` is added in float32, as there.
    LayerNorm's centring is in the projection rows already, so that this is RMS for every family.
    The ratio is float32 in models of every type: a measured figure, not one of the dense weights.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    ratio: Tensor

    def __init__(self, norm: QKNorm, dense: nn.Module, heads: int, width: int, head_dim: int):
        super().__init__()
        self.over, self.head_dim, self.width = norm.over, head_dim, width
        self.offset = norm.weight_offset
        names = ("eps", "variance_epsilon")
        self.eps = next(getattr(dense, name) for name in names if hasattr(dense, name))
        stored = dict(dense.named_parameters(recurse=False))
        for name, fill in (("weight", 1 - self.offset), ("bias", 0.0)):
            like = stored.get(name)
            made = None if like is None else nn.Parameter(like.new_full((heads, width), fill))
            self.register_parameter(name, made)
        device = next((tensor.device for tensor in stored.values()), None)
        # from_pretrained loads it in the type it has here, not in that of the weights.
        self.register_buffer("ratio", torch.ones(heads, dtype=torch.float32, device=device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As any module when it is moved; a cast (`model.to(bfloat16)`) leaves the ratio alone."""
        ratio = self.ratio
        super()._apply(fn, recurse)
        kept = self.ratio if ratio.is_meta else ratio
        self.ratio = kept.to(self.ratio.device, torch.float32)
        return self

    def over_heads(self, mean_BHT1: Tensor) -> Tensor:
        """The mean of what all heads have, [B, 1, T, 1]."""
        return mean_BHT1.mean(1, keepdim=True)

    def forward(self, x_BHTW: Tensor) -> Tensor:
        """x over the estimated root mean square of the dense head, times the weight.

        Of x [B, H, T, W + S] the last S channels go into the mean only.
        """
        x = x_BHTW.to(torch.promote_types(x_BHTW.dtype, torch.float32))
        square_BHT1 = x.square().sum(-1, keepdim=True) * self.ratio[:, None, None].to(x.dtype)
        mean = square_BHT1 / self.head_dim
        if self.over == "all":
            mean = self.over_heads(mean)
        x = x[..., : self.width] * torch.rsqrt(mean + self.eps)
        if self.weight is not None:
            x = x * (self.weight[:, None].to(x.dtype) + self.offset)
        if self.bias is not None:
            x = x + self.bias[:, None]
        return x.to(x_BHTW.dtype)


def norm_names(norm: QKNorm, *, exact: bool) -> tuple[str, str]:
    """Names of the query's and the key's norm; a shared norm is two after pruning."""
    return norm.names if exact or norm.names[0] != norm.names[1] else ("q_norm", "k_norm")


def mapped_limit(norm: QKNorm) -> str:
    """Why normalized queries and keys cannot be combined behind their norm, or ""."""
    if norm.after_rotation:
        return "queries and keys are normalised after their rotation"
    if norm.one_module_per_head:
        return "this family has a norm module per head"
    return "" if norm.names[0] != norm.names[1] else "one norm module serves queries and keys"


def pruned_norms(
    norm: QKNorm, dense: nn.Module, shape: AttentionShape, key_width: int, *, exact: bool
) -> dict[str, nn.Module]:
    """The query's and the key's norm by name: those of the dense attention, or what they become.

    Raises UnsupportedModelError for norms that cannot be cut.
    """
    if norm.one_module_per_head and not exact:
        raise UnsupportedModelError(NORM_PER_HEAD)
    norms = {}
    heads = (shape.num_heads, shape.num_kv_heads)
    for name, old, count in zip(norm_names(norm, exact=exact), norm.names, heads, strict=True):
        module = getattr(dense, old, None)
        if module is None:  # keys of a layer that reads another's
            continue
        norms[name] = module if exact else KeptNorm(norm, module, count, key_width, shape.head_dim)
    return norms


def normalise_dense(norm: QKNorm, module: nn.Module, x_BHTD: Tensor) -> Tensor:
    """The family's own norm on states of full width."""
    if norm.layout == "BHTD":
        return module(x_BHTD)
    x_BTHD = x_BHTD.transpose(1, 2)
    if norm.over == "all":
        return module(x_BTHD.flatten(-2)).view(x_BTHD.shape).transpose(1, 2)
    return module(x_BTHD).transpose(1, 2)


def select_channels(x_BHTD: Tensor, kept_GW: Tensor) -> Tensor:
    """The kept channels of every head, [B, H, T, W]; heads of a group keep the same."""
    x = x_BHTD.unflatten(1, (kept_GW.shape[0], -1))
    index = kept_GW.long()[None, :, None, None, :].expand(*x.shape[:-1], -1)
    return x.gather(-1, index).flatten(1, 2)
