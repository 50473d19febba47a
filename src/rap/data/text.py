"""Text to token windows: the bundled novels, a file, or a Hugging Face dataset.

Shapes: N windows, T tokens of a window.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import assets
from ..model.errors import CalibrationError
from .bos import Bos, bos_token, with_bos
from .entries import FILE_TYPES, check_file, content_of, read_entries
from .hub import ALIASES, read_dataset
from .own import OWN, reads_samples, refuse_samples, with_samples
from .protocol import CALIBRATION_WINDOW, CALIBRATION_WINDOWS
from .splits import (
    REPEATED,
    TAIL,
    TRAIN,
    held_out_part,
    repeat_passages,
    training_part,
    without_prefixes,
)
from .stdlib import PYTHON, PYTHON_TEST, stdlib_text

GENERAL = "general:"  # before a source: that one and what completes it
ENCYCLOPEDIA = "encyclopedia"
ONLY = "only:"  # before a source: nothing is added to it
POSSIBLE = (
    "'bundled', 'encyclopedia', 'wikitext2', 'paper', 'c4', 'own', 'python', a .txt or .jsonl "
    "file, or the name of a dataset"
)

_BUILT_IN = ("bundled", ENCYCLOPEDIA, OWN, PYTHON, PYTHON_TEST)
_SHOWN = {
    OWN: f"{OWN} (written by the dense model)",
    PYTHON: "Python's standard library (modules e to z)",
    PYTHON_TEST: "Python's standard library (modules a to d)",
}

# Characters that surely hold one token of running text; English has four to five.
CHARACTERS_PER_TOKEN = 16


def load_windows(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_windows: int = CALIBRATION_WINDOWS,
    window: int = CALIBRATION_WINDOW,
    seed: int = 0,
    bos: Bos = "auto",
    model: Any = None,
    progress: bool = False,
) -> Tensor:
    """Calibration windows, LongTensor [N, T], from sources as `named_sources` reads them.

    Each source gives an equal share of the windows, the first ones what is left over, and they come
    in turns: what reads the first windows alone sees every source. A window begins with BOS as
    `bos.bos_token` decides, from the `model`'s config too if it is given. The source `own` needs
    the dense `model`, which draws the samples unless they are kept (`own.own_samples`).

    Raises CalibrationError as `check_sources` does, if a source cannot be read or is too short, or
    if there are fewer windows than sources.
    """
    check_sources(source)
    names = named_sources(source)
    if 1 <= num_windows < len(names):
        raise CalibrationError(
            f"{num_windows} windows cannot be shared by {len(names)} sources; use --windows "
            f"{len(names)} or more, or fewer sources"
        )
    if model is None:
        refuse_samples(names)
    first = bos_token(bos, tokenizer, None if model is None else model.config)
    found = {}
    # What the model writes comes last: minutes after a text that cannot be read has been refused.
    for index, name in sorted(enumerate(names), key=lambda item: reads_samples(item[1:])):
        [name], _ = with_samples([name], model, tokenizer, progress=progress)
        share = num_windows // len(names) + (index < num_windows % len(names))
        text = read_text(name, max_characters=share * window * CHARACTERS_PER_TOKEN)
        sizes = {"num_windows": share, "window": window}
        with _named(name):
            found[index] = windows_from_text(text, tokenizer, **sizes, seed=seed, bos=first)
    parts = [found[index] for index in range(len(names))]
    turns = [torch.arange(len(part)) * len(parts) + n for n, part in enumerate(parts)]
    return torch.cat(parts)[torch.cat(turns).argsort()]


def named_sources(source: str | Path) -> list[str]:
    """The sources of a mixture, a comma list of sources of `read_text`, or `own`.

    `general:NAME` is NAME, `repeated:NAME`, `own` and `python`, of which these are there only once;
    `only:` before all says that nothing else is read (`completed_source`). A file whose name has a
    comma is one source. Raises CalibrationError for a text itself.
    """
    given = str(source).removeprefix(ONLY)
    try:
        single = Path(without_prefixes(given.removeprefix(GENERAL))).is_file()
    except OSError as error:  # too long for a name
        raise CalibrationError(f"unknown data source {given[:40]!r}...: give {POSSIBLE}") from error
    names = [given] if single else [name.strip() for name in given.split(",") if name.strip()]
    found: list[str] = []
    for name in names:
        once = name.removeprefix(GENERAL).strip()
        parts = _completed(once) if name.startswith(GENERAL) and once else [name]
        found += [part for part in parts if part not in (OWN, PYTHON) or part not in found]
    return found


def _completed(source: str) -> list[str]:
    """A source, what trains a model to look back, what it was trained on, and code."""
    return list(dict.fromkeys([source, f"{REPEATED}{source}", OWN, PYTHON]))


def completed_source(asked: str, *, own: bool = True, most: int | None = None) -> str:
    """What a model for general use is calibrated on, given what was asked for, as a comma list.

    One source is joined by itself repeated, by samples that the model writes (with `own`) and by
    code: ordinary text rarely asks for what stands far back, and text of one kind keeps that kind
    alone. A mixture is left as it is written, and so are `only:NAME`, `own`, the paper's protocol,
    and all of it where that makes more than `most` sources. Raises CalibrationError for a file with
    a comma in its name.
    """
    names = named_sources(asked)
    exact = asked.startswith(ONLY) or without_prefixes(asked) in (OWN, "paper")
    if exact or len(names) != 1 or names[0].startswith(REPEATED):
        return asked
    if "," in names[0]:
        raise CalibrationError(
            f"{names[0]} has a comma, which separates sources: rename it, or give only:{names[0]}"
        )
    parts = [name for name in _completed(names[0]) if own or name != OWN]
    return asked if most is not None and len(parts) > most else ",".join(parts)


def check_sources(*texts: str | Path | None) -> None:
    """Raise CalibrationError for a source without a name, a directory, or a file that is not there.

    Nothing is read: whether there is a dataset of some name is known when it is loaded. None is no
    text.
    """
    given = [text for text in texts if text is not None]
    for name in (name for text in given for name in named_sources(text) or [str(text)]):
        once = without_prefixes(name)
        path, alias = Path(once), once in _BUILT_IN or once in ALIASES
        if not once.removeprefix(GENERAL).strip(", "):
            raise CalibrationError(f"unknown data source {name!r}: give {POSSIBLE}")
        if once.startswith(GENERAL):
            raise CalibrationError(f"{name!r} has 'general:' inside: write it once, and first")
        if path.is_dir() and not alias:
            raise CalibrationError(f"{once} is a directory: give {POSSIBLE}")
        if path.suffix in FILE_TYPES or (path.is_file() and not alias):
            check_file(path)


def shown_name(source: str) -> str:
    """A source as reports name it: a file without its folder, for they are for others."""
    if source in _SHOWN:
        return _SHOWN[source]
    once = without_prefixes(source)
    name = Path(once).name if Path(once).is_file() else once
    if TAIL in source:
        return f"held-out tail of {name}"
    prefix = REPEATED if source.startswith(REPEATED) else ""
    return f"{prefix}{name}" + (" without its held-out tail" if TRAIN in source else "")


def windows_from_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_windows: int = CALIBRATION_WINDOWS,
    window: int = CALIBRATION_WINDOW,
    seed: int = 0,
    bos: Bos = "auto",
) -> Tensor:
    """Contiguous, non-overlapping windows of `text`, LongTensor [N, T], in the order of the text.

    Which ones is sampled with `seed`. A long text is cut into stretches of 16 T characters, of
    which N are drawn and only those tokenized; a shorter one is tokenized whole and its windows
    drawn. With a `bos` a window is that and T - 1 tokens of text; there is no other special token.

    Raises CalibrationError for an empty text, one shorter than a window, or fewer windows than N.
    """
    check_windows(num_windows, window)
    if not text.strip():
        raise CalibrationError("the calibration text is empty: give a text with some words in it")
    first = bos_token(bos, tokenizer)
    asked = (num_windows, window if first is None else window - 1, seed)
    rows = _from_stretches(text, tokenizer, *asked)
    return with_bos(rows if rows is not None else _from_whole(text, tokenizer, *asked), first)


def check_windows(num_windows: int, window: int) -> None:
    """Raise CalibrationError unless there is a window, of two tokens or more."""
    if num_windows < 1 or window < 2:
        raise CalibrationError(
            f"cannot take {num_windows} windows of {window} tokens; use at least one window of two "
            "tokens"
        )


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Say of data that is too short that a part of it is held out."""
    try:
        yield
    except CalibrationError as error:
        if TRAIN not in source:
            raise
        raise CalibrationError(
            f"{error} (of {shown_name(source)}, which is for evaluation)"
        ) from error


