"""Prefixes of calibration sources: their training and held-out parts, and repeated passages.

`held-out:SOURCE` is the tail of a text, `train:SOURCE` what comes before it; they share nothing.
They part a source that has no held-out split of its own.

`repeated:SOURCE` is a text in which every passage is read again: what makes a model look back.
Running text seldom asks for what stands far above, so calibration on it alone takes the heads that
would find it for useless (docs/log.md). Text that comes again is best predicted by looking up what
followed the first time, which is what induction heads do (Olsson et al. 2022,
https://arxiv.org/abs/2209.11895). No task is shown, only the text itself.
"""

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

REPEATED = "repeated:"  # passages twice, as `repeat_passages` has it
TRAIN, TAIL = "train:", "held-out:"
PREFIXES = (REPEATED, TRAIN, TAIL)
# The tail is a tenth of the text, but enough characters for eight windows of 2,048 tokens; of a
# short text at most a quarter, of a long one at most about a million tokens.
SHARE, SHORT_SHARE = 10, 4
LEAST, MOST = 96 * 2**10, 4_000_000


def without_prefixes(source: str | Path) -> str:
    """The name of a source behind any of PREFIXES."""
    name = str(source)
    while name.startswith(PREFIXES):
        name = name.partition(":")[2]
    return name


def training_part(text: str) -> str:
    """A text without its held-out tail."""
    return text[: _start(text)]


def held_out_part(text: str) -> str:
    """The tail of a text: whole lines where lines are short enough."""
    return text[_start(text) :]


def _start(text: str) -> int:
    """Where the tail begins."""
    size = min(max(len(text) // SHARE, LEAST), MOST, len(text) // SHORT_SHARE)
    start = len(text) - size
    end_of_line = text.find("\n", start, start + size // 2)
    return start if end_of_line < 0 else end_of_line + 1


PASSAGE = (30, 130)  # words
GROUP = (1, 6)  # passages that are read before the first of them comes again
# A longer run without a blank is of a script that has none between words, such as Chinese: two
# characters of it count as a word, and passages have about as many tokens as elsewhere.
LONGEST_WORD = 64
SEED = 0  # of no command: `repeated:` names one text, whatever is drawn from it


def repeat_passages(text: str) -> str:
    """All words of `text` in passages; each group is repeated in another order.

    Twice as long as the text. The same text gives the same passages.
    """
    rng = random.Random(SEED)
    words = _words(text)
    groups: list[str] = []
    while True:
        sizes = [rng.randint(*PASSAGE) for _ in range(rng.randint(*GROUP))]
        found = ("".join(islice(words, size)).strip() for size in sizes)
        passages = [passage for passage in found if passage]
        if not passages:
            return "\n\n".join(groups)
        again = rng.sample(passages, len(passages))
        groups.append("\n\n".join([*passages, *again]))


def _words(text: str) -> Iterator[str]:
    """All of the text but blanks before its first word, each with the blanks behind it."""
    for run in re.finditer(r"(\S+)\s*", text):
        if len(run[1]) <= LONGEST_WORD:
            yield run[0]
        else:
            yield from (piece[0] for piece in re.finditer(r"\S{1,2}\s*", run[0]))
