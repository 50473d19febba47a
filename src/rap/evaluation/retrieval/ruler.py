"""Use of a long context by six tasks after RULER, scored without generation.

A task says what a document states, what it asks, and the answers; the code and the words are our
own. It draws all of its names and values at random, so that answers can only come from the
document. Words and numbers that are not asked for differ from those that are.

RULER (Hsieh et al. 2024, arXiv 2404.06654) lets a model write, and looks for the answers anywhere
in what it wrote. Here the answers stand at the end of the document and the model reads them: one is
right if every token of it is the greedy choice given all before it, the right answers before it
included. So an answer in other words or in another order is wrong, and the question says which
order is meant; a first wrong answer costs nothing of the next. Scores are therefore to be compared
with each other, not with published ones.

Shapes: T tokens, N tokens of text to build documents from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...checkpoint.card import interval_text
from ...data.bos import Bos, bos_token
from ...data.protocol import evaluation_rng
from ...model.errors import RapError
from ..quality.intervals import Interval, mean_interval
from ..quality.perplexity import check_sizes
from .documents import (
    ANSWER,
    NAMES,
    NUMBERS,
    STATED,
    TEXT,
    WORDINGS,
    Document,
    Encode,
    check_grid,
    encoder,
    grade,
    interleave,
    num_shared,
    opened,
    stretch,
)

NUM_NEEDLES = 4  # keys, values of one key, or people with a box each
CHAIN = 4  # variables of a chain
NUM_COMMON, NUM_RARE = 10, 30  # places of the common word, and other words, in a round of the list
# fmt: off
WORDS = (
    "apple", "arrow", "basket", "beach", "bottle", "bread", "bridge", "butter", "candle", "carpet",
    "castle", "chair", "cheese", "clock", "cloud", "copper", "cotton", "desert", "dragon", "eagle",
    "engine", "feather", "flower", "forest", "garden", "glass", "hammer", "harbor", "honey",
    "island", "jacket", "kitchen", "ladder", "lemon", "letter", "market", "mirror", "monkey",
    "mountain", "needle", "ocean", "orange", "paper", "pencil", "pepper", "planet", "pocket",
    "rabbit", "river", "rocket", "salt", "shadow", "silver", "spoon", "station", "stone", "sugar",
    "table", "tiger", "tower", "train", "valley", "violin", "wagon", "water", "window", "winter",
)
# fmt: on
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "orange", "purple", "pink")
VARIABLES = tuple(f" X{number.strip()[1:]}" for number in NUMBERS)  # one a first digit

Pieces = tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """Statements in the order of the text, a question up to its answers, and these in order.

    A statement is a tuple of pieces. Pieces and answers are encoded each by itself, so that a value
    has the same tokens where it is stated and where it is asked for. `alike` are answers such as
    might have been: tokens that all of them begin with tell nothing.
    """

    statements: list[Pieces]
    question: str
    answers: Pieces
    alike: Pieces = NUMBERS


# Of a generator, the tokens of a document, and what counts the tokens of a text.
Task = Callable[[np.random.Generator, int, Callable[[str], int]], Script]


def single_needle(rng: np.random.Generator, length: int, size: Callable[[str], int]) -> Script:
    """One name with a number, which is asked for."""
    return _needles(rng, 1)


def multi_key(rng: np.random.Generator, length: int, size: Callable[[str], int]) -> Script:
    """Four names with a number each, of which one is asked for."""
    return _needles(rng, NUM_NEEDLES)


def multi_value(rng: np.random.Generator, length: int, size: Callable[[str], int]) -> Script:
    """Four numbers of one name, all asked for in their order in the text."""
    (name,) = _pick(rng, NAMES, 1)
    values = _numbers(rng, NUM_NEEDLES)
    asked = f"special numbers of {name}, in the order of the text,"
    return Script(
        [(f" One of the special numbers of {name} is", value, ".") for value in values],
        f" Question: What are the {asked} one after another? Answer: The {asked} are",
        values,
    )


def variable_tracking(rng: np.random.Generator, length: int, size: Callable[[str], int]) -> Script:
    """Two chains of four variables, the first given a value and each other the one before.

    All variables with one of the two values are asked for, in the order in which they get it.
    """
    numbers = rng.choice(900, 2 * CHAIN, replace=False) + 100
    variables = [f" X{number}" for number in numbers]
    values = _numbers(rng, 2)
    # The next statement of either chain: each stays in its order.
    turns = rng.permutation([0, 1] * CHAIN)
    chains: list[list[str]] = [[], []]
    statements: list[Pieces] = []
    for variable, chain in zip(variables, turns, strict=True):
        before = chains[chain][-1] if chains[chain] else None
        value = (values[chain],) if before is None else (" VAR", before)
        statements.append((" VAR", variable, " =", *value, "."))
        chains[chain].append(variable)
    asked = f"variables that hold the value{values[0]}, in the order of the text,"
    question = f" Question: Which are the {asked} one after another? Answer: The {asked} are"
    return Script(statements, question, tuple(chains[0]), VARIABLES)


def common_words(rng: np.random.Generator, length: int, size: Callable[[str], int]) -> Script:
    """A list of words that fills the document, one of them ten times as frequent as any other.

    The list is made of whole rounds of 40 places: ten of the common word, and 30 other words. So
    its words stand at random places of every round, and the share is the same at every length.
    """
    common, *others = _pick(rng, WORDS, 1 + NUM_RARE)
    asked = "most common word in the list of words"
    question = f' Question: What is the {asked}? Answer: The {asked} is "'
    start, before, after = " Here is a list of words:", ' "', '",'
    words = [*[common] * NUM_COMMON, *others]
    one = sum(size(piece) for word in words for piece in (before, word, after))
    rounds = (length - size(start) - size(question) - size(common)) // one
    listed = [words[at] for _ in range(max(1, rounds)) for at in rng.permutation(len(words))]
    pieces = [piece for word in listed for piece in (before, word, after)]
    return Script([(start, *pieces)], question, (common,), WORDS)


def two_hop(rng: np.random.Generator, length: int, size: Callable[[str], int]) -> Script:
    """Four names with a box each, and four boxes with a number; the number of one name is asked."""
    names, colors = _pick(rng, NAMES, NUM_NEEDLES), _pick(rng, COLORS, NUM_NEEDLES)
    values = _numbers(rng, NUM_NEEDLES)
    pairs = list(zip(names, colors, values, strict=True))
    kept = [(f" The special number of {name} is in the {color} box.",) for name, color, _ in pairs]
    held = [(f" The number in the {color} box is", value, ".") for _, color, value in pairs]
    statements: list[Pieces] = [*kept, *held]
    question = (
        f" Question: The box of {names[0]} holds which number? "
        f"Answer: The number in the box of {names[0]} is"
    )
    return Script([statements[at] for at in rng.permutation(len(statements))], question, values[:1])


TASKS: dict[str, Task] = {
    "single-needle": single_needle,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "variable-tracking": variable_tracking,
    "common-words": common_words,
    "two-hop": two_hop,
}


def _needles(rng: np.random.Generator, count: int) -> Script:
    names, values = _pick(rng, NAMES, count), _numbers(rng, count)
    wording = WORDINGS["natural"]
    facts = zip(names, values, strict=True)
    statements: list[Pieces] = [(wording.fact.format(name=name), v, ".") for name, v in facts]
    question = wording.question.format(name=names[0])
    return Script([statements[at] for at in rng.permutation(count)], question, values[:1])


def _pick(rng: np.random.Generator, words: tuple[str, ...], count: int) -> list[str]:
    return [words[at] for at in rng.choice(len(words), count, replace=False)]


def _numbers(rng: np.random.Generator, count: int) -> Pieces:
    """Different numbers of four digits, with the blank before them."""
    return tuple(f" {number + 1000}" for number in rng.choice(9000, count, replace=False))


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
            f"{length - room}: use longer documents"
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
    """The documents of one point of `ruler_grid`, the same for every model; BOS is one token."""
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
    progress: bool = False,
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
    graded = grade(model, made, batch_size, "retrieval", progress)
    return [
        RulerCell(*place, num_documents, mean_interval(shares), token)
        for place, (shares, token) in zip(made, graded, strict=True)
    ]


def check_tasks(tasks: Sequence[str], beside: Sequence[str] = ()) -> None:
    """RapError for a task that is not one of TASKS; it names those `beside` them too."""
    for task in tasks:
        if task not in TASKS:
            raise RapError(f"unknown task {task!r}: use {', '.join((*TASKS, *beside))}")


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