def fingerprint_windows(windows_NT: Tensor) -> str:
    """A hash of the windows' shape and tokens."""
    digest = hashlib.sha256(str(tuple(windows_NT.shape)).encode())
    digest.update(windows_NT.to(torch.int64).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_text(source: str | Path, *, max_characters: int | None = None) -> str:
    """The text behind `bundled`, a .txt or .jsonl path, a `datasets` name, or `repeated:` and one.

    A JSONL line gives its `text` field, else its first string field. A dataset is
    `name[:config[:split]]`, split `train` unless told; `paper`, `wikitext-2-raw-v1` and `c4` are
    short names. `max_characters` bounds what is read of a streamed dataset, nothing else.
    `repeated:NAME` is that text with all its passages twice, as `splits.repeat_passages` has it;
    `train:NAME` and `held-out:NAME` are its parts by `splits`.

    Raises CalibrationError as `check_sources` does, and for a file that cannot be read or a dataset
    that cannot be loaded.
    """
    check_sources(source)
    names = named_sources(source)
    if len(names) > 1:
        raise CalibrationError(
            f"{str(source)!r} has {len(names)} sources, but only one is supported; give one of "
            f"{', '.join(name for name in names if name != OWN)}"
        )
    refuse_samples(names)
    if str(source).startswith(REPEATED):
        once = str(source).removeprefix(REPEATED)
        return repeat_passages(read_text(once, max_characters=max_characters))
    for prefix, part in ((TRAIN, training_part), (TAIL, held_out_part)):
        if str(source).startswith(prefix):
            whole = str(source).removeprefix(prefix)
            return part(read_text(whole, max_characters=max_characters))
    if str(source) == "bundled":
        return assets.reference_text("calibration")
    if str(source) == ENCYCLOPEDIA:
        return assets.encyclopedia_text()
    if str(source) in (PYTHON, PYTHON_TEST):
        return stdlib_text(str(source))
    path = Path(source)
    if path.suffix in FILE_TYPES or path.is_file():
        return content_of(path) if path.suffix == ".txt" else "\n\n".join(read_entries(path))
    return read_dataset(ALIASES.get(str(source), str(source)), max_characters)


def _from_stretches(
    text: str, tokenizer: PreTrainedTokenizerBase, num_windows: int, window: int, seed: int
) -> Tensor | None:
    length = window * CHARACTERS_PER_TOKEN
    if len(text) // length < num_windows:
        return None
    rows = []
    for slot in _sample(len(text) // length, num_windows, seed):
        stretch = text[slot * length : (slot + 1) * length]
        # A stretch starts anywhere: drop the word it cuts.
        ids = encode(tokenizer, re.sub(r"^\S{0,40}\s", "", stretch))
        if len(ids) < window:
            return None
        rows.append(ids[:window])
    return torch.tensor(rows)


def _from_whole(
    text: str, tokenizer: PreTrainedTokenizerBase, num_windows: int, window: int, seed: int
) -> Tensor:
    ids = encode(tokenizer, text)
    rows = packed(ids, window, "calibration")
    if len(rows) < num_windows:
        raise CalibrationError(
            f"the calibration text has {len(ids)} tokens, enough for {len(rows)} windows of "
            f"{window}, not {num_windows}: give more text, or use fewer or shorter windows"
        )
    return sampled(rows, num_windows, seed)


def packed(ids: Sequence[int], window: int, purpose: str) -> Tensor:
    """All contiguous, non-overlapping windows of a text's tokens, LongTensor [N, T], in order.

    Raises CalibrationError, naming what the text is for, if it is shorter than a window.
    """
    whole = len(ids) // window
    if whole == 0:
        raise CalibrationError(
            f"the {purpose} text has {len(ids)} tokens, one window needs {window}: give a longer "
            "text or a shorter window"
        )
    return torch.tensor(ids[: whole * window]).view(whole, window)


def sampled(rows_NT: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of the rows, drawn with `seed`, in the order that they had."""
    return rows_NT[_sample(len(rows_NT), count, seed)]


def _sample(size: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(size, generator=generator)[:count].tolist())


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    # verbose=False: the text is longer than the model's window on purpose.
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
