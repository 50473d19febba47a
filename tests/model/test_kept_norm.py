"""The norm of kept channels against its formula, number by number."""

import math

import pytest
import torch
from torch import nn

from rap.model.norms import KeptNorm
from rap.model.specs import QKNorm

HEADS, WIDTH, ROWS, DIM = 2, 5, 2, 8


def kept_norm(over: str = "head", dtype: torch.dtype = torch.float32) -> KeptNorm:
    """With a weight, a bias, a ratio per head, and an eps that counts."""
    norm = KeptNorm(QKNorm(over=over), nn.LayerNorm(DIM, eps=0.7, dtype=dtype), HEADS, WIDTH, DIM)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.ratio):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Kept channels and norm rows [B, H, T, W + S]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, HEADS, 4, WIDTH + ROWS, generator=generator).to(dtype)


@pytest.mark.parametrize("over", ["head", "all"])
@torch.no_grad()
def test_kept_channels_are_divided_by_the_estimated_size_of_the_dense_head(over):
    norm, x = kept_norm(over), states()
    found = norm(x)
    assert found.shape == (3, HEADS, 4, WIDTH)
    for row, token in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        means = [
            float(x[row, head, token].square().sum() * norm.ratio[head]) / DIM
            for head in range(HEADS)
        ]
        for head in range(HEADS):
            mean = sum(means) / HEADS if over == "all" else means[head]
            kept = x[row, head, token, :WIDTH] / math.sqrt(mean + 0.7)
            expected = kept * norm.weight[head] + norm.bias[head]
            torch.testing.assert_close(found[row, head, token], expected)


@torch.no_grad()
def test_low_precision_is_normalised_in_float32_and_rounded_once():
    norm, x = kept_norm(dtype=torch.bfloat16), states(torch.bfloat16)
    found, wide = norm(x), norm.float()(x.float())
    assert torch.equal(found, wide.bfloat16())
