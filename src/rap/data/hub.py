"""Datasets by name: the split that a name selects, and WikiText-2 as `rap fetch` keeps it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.files import home, whole_directory, write_json
from ..checkpoint.provenance import provenance
from ..model.errors import CalibrationError
from .entries import text_of

WIKITEXT = "wikitext2"
_WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1"
SPLITS = ("test", "validation")  # of WikiText-2, as `rap fetch` brings them
RECORD = "PROVENANCE.json"

# What a name stands for where it is calibrated or trained on. The paper calibrates on the first of
# these: 32 windows of 1024 tokens, which are the defaults.
ALIASES = {
    "paper": f"{_WIKITEXT}:train",
    "wikitext-2-raw-v1": f"{_WIKITEXT}:train",
    WIKITEXT: f"{_WIKITEXT}:validation",
    **{f"{WIKITEXT}-{split}": f"{_WIKITEXT}:{split}" for split in SPLITS},
    "c4": "allenai/c4:en:train",
}
# And where a model is evaluated on it, if that is another split.
EVALUATED_ON = {
    **dict.fromkeys(("paper", "wikitext-2-raw-v1", WIKITEXT), f"{_WIKITEXT}:test"),
    "c4": "allenai/c4:en:validation",
}
STREAMED = ("allenai/c4",)

Say = Callable[[str], None]


def is_streamed(source: str) -> bool:
    """Whether a source is a dataset too large to be read whole."""
    name = ALIASES.get(source, source)
    return name.startswith(STREAMED) and not Path(name).is_file()


def read_dataset(name: str, max_characters: int | None) -> str:
    """The rows of `path:config:split` joined by blank lines; of C4 the first ones alone.

    WikiText-2 is read from the files of `fetch_dataset` where there are some. Raises
    CalibrationError for a dataset that cannot be loaded.
    """
    kept = _kept_file(name)
    if kept is not None:
        try:
            return kept.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"cannot read {kept} as UTF-8 text: {error}") from error
    path, config, split, *_ = [*name.split(":"), "", ""]
    try:
        streamed = path in STREAMED
        return "\n\n".join(_take(_load(path, config, split), max_characters if streamed else None))
    except Exception as error:  # hub, network, cache and builder each raise their own kinds
        advice = "check the name, or the network; offline give a .txt or .jsonl file, or 'bundled'"
        if name.startswith(f"{_WIKITEXT}:") and split in SPLITS:
            advice = _advice()
        raise CalibrationError(
            f"cannot load the dataset {name!r} ({_reason(error)}): {advice}"
        ) from error


def fetch_dataset(name: str, *, force: bool = False, say: Say = lambda line: None) -> Path:
    """The folder with WikiText-2, a file per split of SPLITS, downloaded from the hub if need be.

    Raises CalibrationError, with the files that would do instead, where no hub can be reached.
    """
    if name != WIKITEXT:
        raise CalibrationError(f"cannot fetch the dataset {name!r}: use {WIKITEXT}")
    folder = _folder()
    if not force and all(_file(split).is_file() for split in SPLITS):
        say(f"{name} is already in {folder}")
        return folder
    path, config = _WIKITEXT.split(":")
    say(f"downloading {path} ({config}: {' and '.join(SPLITS)})")
    try:
        rows = {split: [*_take(_load(path, config, split), None)] for split in SPLITS}
    except Exception as error:  # as above
        raise CalibrationError(f"cannot reach {path} ({_reason(error)}): {_advice()}") from error
    texts = {split: "\n\n".join(found) for split, found in rows.items()}
    with whole_directory(folder, force=True, own=True) as partial:
        for split, text in texts.items():
            (partial / _file(split).name).write_text(text, encoding="utf-8", newline="")
        hashes = {split: hashlib.sha256(t.encode()).hexdigest() for split, t in texts.items()}
        counts = {split: len(found) for split, found in rows.items()}
        made = {"dataset": _WIKITEXT, "rows": counts, "sha256": hashes, "made": provenance()}
        write_json(partial / RECORD, made)
    told = ", ".join(f"{split} {len(text):,} characters" for split, text in texts.items())
    say(f"{name}: {told}; CC BY-SA, https://huggingface.co/datasets/{path}, kept in {folder}")
    return folder


def _load(path: str, config: str, split: str) -> Iterable[Any]:
    # Imported here: it takes a second, and only datasets need it.
    import datasets

    streaming = path in STREAMED
    found: Iterable[Any] = datasets.load_dataset(
        path, config or None, split=split or "train", streaming=streaming
    )
    return found


def _take(entries: Iterable[Any], max_characters: int | None) -> Iterator[str]:
    taken = 0
    for entry in entries:
        text = text_of(entry) or ""
        yield text
        taken += len(text)
        if max_characters is not None and taken >= max_characters:
            return


def _folder() -> Path:
    return home() / "data" / WIKITEXT


def _file(split: str) -> Path:
    return _folder() / f"{WIKITEXT}-{split}.txt"


def _kept_file(name: str) -> Path | None:
    dataset, _, split = name.rpartition(":")
    found = dataset == _WIKITEXT and split in SPLITS and _file(split).is_file()
    return _file(split) if found else None


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _advice() -> str:
    names = " and ".join(_file(split).name for split in SPLITS)
    return (
        f"run `rap fetch {WIKITEXT}` with a network, or put {names} (UTF-8, the rows joined by "
        f"blank lines) into {_folder()}; any other .txt or .jsonl file is given by its path"
    )
