"""Answers read by a model instead of written: one grader of all retrieval tasks.

An answer is right if every token of it is the greedy choice given all before it, the right answers
before it included, which is when greedy decoding would write it. So a first wrong answer costs
nothing of the next, and an answer in other words, or in another order, is wrong.

Shapes: B documents in a batch, T tokens.
"""

import inspect
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...runtime.state import evaluating
from .documents import ANSWER, Document


def grade(
    model: torch.nn.Module, documents: Sequence[Document], batch_size: int
) -> tuple[list[float], float]:
    """The share of right answers of every document, and that of all tokens of answers."""
    shares, tokens = [], []
    for document, _, right in score_documents(model, documents, batch_size, ANSWER):
        # The token at place t is guessed at t - 1.
        answers = [right[run - 1] for run in answer_runs(document)]
        shares.append(float(np.mean([answer.all() for answer in answers])))
        tokens += answers
    return shares, float(np.mean(np.concatenate(tokens)))


def answer_runs(document: Document) -> list[np.ndarray]:
    """The places of each answer's tokens, int64 arrays in the order of the document."""
    marked = np.flatnonzero(document.kinds == ANSWER)
    return np.split(marked, np.flatnonzero(np.diff(marked) > 1) + 1)


@torch.no_grad()
def score_documents(
    model: torch.nn.Module,
    documents: Sequence[Document],
    batch_size: int,
    kind: int | None = None,
) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
    """For each document the loss (nats) and whether the greedy guess is right, both [T - 1].

    Documents of a batch are padded on the right, where a causal model cannot look. With a `kind`
    only its tokens are scored, and the others are NaN and False: logits of a thousand tokens of
    which five are an answer take longer than the layers below them.
    """
    device = next(model.parameters()).device
    for start in range(0, len(documents), batch_size):
        batch = documents[start : start + batch_size]
        longest = max(len(document.ids) for document in batch)
        ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
        wanted_BT = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
        for row, wanted, document in zip(ids_BT, wanted_BT, batch, strict=True):
            row[: len(document.ids)] = torch.from_numpy(document.ids)
            kinds = torch.from_numpy(document.kinds[1:])
            wanted[: len(kinds)] = True if kind is None else kinds == kind
        places = wanted_BT.any(0).nonzero().flatten()
        loss_BT, right_BT = np.full(wanted_BT.shape, np.nan), np.zeros(wanted_BT.shape, dtype=bool)
        with evaluating(model):
            logits = _logits_at(model, ids_BT.to(device), places.to(device)).float()
        targets = ids_BT[:, places + 1].to(device)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        wanted_BP = wanted_BT[:, places]
        loss_BT[wanted_BT] = loss.view_as(targets)[wanted_BP].cpu().numpy()
        right_BT[wanted_BT] = (logits.argmax(-1) == targets)[wanted_BP].cpu().numpy()
        for document, losses, right in zip(batch, loss_BT, right_BT, strict=True):
            last = len(document.ids) - 1
            yield document, losses[:last], right[:last]


def _logits_at(model: torch.nn.Module, ids_BT: Tensor, places: Tensor) -> Tensor:
    """Logits [B, P, V] at P places of every row, and at no others where the model can leave out."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=places).logits
    return model(input_ids=ids_BT, use_cache=False).logits[:, places]
