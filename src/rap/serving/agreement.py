"""How far an engine's tokens and log-probabilities are from a reference model's.

The reference reads the engine's own tokens in one pass without a cache, so a greedy token that
differs is counted once and does not spoil the ones behind it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .engine import Transcript


@dataclass(frozen=True)
class Agreement:
    """Compared tokens, greedy choices that differ, and the largest |difference| in nats."""

    num_tokens: int
    mismatched_tokens: int
    max_logprob_error: float


@torch.no_grad()
def agreement(reference: PreTrainedModel, transcripts: Iterable[Transcript]) -> Agreement:
    """Compare transcripts with a reference causal LM (run in its own dtype, uncached)."""
    num_tokens = mismatched = 0
    largest = 0.0
    for transcript in transcripts:
        logprobs_TV = reference_logprobs(reference, transcript)
        start = len(transcript.prompt) - 1
        chosen = torch.tensor(transcript.tokens)
        mismatched += int((logprobs_TV[start:].argmax(-1) != chosen).sum())
        errors = _errors(logprobs_TV[start:], chosen, transcript.logprobs)
        if transcript.prompt_logprobs:
            read = torch.tensor(transcript.prompt[1:])
            errors += _errors(logprobs_TV[:start], read, transcript.prompt_logprobs)
        num_tokens += len(errors)
        largest = max([largest, *errors])
    return Agreement(num_tokens, mismatched, largest)


def reference_logprobs(reference: PreTrainedModel, transcript: Transcript) -> Tensor:
    """log p(next token | tokens so far), [T, V] in float64 on the CPU."""
    ids = torch.tensor([transcript.prompt + transcript.tokens[:-1]])
    logits = reference(input_ids=ids.to(reference.device), use_cache=False).logits[0]
    return logits.double().log_softmax(-1).cpu()


def _errors(logprobs_TV: Tensor, tokens: Tensor, reported: list[float]) -> list[float]:
    expected = logprobs_TV.gather(1, tokens[:, None])[:, 0]
    errors: list[float] = (expected - torch.tensor(reported, dtype=torch.float64)).abs().tolist()
    return errors
