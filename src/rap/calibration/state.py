"""Leaving a model as it was found: hooks that go, flags and gradients that come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def removed(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks on the way out."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def restored(model: Any, trainable: list[Tensor], checkpointing: bool) -> Iterator[None]:
    """Eval mode, gradients for `trainable` only; every flag is put back on the way out.

    Checkpointing happens only in layers in training mode. That mode is set on the layer module
    alone, so the dropout modules inside it stay off.
    """
    flags = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
    modules = [(m, {k: v for k, v in vars(m).items() if k in flags}) for m in model.modules()]
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        model.eval()
        for parameter, _, _ in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module, _ in modules:
            if checkpointing and trainable and isinstance(module, GradientCheckpointingLayer):
                recompute = partial(checkpoint, use_reentrant=False)
                vars(module).update(zip(flags, (True, True, recompute), strict=True))
        yield
    finally:
        for module, saved in modules:
            for flag in flags:
                vars(module).pop(flag, None)
            vars(module).update(saved)
        for parameter, requires_grad, gradient in parameters:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
