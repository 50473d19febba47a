"""Leaving a model as it was found: hooks that go, modes, flags and gradients that come back."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..model.attention import ATTENTION


@contextmanager
def removed(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks on the way out."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def shared_reads(model: Any) -> Iterator[None]:
    """SDPA as `rap` inside, which reads the keys of a group once, also under a mask."""
    before = model.config._attn_implementation
    if before == "sdpa":
        model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        if before == "sdpa":
            model.set_attn_implementation(before)


@contextmanager
def frozen(model: nn.Module, trainable: Sequence[Tensor] = ()) -> Iterator[None]:
    """Gradients for `trainable` only, and none yet; flags and gradients come back afterwards."""
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    try:
        for parameter, _, _ in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
        for wanted in trainable:
            wanted.requires_grad_(True)
        yield
    finally:
        for held, requires_grad, gradient in parameters:
            held.requires_grad_(requires_grad)
            held.grad = gradient


@contextmanager
def restored(
    model: PreTrainedModel, trainable: Sequence[Tensor], checkpointing: bool
) -> Iterator[None]:
    """`evaluating` and `frozen`, and layers checkpointed where there are gradients and it is asked.

    Checkpointing happens only in layers in training mode. That mode is set on the layer module
    alone, so the dropout modules inside it stay off.
    """
    flags = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
    checkpointed = [
        (module, {flag: vars(module)[flag] for flag in flags if flag in vars(module)})
        for module in model.modules()
        if checkpointing and trainable and isinstance(module, GradientCheckpointingLayer)
    ]
    with evaluating(model), frozen(model, trainable):
        try:
            for module, _ in checkpointed:
                recompute = partial(checkpoint, use_reentrant=False)
                vars(module).update(zip(flags, (True, True, recompute), strict=True))
            yield
        finally:
            for module, saved in checkpointed:
                for flag in flags:
                    vars(module).pop(flag, None)
                vars(module).update(saved)
