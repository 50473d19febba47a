"""Tasks of long context after RULER: what a document states, what it asks, and the answers.

RULER is Hsieh et al. 2024, arXiv 2404.06654; the code and the words are our own. A task draws all
of its names and values at random, so that answers can only come from the document. Words and
numbers that are not asked for differ from those that are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .documents import NAMES, NUMBERS, WORDINGS

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
