"""Evaluation datasets: the split of the calibration data that nothing is calibrated or trained on.

Shapes: N tokens of a text.
"""

from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import assets
from ..model.errors import CalibrationError, RapError
from .hub import ALIASES, EVALUATED_ON, is_streamed
from .own import OWN
from .protocol import EVALUATION_WINDOW
from .splits import REPEATED, TAIL, TRAIN, repeat_passages, without_prefixes
from .stdlib import PYTHON, PYTHON_TEST
from .text import ENCYCLOPEDIA, encode, named_sources, read_text, shown_name

COMPLETING = (OWN, PYTHON, ENCYCLOPEDIA)  # beside what a user asks for, which alone is evaluated
HELD_OUT = "held-out"  # the default: a held-out split of whatever the calibration data is
_SHOWN = {
    "bundled": "bundled novels (test split)",
    EVALUATED_ON["wikitext2"]: "WikiText-2 test",
    EVALUATED_ON["c4"]: "C4 validation",
}
STREAMED_CHARACTERS = 4_000_000  # about a million tokens, 450 windows of 2048
LEAST_TOKENS = 128  # of a held-out tail: fewer say little


def split(calibration: str | Path, evaluate: str | Path | None) -> tuple[str, str | None]:
    """Calibration data and evaluation dataset by name, with nothing in both.

    `evaluate` HELD_OUT is a split of every source: the test split of `bundled` and `paper`, the
    validation split of `c4`, the tail of any other (`splits.held_out_part`), which is then left out
    of calibration. It is left out for None too, which evaluates nothing, but not where `evaluate`
    names another dataset. Raises CalibrationError for a source that has no such split, or a dataset
    that would be calibrated on.
    """
    calibration, evaluate = str(calibration), None if evaluate is None else str(evaluate)
    names = named_sources(calibration)
    held = [_held_out_of(name) for name in names]
    evaluated = _asked_for(dict(zip(names, held, strict=True)))
    if evaluate == HELD_OUT:
        for name, other in evaluated.items():
            if other is None:
                raise CalibrationError(
                    f"{name} has no held-out split; name another dataset to evaluate on (--evaluate"
                    ", or --measure text= of `rap compare`)"
                )
        evaluate = ",".join(dict.fromkeys(other for other in evaluated.values() if other))
    if evaluate is None:
        kept = list(evaluated.values())
    else:
        check_apart(calibration, evaluate)
        kept = [*named_sources(evaluate)]
    tails = {_read_by(name) for name in kept if name and TAIL in name}
    training = [
        _training_part_of(name) if _has_tail(other) and _read_by(name) in tails else name
        for name, other in zip(names, held, strict=True)
    ]
    return ",".join(training) if training else calibration, evaluate


def _asked_for(held: dict[str, str | None]) -> dict[str, str | None]:
    """Of sources and what is held out of them, those that were asked for, not what completes them.

    Of sources that complete others, those before the model's samples, which follow what was asked.
    """
    asked = [name for name in held if without_prefixes(name) not in COMPLETING]
    leading = list(takewhile(lambda name: name != OWN and not name.startswith(REPEATED), held))
    some = [name for name, other in held.items() if other is not None]
    return {name: held[name] for name in asked or leading or some or held}


def check_apart(calibration: str, evaluate: str) -> None:
    """Raise CalibrationError for an evaluation dataset that is calibrated on as well.

    Not for the tail of a text, where `split` leaves it out of calibration.
    """
    trained: dict[str, list[str | None]] = {}
    for name in named_sources(calibration):
        trained.setdefault(_read_by(name), []).append(_held_out_of(name))
    for name in named_sources(evaluate):
        once = without_prefixes(name)
        held = trained.get(_read_by(EVALUATED_ON.get(once, once)), [])
        parted = TAIL in name and all(map(_has_tail, held))
        if _once(name) == "bundled" or parted or not held:
            continue
        split = held[0]
        instead = f"evaluate on {split} or on" if split else "evaluate on"
        raise CalibrationError(f"{name} is calibrated on as well; {instead} another dataset")


