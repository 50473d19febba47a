"""Channels of a head mixed so that each carries alike: a quantized cache then loses less.

Blocks of a quantized cache share one scale, which the loudest channel sets. Any rotation of a
head's values is free (W_o undoes it), and so is any unitary mix of keys that rotate at one
frequency (the queries take the same). llama.cpp rotates caches by itself at widths that are
multiples of 64; this does it in the weights, for other widths.

Shapes: G KV heads, R query heads per KV head, C value channels, m pairs, E model dim.
"""

from typing import Any

import torch
from torch import Tensor

from ...model.layers import rotary_module
from ...model.rope import read_frequencies

_SAME = 1e-6  # relative difference of frequencies that are one


@torch.no_grad()
def rotate_heads(model: Any) -> None:
    """Mix the heads of a plain model in place; its logits stay the same up to rounding."""
    config = model.config
    kv_heads, ratio = (
        config.num_key_value_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    theta = read_frequencies(rotary_module(model))
    mix_mm = key_mix(theta)
    for layer in model.model.layers:
        attention = layer.self_attn
        width = attention.v_proj.out_features // kv_heads
        turn_CC = hadamard(width)
        for name in ("weight", "bias"):
            value = getattr(attention.v_proj, name)
            if value is not None:
                rows = value.double().reshape(kv_heads, width, -1)
                value.copy_((turn_CC @ rows).reshape(value.shape))
        out = attention.o_proj.weight
        columns = out.double().reshape(out.shape[0], kv_heads * ratio, width)
        out.copy_((columns @ turn_CC.T).reshape(out.shape))
        for linear in (attention.q_proj, attention.k_proj):
            for parameter in linear.parameters():
                parameter.copy_(_mixed(parameter, mix_mm))


def hadamard(width: int) -> Tensor:
    """An orthogonal matrix [C, C] in float64 with entries of one size, as far as C allows.

    Sylvester's construction gives the largest power of two that divides the width, a cosine
    transform the odd rest.
    """
    power = width & -width
    rest = width // power
    steps = torch.arange(rest, dtype=torch.float64)
    turn = torch.cos(torch.pi / rest * (steps[None] + 0.5) * steps[:, None]) * (2 / rest) ** 0.5
    turn[0] /= 2**0.5
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    for _ in range(power.bit_length() - 1):
        turn = torch.kron(turn, two)
    return turn


def key_mix(theta: Tensor) -> Tensor:
    """A unitary matrix [m, m], complex128, that mixes only pairs of one and the same frequency."""
    mix = torch.zeros(len(theta), len(theta), dtype=torch.complex128)
    for frequency in theta.unique():
        # Factors are rounded: one frequency may come back as two neighbours in float32.
        group = ((theta / frequency - 1).abs() < _SAME).nonzero()[:, 0]
        steps = torch.arange(len(group), dtype=torch.float64)
        angle = 2 * torch.pi / len(group) * steps[None] * steps[:, None]
        mix[group[:, None], group] = torch.polar(torch.ones_like(angle), angle) / len(group) ** 0.5
    return mix


def _mixed(weight: Tensor, mix_mm: Tensor) -> Tensor:
    """Rows of heads [first halves | second halves] as complex numbers, mixed."""
    rows = weight.double().reshape(-1, 2, len(mix_mm), *weight.shape[1:], 1)
    turned = torch.einsum("nm,hm...->hn...", mix_mm, torch.complex(rows[:, 0], rows[:, 1]))
    return torch.stack([turned.real, turned.imag], 1).reshape(weight.shape)
