"""Training and held-out part of a calibration source that has no held-out split of its own.

`held-out:SOURCE` is the tail of a text, `train:SOURCE` what comes before it; they share nothing.
"""

from pathlib import Path

REPEATED = "repeated:"  # passages twice, as `repeats.repeat_passages` has it
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
