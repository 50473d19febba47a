"""The distillation loss from hidden states, a chunk of tokens at a time.

The logits of 4k tokens over a vocabulary of 128k are 2 GiB in float32, and a plain loss holds
them several times (student, teacher, probabilities, gradients). The heads are frozen, so the
gradient with respect to the student's hidden states is all that training needs: it is computed
chunk by chunk in the forward pass, and nothing of the size of the logits outlives its chunk.

The optional first phase matches the dense model's attention outputs instead, layer by layer.

Shapes: B batch, T tokens, N predicted tokens, C tokens of a chunk, E model dim, V vocabulary,
K kept teacher tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..model.layers import attention_layers
from ..runtime.state import removed
from .config import RecoveryConfig

LOSS_LOGITS = 2**24  # logits of a chunk, tokens x vocabulary: 64 MiB of float32

Logits = Callable[[Tensor], Tensor]  # of decoder outputs: [C, E] to [C, V]


def distillation_loss(
    hidden_NE: Tensor,
    teacher_NE: Tensor,
    targets_N: Tensor,
    heads: tuple[Logits, Logits],
    config: RecoveryConfig,
) -> Tensor:
    """Mean loss in nats of N tokens; `heads` of student and teacher map [C, E] to logits [C, V].

    Equal, with its gradient with respect to `hidden_NE`, to the mean of `token_loss` over all
    logits at once, LOSS_LOGITS of which are held. Parameters of the heads receive no gradient.
    """
    return _Chunked.apply(hidden_NE, teacher_NE, targets_N, heads, config)


def token_loss(
    student_CV: Tensor, teacher_CV: Tensor, targets_C: Tensor, config: RecoveryConfig
) -> Tensor:
    """ce_weight * CE + kl_weight * T^2 * KL of the distributions at temperature T, per token [C].

    The factor T^2 keeps the size of the KL's gradient independent of T (Hinton et al. 2015,
    https://arxiv.org/abs/1503.02531, section 2); the paper's formula does not show it.
    """
    student_CV, teacher_CV = _at_least_float32(student_CV), _at_least_float32(teacher_CV)
    loss_C = torch.zeros_like(student_CV[:, 0])
    if config.ce_weight:
        loss_C = loss_C + config.ce_weight * F.cross_entropy(
            student_CV, targets_C, reduction="none"
        )
    if config.kl_weight:
        scale = config.kl_weight * config.temperature**2
        loss_C = loss_C + scale * _divergence(student_CV, teacher_CV, config)
    return loss_C


def _divergence(student_CV: Tensor, teacher_CV: Tensor, config: RecoveryConfig) -> Tensor:
    student = F.log_softmax(student_CV / config.temperature, dim=-1)
    teacher = F.log_softmax(teacher_CV / config.temperature, dim=-1)
    if config.top_k is not None and config.top_k < teacher.shape[-1]:
        kept_CK = teacher.topk(config.top_k, dim=-1).indices
        student, teacher = _lump(student, kept_CK), _lump(teacher, kept_CK)
    if config.divergence == "reverse":
        return (student.exp() * (student - teacher)).sum(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def _lump(log_CV: Tensor, kept_CK: Tensor) -> Tensor:
    """Log probabilities [C, K + 1] of the kept tokens, and of all the others together."""
    others = log_CV.scatter(-1, kept_CK, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_CV.gather(-1, kept_CK), others], dim=-1)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        teacher_NE: Tensor,
        targets_N: Tensor,
        heads: tuple[Logits, Logits],
        config: RecoveryConfig,
    ) -> Tensor:
        student_head, teacher_head = heads
        wanted = ctx.needs_input_grad[0]
        gradient_NE = torch.empty_like(hidden_NE) if wanted else None
        count, total, step = len(targets_N), None, _chunk(student_head, hidden_NE[:1])
        for start in range(0, count, step):
            part = slice(start, start + step)
            hidden_CE = hidden_NE[part].detach().requires_grad_(wanted)
            with torch.no_grad():
                teacher_CV = teacher_head(teacher_NE[part].detach())
            with torch.set_grad_enabled(wanted):
                student_CV = student_head(hidden_CE)
                teacher_CV = teacher_CV.to(student_CV.device)
                targets_C = targets_N[part].to(student_CV.device)
                loss = token_loss(student_CV, teacher_CV, targets_C, config).sum() / count
            if gradient_NE is not None:
                (gradient_NE[part],) = torch.autograd.grad(loss, hidden_CE)
            total = loss.detach() if total is None else total + loss.detach()
        ctx.gradient_NE = gradient_NE
        assert total is not None, "no token to predict"
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        gradient_NE, ctx.gradient_NE = ctx.gradient_NE, None
        if gradient_NE is not None:
            gradient_NE = gradient_NE * grad_outputs[0].to(gradient_NE.dtype)
        return gradient_NE, None, None, None, None


@torch.no_grad()
def _chunk(head: Logits, hidden_1E: Tensor) -> int:
    return max(1, LOSS_LOGITS // head(hidden_1E).shape[-1])


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


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
    """A list that receives what each attention layer adds to the hidden states, in order."""
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
