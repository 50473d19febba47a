"""One needle in a long document, as several experiments measure it: the loss of the answer.

Of documents whose answers are right or not few tell two models apart; their loss tells more.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rap.evaluation.retrieval.documents import ANSWER, answer_runs, encoder, score_documents
from rap.evaluation.retrieval.ruler import ruler_documents

TASK, LENGTH, DOCUMENTS = "single-needle", 4096, 8


def needles(tokenizer: Any, text: str) -> tuple[torch.Tensor, list[Any]]:
    """The tokens [N] of a text, and documents that are made of it."""
    ids = np.asarray(tokenizer(text, add_special_tokens=False).input_ids)
    asked: dict[str, Any] = {"num_documents": DOCUMENTS, "seed": 0}
    return torch.as_tensor(ids), ruler_documents(encoder(tokenizer), ids, TASK, LENGTH, **asked)


def score(model: Any, documents: Sequence[Any]) -> dict[str, float]:
    """Mean loss of the tokens of answers, and the share of documents whose answer is right."""
    losses, right = [], []
    for document, loss, guessed in score_documents(model, documents, 1, ANSWER):
        runs = [run - 1 for run in answer_runs(document)]  # guessed a token before
        losses += [float(loss[run].mean()) for run in runs]
        right += [bool(guessed[run].all()) for run in runs]
    return {"loss": float(np.mean(losses)), "right": float(np.mean(right))}
