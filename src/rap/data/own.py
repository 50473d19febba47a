"""The source `own`: samples that a model wrote, drawn once for its weights and then kept.

OUT = the folder `own` of the user's cache (`checkpoint.files.home`)
OUT/<key>.jsonl    the documents, as `rap sample` writes them
OUT/<key>.json     what they were drawn from and with, and what it took
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoint.files import check_output_file, home, read_json, write_json
from ..checkpoint.provenance import provenance
from ..model.errors import CalibrationError, CheckpointError
from ..model.layers import trained_length
from .sampling import Corpus, chat_opening, drawn_with, write_documents
from .splits import REPEATED

OWN = "own"
# As many as the default was measured with (docs/how-to/calibration-data.md): enough for a quarter
# of the default calibration, and of the default fit. Of a chat model people read answers more than
# text. The seed is not that of a command: these are data.
SAMPLES = Corpus(documents=80, batch_size=80, chats=0.5)
DIGITS = 16


def own_samples(model: Any, tokenizer: Any, *, progress: bool = False) -> Path:
    """The file of a dense model's samples: the one that is kept, else drawn now.

    They are named by what they depend on (`sampling.drawn_with`), so that another model, template
    or release draws others. Raises RapError for a tokenizer without a token to begin with,
    CheckpointError where they cannot be kept.
    """
    longest = trained_length(model.config) or SAMPLES.tokens
    asked = replace(SAMPLES, tokens=min(SAMPLES.tokens, longest))
    opening = chat_opening(tokenizer)
    if opening is None or len(opening) >= asked.tokens // 2:
        asked = replace(asked, chats=0.0)
    path, drawn = _place(model, tokenizer, asked)
    record = path.with_suffix(".json")
    console = Console(stderr=True, markup=False, soft_wrap=True, quiet=not progress)
    if path.is_file() and record.is_file():
        console.print(f"own samples: reading {path}, which the model wrote before")
        return path
    try:
        check_output_file(path, force=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}: set RAP_HOME to another folder, or give --calibration without 'own'"
        ) from error
    console.print(
        f"own samples: the model writes {asked.documents} documents of {asked.tokens} tokens, once "
        f"for its weights (minutes on a CPU), kept in {path}"
    )
    began = time.monotonic()
    write_documents(model, tokenizer, path, asked, force=True, progress=progress)
    seconds = time.monotonic() - began
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made = provenance(sampled_seconds=seconds)
    write_json(record, {"samples": {**drawn, "sha256": digest}, "made": made})
    console.print(f"own samples: written in {seconds:.0f} s")
    return path


def with_samples(
    names: Sequence[str], model: Any, tokenizer: Any, *, progress: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """The sources, with the file of the model's own samples for `own`, also where it is repeated.

    And for a report `own_samples`, what they were drawn with; nothing where no source is `own`.
    Raises CalibrationError as `refuse_samples` if `model` is None.
    """
    if not reads_samples(names):
        return list(names), {}
    if model is None:
        refuse_samples(names)
    path = own_samples(model, tokenizer, progress=progress)
    record = read_json(path.with_suffix(".json"), f"remove {path}, and repeat the command")
    named = [f"{name.removesuffix(OWN)}{path}" if _is_own(name) else name for name in names]
    return named, {"own_samples": record["samples"]}


def reads_samples(names: Iterable[str]) -> bool:
    """Whether any of the sources is what the model writes."""
    return any(_is_own(name) for name in names)


def refuse_samples(names: Sequence[str], why: str = "that is not loaded here") -> None:
    """Raise CalibrationError if a source is `own`: there is no model in memory that could write."""
    if reads_samples(names):
        given = ",".join(
            f"{name.removesuffix(OWN)}own.jsonl" if _is_own(name) else name for name in names
        )
        raise CalibrationError(
            f"source 'own' is text by the model itself, {why}: run `rap sample MODEL -o own.jsonl` "
            f"where it fits, and give {given} instead"
        )


def _is_own(name: str) -> bool:
    return re.fullmatch(f"({REPEATED})*{OWN}", name) is not None


def _place(model: Any, tokenizer: Any, asked: Corpus) -> tuple[Path, dict[str, Any]]:
    """The file of a model's samples, and what it is named by."""
    drawn = drawn_with(model, tokenizer, asked)
    key = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:DIGITS]
    return home() / OWN / f"{key}.jsonl", drawn
