"""Does a model use its context? Recall of facts and copying of repeated passages.

Works with any causal language model that maps `input_ids` to `.logits`.

Shapes: B documents in a batch, T tokens, N tokens of text to build documents from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...data.bos import Bos, bos_token
from ...data.protocol import evaluation_rng
from ...model.errors import RapError
from ...model.layers import text_config
from .documents import (
    Document,
    FactWriter,
    check_documents,
    check_grid,
    copy_document,
    grade,
    opened,
    recall_document,
    score_documents,
    stretch,
)

MOST_LOGITS = 2**28  # held at once: 1 GiB of float32, which eight documents of Gemma's would pass


@dataclass(frozen=True)
class RecallCell:
    """Accuracy over `num_documents` questions at one distance (tokens) and number of facts."""

    distance: int
    num_facts: int
    num_documents: int
    accuracy: float
    token_accuracy: float


@dataclass(frozen=True)
class CopyLoss:
    """Mean loss (nats per token) on a passage the first and the second time it is read."""

    passage: int
    distance: int
    num_documents: int
    first: float
    second: float

    @property
    def gain(self) -> float:
        """How much easier the passage is the second time (nats per token); 0 without copying."""
        return self.first - self.second


@torch.no_grad()
def recall_grid(
    model: torch.nn.Module,
    tokenizer: Any,
    text_ids: np.ndarray,
    *,
    distances: Sequence[int] = (64, 128, 256, 512, 1000, 1500),
    facts: Sequence[int] = (1, 4, 16),
    num_documents: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    bos: Bos = "auto",
    wording: str = "plain",
    progress: bool = False,
) -> list[RecallCell]:
    """Recall accuracy over distance (tokens) x number of facts, questions set in `text_ids` [N].

    `accuracy` is the share of answers whose every token is the greedy choice given the tokens
    before it, which is when greedy decoding writes the answer; `token_accuracy` is by token. Every
    document begins with BOS as `bos.bos_token` decides. `wording` is one of documents.WORDINGS:
    `plain` is what the bundled model was trained on, `natural` for any that was really pretrained.
    Raises RapError for no documents, or documents that cannot be made.
    """
    check_grid(num_documents, distances, facts)
    text = np.asarray(text_ids)
    first = bos_token(bos, tokenizer, getattr(model, "config", None))
    asked: dict[str, Any] = {"num_documents": num_documents, "seed": seed, "bos": first}
    writer = FactWriter(tokenizer, wording=wording)
    # All are made before any is read, so that what cannot be made is known at once.
    made = {
        (distance, num_facts): recall_documents(writer, text, distance, num_facts, **asked)
        for distance in distances
        for num_facts in facts
    }
    graded = grade(model, made, batch_size, "recall", progress)
    return [
        RecallCell(*place, num_documents, float(np.mean(shares)), token)
        for place, (shares, token) in zip(made, graded, strict=True)
    ]


def recall_documents(
    writer: FactWriter,
    text: np.ndarray,
    distance: int,
    num_facts: int,
    *,
    num_documents: int,
    seed: int,
    bos: int | None = None,
) -> list[Document]:
    """The documents of one point of `recall_grid`, the same for every model.

    Raises RapError if the text is short, or they cannot be made.
    """
    rng = evaluation_rng(seed, distance, num_facts)
    need = distance + 16 + 8 * num_facts
    documents = []
    for _ in range(num_documents):
        filler = _stretch(text, rng, need)
        document = recall_document(writer, filler, rng, distance, num_facts)
        documents.append(opened(document, bos))
    return documents


def copy_loss(
    model: torch.nn.Module,
    text_ids: np.ndarray,
    *,
    passage: int = 128,
    distance: int = 512,
    num_documents: int = 32,
    batch_size: int = 8,
    seed: int = 0,
    bos: Bos = "auto",
) -> CopyLoss:
    """Loss on a passage of text read a second time, `distance` tokens after the first.

    The first token of each reading is left out: nothing announces the repetition. `bos` begins a
    document as in `perplexity`. Raises RapError for no documents, a text that is short, or a
    passage that is longer than the distance.
    """
    check_documents(num_documents, batch_size)
    text, bos = np.asarray(text_ids), bos_token(bos, config=getattr(model, "config", None))
    if passage < 2:
        raise RapError(f"a passage of {passage} tokens predicts nothing: give 2 or more")
    if distance < passage:
        raise RapError(
            f"a passage of {passage} tokens cannot come again after {distance}: give a distance of "
            "that many or more"
        )
    rng = evaluation_rng(seed, passage, distance)
    documents = []
    for _ in range(num_documents):
        repeated, filler = (_stretch(text, rng, distance) for _ in range(2))
        document = copy_document(repeated[:passage], filler[: distance - passage])
        documents.append(opened(document, bos))
    batch_size = _fitting(model, batch_size, len(documents[0].ids))
    losses = np.stack([loss for _, loss, _ in score_documents(model, documents, batch_size)])
    losses = losses[:, bos is not None :]  # after BOS the first token is predicted as well
    first, second = losses[:, : passage - 1].mean(), losses[:, -(passage - 1) :].mean()
    return CopyLoss(passage, distance, num_documents, float(first), float(second))


def _fitting(model: Any, batch_size: int, num_tokens: int) -> int:
    """Documents at once whose logits, of every token, stay within MOST_LOGITS."""
    config = getattr(model, "config", None)
    size = 1 if config is None else text_config(config).vocab_size
    return max(1, min(batch_size, MOST_LOGITS // (num_tokens * size)))


def _stretch(text: np.ndarray, rng: np.random.Generator, length: int) -> np.ndarray:
    """As `documents.stretch`, of `length` tokens; RapError for a text that has fewer."""
    if len(text) < length:
        raise RapError(
            f"a document needs {length} tokens, and the text has {len(text)}: give a longer text "
            "or a shorter distance"
        )
    return stretch(text, rng, length)
