"""Documents that cannot be predicted without their context: facts asked for again, and copies.

A recall document is running text with facts and questions dropped into it:

    ... The number of Lucy is 4821. ... What is the number of Lucy? 4821. ...

A `Wording` says how. A model that never saw such questions hardly knows that a number follows one
at once; in the wording `natural` the fact is begun again, and has to be ended.

The numbers are drawn at random for every document, so an answer can only come from the context. The
same makers serve training and evaluation, which are kept apart by their seeds (`evaluation_rng`).

An answer is read by the model instead of written: it is right if every token of it is the greedy
choice given all before it, the right answers before it included, which is when greedy decoding
would write it. So a first wrong answer costs nothing of the next, and an answer in other words, or
in another order, is wrong.

Shapes: B documents in a batch, T tokens.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...model.errors import RapError
from ...runtime.progress import Progress
from ...runtime.state import evaluating

# fmt: off
NAMES = (
    "Adam", "Albert", "Alice", "Amy", "Andrew", "Anna", "Arthur", "Barbara", "Betty", "Bob",
    "Caroline", "Charles", "Clara", "Daniel", "David", "Dick", "Dora", "Edgar", "Edith", "Edward",
    "Ellen", "Emily", "Evelyn", "Fanny", "Florence", "Frank", "Fred", "George", "Gerald", "Grace",
    "Harold", "Harriet", "Harry", "Helen", "Henry", "Hester", "Jack", "James", "Jane", "John",
    "Joseph", "Julia", "Kate", "Katharine", "Kitty", "Laura", "Leonard", "Lucy", "Margaret",
    "Maria", "Mark", "Martha", "Mary", "Molly", "Nancy", "Oliver", "Paul", "Peter", "Philip",
    "Polly", "Ralph", "Richard", "Robert", "Roger", "Rose", "Ruth", "Sam", "Sarah", "Susan",
    "Sylvia", "Thomas", "Tom", "Ursula", "Violet", "Virginia", "Walter", "William",
)
# fmt: on
TEXT, STATED, ANSWER = 0, 1, 2  # running text, what a document tells (a number), its answer


NUMBERS = tuple(f" {digit}{digit}{digit}{digit}" for digit in range(1, 10))  # one a first digit

Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Document:
    """Token ids and the kind of each token (TEXT, STATED or ANSWER), both int64 [T]."""

    ids: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True)
class Wording:
    """The words before the number in a fact and in a question; `{name}` is its owner.

    With `digits_only` tokens before the number that all numbers share, such as a blank that is a
    token of its own, are TEXT: who knows them knows nothing of the number.
    """

    fact: str
    question: str
    digits_only: bool


WORDINGS = {
    # What the bundled model was trained on.
    "plain": Wording(" The number of {name} is", " What is the number of {name}?", False),
    "natural": Wording(
        " The special number of {name} is",
        " Question: What is the special number of {name}? Answer: The special number of {name} is",
        True,
    ),
}


def check_wording(wording: str) -> str:
    """The name itself; RapError if there is no such wording."""
    if wording not in WORDINGS:
        raise RapError(f"unknown wording {wording!r}: use {', '.join(WORDINGS)}")
    return wording


class FactWriter:
    """Writes facts and questions as token ids, each piece encoded once and remembered.

    Raises RapError for a wording that is not one of WORDINGS.
    """

    def __init__(self, tokenizer: Any, wording: str = "plain") -> None:
        self.wording = WORDINGS[check_wording(wording)]
        self._encode = encoder(tokenizer)

    def fact(self, name: str, number: int) -> tuple[list[int], list[int]]:
        """Ids and kinds of a fact, in plain wording ` The number of NAME is NUMBER.`"""
        return self._join(self.wording.fact.format(name=name), number, STATED)

    def question(self, name: str, number: int) -> tuple[list[int], list[int]]:
        """Ids and kinds of a question, in plain wording ` What is the number of NAME? NUMBER.`"""
        return self._join(self.wording.question.format(name=name), number, ANSWER)

    def _join(self, stem: str, number: int, kind: int) -> tuple[list[int], list[int]]:
        tokens = self._encode(f" {number}")
        blank = self._num_shared if self.wording.digits_only else 0
        parts = [
            (self._encode(stem), TEXT),
            (tokens[:blank], TEXT),
            (tokens[blank:], kind),
            (self._encode("."), TEXT),
        ]
        ids = [token for tokens, _ in parts for token in tokens]
        return ids, [k for tokens, k in parts for _ in tokens]

    @functools.cached_property
    def _num_shared(self) -> int:
        return num_shared([self._encode(number) for number in NUMBERS])


def encoder(tokenizer: Any) -> Encode:
    """Token ids of a text without special tokens, each text encoded once and remembered."""
    return functools.cache(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))


def num_shared(pieces: Iterable[Sequence[int]]) -> int:
    """How many tokens all the pieces begin with, which do not distinguish them."""
    columns = zip(*pieces, strict=False)
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))


def check_documents(num_documents: int, batch_size: int = 1) -> None:
    """RapError for a number of documents, in all or at once, that is too small to evaluate."""
    if batch_size < 1:
        raise RapError(f"batch_size must be at least 1, not {batch_size}")
    if num_documents < 1:
        raise RapError(f"cannot evaluate on {num_documents} documents; use at least one")


def check_grid(num_documents: int, lengths: Iterable[int] = (), facts: Iterable[int] = ()) -> None:
    """RapError for numbers of documents, tokens and facts that no tokenizer makes possible.

    Needs no text, of which a long one takes a minute to read. `lengths` may be distances.
    """
    check_documents(num_documents)
    for length in lengths:
        if length < 1:
            raise RapError(f"there is nothing in {length} tokens: use at least one")
    for count in facts:
        _check_facts(count, len(NAMES))


def _check_facts(count: int, num_names: int) -> None:
    if not 1 <= count <= num_names:
        raise RapError(f"there cannot be {count} facts: use 1 to {num_names}")


def draw_facts(writer: FactWriter, rng: np.random.Generator, count: int) -> list[tuple[str, int]]:
    """`count` different names, each with a random number of four digits.

    Raises RapError unless there is one to ask for, and a name for each.
    """
    _check_facts(count, len(NAMES))
    picked = rng.choice(len(NAMES), count, replace=False)
    return [(NAMES[i], int(rng.integers(1000, 10000))) for i in picked]


def interleave(filler: np.ndarray, events: Iterable[tuple[int, list[int], list[int]]]) -> Document:
    """Insert (position in the filler, ids, kinds) events into the filler, in order of position."""
    ids: list[np.ndarray] = []
    kinds: list[np.ndarray] = []
    done = 0
    for position, event_ids, event_kinds in sorted(events, key=lambda event: event[0]):
        ids += [filler[done:position], np.array(event_ids)]
        kinds += [np.zeros(position - done, int), np.array(event_kinds)]
        done = position
    ids.append(filler[done:])
    kinds.append(np.zeros(len(filler) - done, int))
    return Document(np.concatenate(ids).astype(np.int64), np.concatenate(kinds).astype(np.int64))


def recall_document(
    writer: FactWriter, filler: np.ndarray, rng: np.random.Generator, distance: int, num_facts: int
) -> Document:
    """A document that ends in one question, `distance` tokens after its fact.

    The distance runs from the fact's number to the answer. The other facts stand at random places
    of the text between and before; `filler` gives the text and needs `distance` tokens and more.
    Raises RapError if it has fewer, or the question does not go into the distance.
    """
    (name, number), *others = draw_facts(writer, rng, num_facts)
    fact, question = writer.fact(name, number), writer.question(name, number)
    room = distance - len(question[0])
    if room < 0:
        raise RapError(
            f"a fact cannot be {distance} tokens before its answer, since the question has "
            f"{len(question[0])}; use a distance of that many or more"
        )
    between, before = [], []
    for other in others:
        statement = writer.fact(*other)
        if len(statement[0]) <= room and rng.random() < 0.8:
            between.append(statement)
            room -= len(statement[0])
        else:
            before.append(statement)
    lead = 16 + 8 * len(before)
    if len(filler) < lead + room:
        raise RapError(
            f"a document needs {lead + room} tokens, and the text has {len(filler)}: "
            "give a longer text"
        )
    events = [(int(rng.integers(0, lead)), *statement) for statement in before]
    events.append((lead, *fact))
    events += [(int(rng.integers(lead, lead + room + 1)), *statement) for statement in between]
    events.append((lead + room, *question))
    document = interleave(filler[: lead + room], events)
    end = int(np.flatnonzero(document.kinds == ANSWER)[-1]) + 1
    return Document(document.ids[:end], document.kinds[:end])


def stretch(text: np.ndarray, rng: np.random.Generator, length: int) -> np.ndarray:
    """`length` tokens of the text from anywhere, or all of a text that has no more."""
    start = int(rng.integers(0, max(1, len(text) - length + 1)))
    return text[start : start + length]


def opened(document: Document, bos: int | None) -> Document:
    """The document after a BOS, if there is one."""
    if bos is None:
        return document
    start = [np.array([value], np.int64) for value in (bos, TEXT)]
    ids, kinds = (
        np.concatenate(pair) for pair in zip(start, (document.ids, document.kinds), strict=True)
    )
    return Document(ids, kinds)


def copy_document(passage: np.ndarray, filler: np.ndarray) -> Document:
    """A passage, other text, the same passage again; its second reading is marked ANSWER."""
    ids = np.concatenate([passage, filler, passage]).astype(np.int64)
    kinds = np.full(len(ids), TEXT, np.int64)
    kinds[-len(passage) :] = ANSWER
    return Document(ids, kinds)


def grade(
    model: torch.nn.Module,
    made: Mapping[Any, Sequence[Document]],
    batch_size: int,
    what: str,
    progress: bool,
) -> list[tuple[list[float], float]]:
    """The share of right answers of each document, and of all tokens, by the keys of `made`.

    `what` names the progress bar, which is in documents.
    """
    total = sum(map(len, made.values()))
    with Progress(what, total, "documents", shown=progress, transient=True) as bar:
        return [_grade(model, documents, batch_size, bar) for documents in made.values()]


def _grade(
    model: torch.nn.Module, documents: Sequence[Document], batch_size: int, bar: Progress
) -> tuple[list[float], float]:
    shares, tokens = [], []
    for document, _, right in score_documents(model, documents, batch_size, ANSWER):
        # The token at place t is guessed at t - 1.
        answers = [right[run - 1] for run in answer_runs(document)]
        shares.append(float(np.mean([answer.all() for answer in answers])))
        tokens += answers
        bar.advance()
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
    which five are an answer take longer than the layers below them. Raises RapError for a loss that
    is NaN, and for a batch without a document.
    """
    check_documents(max(1, len(documents)), batch_size)
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
        check_numbers(loss.view_as(targets)[wanted_BP.to(loss.device)])
        loss_BT[wanted_BT] = loss.view_as(targets)[wanted_BP].cpu().numpy()
        right_BT[wanted_BT] = (logits.argmax(-1) == targets)[wanted_BP].cpu().numpy()
        for document, losses, right in zip(batch, loss_BT, right_BT, strict=True):
            last = len(document.ids) - 1
            yield document, losses[:last], right[:last]


def check_numbers(loss: Tensor) -> None:
    """Raise RapError for losses (nats) of which one is NaN: that would count as a wrong answer."""
    if loss.isnan().any():
        raise RapError(
            "the loss of an answer is NaN: the weights hold NaN or inf, or activations overflow; "
            "check the checkpoint, in float32"
        )


def _logits_at(model: torch.nn.Module, ids_BT: Tensor, places: Tensor) -> Tensor:
    """Logits [B, P, V] at P places of every row, and at no others where the model can leave out."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(input_ids=ids_BT, use_cache=False, logits_to_keep=places).logits
    return model(input_ids=ids_BT, use_cache=False).logits[:, places]
