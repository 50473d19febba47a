"""The optional first phase: match the dense model's attention outputs, layer by layer.

Shapes: B batch, T tokens, E model dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.layers import attention_layers
from ..runtime.state import removed


def matching_loss(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Mean over layers of the squared error of outputs [B, T, E], relative to the teacher's.

    Every layer counts the same, however large its outputs are; it needs no language-model head.
    """
    errors = []
    for mine, other in zip(student, teacher, strict=True):
        mine, other = mine.float(), other.to(mine.device).float()
        size = other.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
        errors.append((mine - other).square().sum() / size)
    return torch.stack(errors).mean()


@contextmanager
def attention_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that receives what each attention layer adds to the residual stream, in order."""
    modules = [layer.module for layer in attention_layers(model) if layer.module is not None]
    with last_outputs(modules) as outputs:
        yield outputs


@contextmanager
def last_outputs(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that receives the first output of every call of `modules` inside."""
    outputs: list[Tensor] = []

    def take(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    with removed([module.register_forward_hook(take) for module in modules]):
        yield outputs
