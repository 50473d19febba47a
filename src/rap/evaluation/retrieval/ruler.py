"""Use of a long context by six tasks after RULER, scored without generation.

RULER (Hsieh et al. 2024, arXiv 2404.06654) lets a model write, and looks for the answers anywhere
in what it wrote. Here the answers stand at the end of the document and the model reads them: one is
right if every token of it is the greedy choice given all before it, the right answers before it
included. So an answer in other words or in another order is wrong, and the question says which
order is meant; a first wrong answer costs nothing of the next. Scores are therefore to be compared
with each other, not with published ones.

Shapes: T tokens, N tokens of text to build documents from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...checkpoint.card import interval_text
from ...data.bos import Bos, bos_token
from ...model.errors import RapError
from ...runtime.state import evaluating
from ..quality.intervals import Interval, mean_interval
from ..quality.perplexity import check_sizes
from .documents import (
    ANSWER,
    STATED,
    TEXT,
    Document,
    Encode,
    check_grid,
    encoder,
    evaluation_rng,
    interleave,
    num_shared,
    opened,
    stretch,
)
from .ruler_tasks import TASKS, Script
from .scoring import grade


@dataclass(frozen=True)
class RulerCell:
    """Score of one task on `num_documents` documents of exactly `length` tokens.

    `accuracy` is the mean over documents of the share of answers that are right, with its bootstrap
    interval over documents; `token_accuracy` is the share of all tokens of answers.
    """

    task: str
    length: int
    num_documents: int
    accuracy: Interval
    token_accuracy: float


def ruler_document(
    encode: Encode, text: np.ndarray, rng: np.random.Generator, task: str, length: int
) -> Document:
    """A document of exactly `length` tokens: text with statements in it, a question, its answers.

    Statements are marked STATED, and stand anywhere in a stretch of `text` [N], in the order that
    the task wants. Each answer is a run of ANSWER (`answer_runs`), the last the document's end.
    Raises RapError if what the task writes is longer than the document, or the text too short.
    """
    script = TASKS[task](rng, length, lambda piece: len(encode(piece)))
    stated = [[token for piece in one for token in encode(piece)] for one in script.statements]
    ending, kinds = _ending(encode, script)
    room = length - len(ending) - sum(map(len, stated))
    if room < 0:
        raise RapError(
            f"a document of {length} tokens has no room for the task {task}, which takes "
            f"{length - room}: ask for longer documents"
        )
    if len(text) < room:
        raise RapError(f"the text has {len(text)} tokens, {room} are needed: give a longer text")
    places = np.sort(rng.integers(0, room + 1, len(stated))).tolist()
    events = [(at, ids, [STATED] * len(ids)) for at, ids in zip(places, stated, strict=True)]
    return interleave(stretch(text, rng, room), [*events, (room, ending, kinds)])


def _ending(encode: Encode, script: Script) -> tuple[list[int], list[int]]:
    """Ids and kinds of the question and its answers, with a comma between two of these."""
    blank = num_shared([encode(answer) for answer in script.alike])
    parts = [(encode(script.question), TEXT)]
    for number, answer in enumerate(script.answers):
        tokens = encode(answer)
        comma = encode(",") if number else ()
        parts += [(comma, TEXT), (tokens[:blank], TEXT), (tokens[blank:], ANSWER)]
    ids = [token for tokens, _ in parts for token in tokens]
    return ids, [kind for tokens, kind in parts for _ in tokens]


def ruler_documents(
    encode: Encode,
    text: np.ndarray,
    task: str,
    length: int,
    *,
    num_documents: int,
    seed: int,
    bos: int | None = None,
) -> list[Document]:
    """The documents of one cell of `ruler_grid`, the same for every model; BOS is one token."""
    # Spelled out, so that a task has the same documents whatever others there are.
    rng = evaluation_rng(seed, length, *task.encode())
    size = length if bos is None else length - 1
    return [
        opened(ruler_document(encode, text, rng, task, size), bos) for _ in range(num_documents)
    ]


def ruler_grid(
    model: Any,
    tokenizer: Any,
    text_ids: np.ndarray,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = (1024, 2048, 4096, 8192),
    num_documents: int = 32,
    batch_size: int = 1,
    seed: int = 0,
    bos: Bos = "auto",
) -> list[RulerCell]:
    """Scores over tasks x length (tokens), in documents made of `text_ids` [N].

    An answer is right if every token of it is the greedy choice (see the module); a document with
    several scores the share that is right. Tokens that all possible answers begin with, such as a
    blank, do not count. A length beyond the model's positions is measured all the same. Raises
    RapError for an unknown task, no documents, none at a time, or documents that cannot be made.
    """
    check_tasks(tasks)
    check_grid(num_documents, lengths)
    check_sizes(batch_size=batch_size)
    first = bos_token(bos, tokenizer, getattr(model, "config", None))
    asked: dict[str, Any] = {"num_documents": num_documents, "seed": seed, "bos": first}
    text, encode = np.asarray(text_ids), encoder(tokenizer)
    # All are made before any is read, so that a task without room ends at once.
    made = {
        (task, length): ruler_documents(encode, text, task, length, **asked)
        for task in tasks
        for length in lengths
    }
    with evaluating(model):
        return [
            _cell(model, task, length, documents, batch_size)
            for (task, length), documents in made.items()
        ]


def check_tasks(tasks: Sequence[str], beside: Sequence[str] = ()) -> None:
    """RapError for a task that is not one of TASKS; it names those `beside` them too."""
    for task in tasks:
        if task not in TASKS:
            raise RapError(f"unknown task {task!r}: use {', '.join((*TASKS, *beside))}")


def _cell(
    model: Any, task: str, length: int, documents: Sequence[Document], batch_size: int
) -> RulerCell:
    shares, token = grade(model, documents, batch_size)
    return RulerCell(task, length, len(documents), mean_interval(shares), token)


def ruler_table(title: str, cells: Sequence[RulerCell]) -> dict[str, Any]:
    """Title, header and rows: a row a task, a column a length, the share of right answers."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    scores = {(cell.task, cell.length): cell.accuracy for cell in cells}
    rows = [
        [task, *(interval_text(vars(scores[task, length]), ".0%") for length in lengths)]
        for task in tasks
    ]
    header = ["task", *(f"{length:,} tokens" for length in lengths)]
    return {"title": title, "header": header, "rows": rows}