def _has_tail(held: str | None) -> bool:
    """Whether what is held out of a source is its tail, and so can be left out of it."""
    return held is not None and held.startswith(TAIL)


def _read_by(source: str) -> str:
    """What a source reads: the path of a file, or the name of a dataset."""
    name = without_prefixes(source)
    name = ALIASES.get(name, name)
    return str(Path(name).resolve()) if Path(name).is_file() else name


def dataset_name(evaluate: str) -> str:
    """An evaluation dataset as tables name it: files without their folders."""
    shown = []
    for name in named_sources(evaluate):
        once = without_prefixes(name) if TAIL not in name else name
        read = EVALUATED_ON.get(once, ALIASES.get(once, once))
        found = _SHOWN.get(read, shown_name(name))
        shown.append(
            f"repeated: {found}"
            if name.startswith(REPEATED) and found in _SHOWN.values()
            else found
        )
    return " and ".join(shown)


def evaluation_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, window: int = EVALUATION_WINDOW
) -> Tensor:
    """Token ids [N] of an evaluation dataset: `bundled`, a name of EVALUATED_ON, or any other.

    After `repeated:` it is that text with its passages twice, after `held-out:` its tail. The parts
    of a comma list come in turns, by the length of an evaluation `window`. Of a streamed dataset
    (C4) the first four million characters are read. Raises RapError for a text without a word in
    it, or one that cannot be read.
    """
    parts = []
    for name in named_sources(text) or [text]:
        content = _content(name)
        if not content.strip():
            raise RapError("the evaluation text is empty: give a text with some words in it")
        parts.append(torch.tensor(encode(tokenizer, content)))
    return parts[0] if len(parts) == 1 else _in_turns(parts, window)


def check_enough(text: str, num_tokens: int, window: int) -> None:
    """Raise RapError for an evaluation dataset of less than a window; a tail may be shorter."""
    tail = TAIL in text
    if num_tokens >= (min(LEAST_TOKENS, window) if tail else window):
        return
    if tail:
        raise RapError(
            f"the {dataset_name(text)} has {num_tokens} tokens, evaluation needs {LEAST_TOKENS}; "
            "give more calibration data, another --evaluate dataset, or --evaluate none"
        )
    raise RapError(
        f"the evaluation text has {num_tokens} tokens, one window needs {window}: give a "
        "longer text, or none"
    )


def _in_turns(parts: list[Tensor], window: int) -> Tensor:
    """Pieces of the parts, the first of each, then the second: the first windows see them all."""
    pieces = [part.split(window) for part in parts]
    rounds = range(max(map(len, pieces)))
    return torch.cat([one[n] for n in rounds for one in pieces if n < len(one)])


def _held_out_of(source: str) -> str | None:
    """The held-out split of a source by name, None if it has none."""
    if TAIL in source:
        return None
    name = without_prefixes(source)
    if name == "bundled":
        return name
    if name == OWN:
        return None
    if name == PYTHON:
        return PYTHON_TEST
    for alias, dataset in ALIASES.items():
        if name in (alias, dataset):
            # Nothing is held out of what others are evaluated on.
            held = "c4" if alias == "c4" else "wikitext2"
            return None if EVALUATED_ON[held] == dataset else held
    # What is read of a streamed dataset depends on how much is asked for, so it has no tail.
    return None if is_streamed(name) else f"{TAIL}{name}"


def _training_part_of(source: str) -> str:
    """A source without its held-out tail."""
    name = without_prefixes(source)
    return source if TRAIN in source else f"{source.removesuffix(name)}{TRAIN}{name}"


def _once(name: str) -> str:
    """A source that is not repeated."""
    while name.startswith(REPEATED):
        name = name.removeprefix(REPEATED)
    return name


def _content(text: str) -> str:
    if text.startswith(REPEATED):
        return repeat_passages(_content(text.removeprefix(REPEATED)))
    if text == "bundled":
        return assets.reference_text("test")
    return read_text(EVALUATED_ON.get(text, text), max_characters=STREAMED_CHARACTERS)
