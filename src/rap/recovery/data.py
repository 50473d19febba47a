"""Text to training and validation windows, and what the trainer reads them through.

Shapes: N windows, T tokens of a window.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .. import assets
from ..data.bos import Bos, bos_token, with_bos
from ..data.hub import ALIASES, is_streamed
from ..data.splits import REPEATED, repeat_passages
from ..data.text import (
    CHARACTERS_PER_TOKEN,
    encode,
    named_sources,
    packed,
    read_text,
    sampled,
    windows_from_text,
)
from ..model.errors import RapError
from .config import RecoveryConfig
from .layer_fit import FitConfig

SHARED_RUN = 16  # tokens: natural text repeats fewer
# A passage is in one window of its source and two of that repeated, trained on and held out.
BOILERPLATE = 5  # more would not be seen in the few windows of a short run
HELD_OUT_SHARE = 10  # without a validation text, one window in so many is held out


class WindowDataset(Dataset):
    """Token windows [N, T] for the trainer; every token is predicted, none is padding."""

    def __init__(self, windows_NT: Tensor):
        self.windows_NT = windows_NT

    def __len__(self) -> int:
        return len(self.windows_NT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows_NT[index]}


def recovery_windows(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: RecoveryConfig | FitConfig,
    *,
    longest: int | None = None,
    bos: Bos = "auto",
) -> tuple[Tensor, Tensor]:
    """Training and validation windows, LongTensors [N, T], packed from one or more sources.

    Each source gives an equal share of the windows, so a mixed text is a list of them, or a comma
    list as `data.text.named_sources` reads it; their windows alternate. Windows are packed:
    contiguous tokens, across the ends of documents, each after a BOS as `bos.bos_token` decides.
    Validation windows come from the validation split of a source that has one (`bundled`, `paper`,
    `c4`), else one in ten of its own windows, which are not trained on; the test split is never
    read. T is `config.window`, or `longest` if the model's positions end before.

    Raises RapError for no source, or a text too short for two windows.
    """
    sources = [name for source in sources for name in named_sources(source)]
    if not sources:
        raise RapError("recovery needs a text: name at least one source")
    window = min(config.window, longest or config.window)
    share = None if config.num_windows is None else -(-config.num_windows // len(sources))
    held_out = -(-config.validation_windows // len(sources))
    endless = [name for name in sources if is_streamed(name)]
    if share is None and endless:
        raise RapError(f"{endless[0]} is read as a stream, without an end; set num_windows")
    bos, train, validation = bos_token(bos, tokenizer), [], []
    for source in sources:
        rows = _pack(
            read_text(source, max_characters=_enough(share, window)),
            tokenizer,
            window,
            share,
            config.seed,
            bos,
        )
        other = validation_text(source)
        if other is None:
            rows, held = hold_out(rows, held_out)
        else:
            held = _pack(other, tokenizer, window, held_out, config.seed, bos)
        train.append(rows)
        validation.append(held)
    if len(sources) > 1 or sources[0].startswith(REPEATED):
        # Sources may overlap, and passages of one that is repeated go on in the next window.
        train = [apart(rows, torch.cat(validation)) for rows in train]
    return alternating(train), alternating(validation)


def check_rows(small: Any, teacher: Any, given: Mapping[str, Tensor | None]) -> None:
    """Raise RapError for windows, by name, that are no token ids [N, T] of both models."""
    for name, rows in given.items():
        if rows is None:
            continue
        if not isinstance(rows, Tensor):
            raise RapError(
                f"recovery {name} must be a LongTensor [N, T], not a {type(rows).__name__}"
            )
        if rows.ndim != 2 or rows.dtype != torch.int64 or len(rows) < 1 or rows.shape[1] < 2:
            raise RapError(
                f"recovery {name} must be token ids [N, T] in int64 with two tokens or more a "
                f"window, not {list(rows.shape)} in {rows.dtype}"
            )
    sizes = [model.get_input_embeddings().weight.shape[0] for model in (small, teacher)]
    if sizes[0] != sizes[1]:
        raise RapError(
            f"the student has a vocabulary of {sizes[0]} and the teacher one of {sizes[1]}; "
            "give the dense model of this student"
        )
    ids = [token for rows in given.values() if rows is not None for token in rows.aminmax()]
    low, high = int(min(ids)), int(max(ids))
    if low < 0 or high >= sizes[0]:
        raise RapError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {sizes[0]}: encode "
            "the text with this model's tokenizer"
        )


def alternating(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors in one, each spread evenly over it in its own order."""
    places = [(torch.arange(len(rows)) + 0.5) / len(rows) for rows in parts]
    return torch.cat(list(parts))[torch.cat(places).argsort(stable=True)]


def validation_text(source: str) -> str | None:
    """The text of a source's validation split, None if it has no such split."""
    if source.startswith(REPEATED):
        once = validation_text(source.removeprefix(REPEATED))
        return None if once is None else repeat_passages(once)
    if source == "bundled":
        return assets.reference_text("validation")
    name = ALIASES.get(source, "")
    if not name.endswith(":train"):
        return None
    enough = _enough(1024, 1024)
    return read_text(f"{name.rpartition(':')[0]}:validation", max_characters=enough)


def hold_out(windows_NT: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Windows to train on and the last tenth, at most `limit` of them, to validate on.

    Raises RapError if there are not two.
    """
    if len(windows_NT) < 2:
        raise RapError(
            "recovery needs two windows or more, one of them to validate on: give a "
            "longer text or a shorter window"
        )
    held = min(limit, max(1, len(windows_NT) // HELD_OUT_SHARE))
    return windows_NT[:-held], windows_NT[-held:]


def whole_batches(windows_NT: Tensor, global_batch: int) -> Tensor:
    """The windows that fill batches; all of them where they do not fill one.

    The last few would make a smaller step, of a size that the number of devices decides. Of fewer
    than a batch the trainer reads as many as fill its micro batches.
    """
    return windows_NT[: len(windows_NT) // global_batch * global_batch or None]


def apart(windows_NT: Tensor, held_ST: Tensor) -> Tensor:
    """The windows that share no text with those held out, which may be of another length.

    Text is shared where SHARED_RUN tokens in a row are the same, or a window of fewer, but for runs
    of which a half is in BOILERPLATE windows, such as a system prompt of all chats and the first
    words behind it. Raises RapError if no window is left.
    """
    length = min(SHARED_RUN, windows_NT.shape[1], held_ST.shape[1])
    half = max(1, length // 2)
    given = [row.numpy() for row in (*windows_NT, *held_ST)]
    halves = [_runs(row, half) for row in given]
    found, count = np.unique(np.concatenate([np.unique(one) for one in halves]), return_counts=True)
    common = found[count >= BOILERPLATE]
    rows = []
    for row, parts in zip(given, halves, strict=True):
        runs, usual = _runs(row, length), np.isin(parts, common)
        rows.append(runs[~(usual[: len(runs)] | usual[length - half :])])
    own, held = rows[: len(windows_NT)], np.concatenate(rows[len(windows_NT) :])
    kept = [row for row, runs in zip(windows_NT, own, strict=True) if not np.isin(runs, held).any()]
    if not kept:
        raise RapError(
            "every window of the recovery text overlaps what an earlier stage holds out: give a "
            "longer text"
        )
    return torch.stack(kept)


def _runs(row_T: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` tokens in a row."""
    factors = np.random.default_rng(0).integers(2**62, size=length) | 1
    runs_SR = np.lib.stride_tricks.sliding_window_view(row_T, length)
    return runs_SR @ factors  # wraps around, as a hash may


def _pack(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    limit: int | None,
    seed: int,
    bos: int | None,
) -> Tensor:
    """At most `limit` windows of `text`, sampled with `seed` and in the order of the text."""
    if limit is not None and len(text) >= limit * window * CHARACTERS_PER_TOKEN:
        sizes = {"num_windows": limit, "window": window}
        return windows_from_text(text, tokenizer, **sizes, seed=seed, bos=bos)
    rows = packed(encode(tokenizer, text), window if bos is None else window - 1, "recovery")
    return with_bos(rows if limit is None else sampled(rows, limit, seed), bos)


def _enough(num_windows: int | None, window: int) -> int | None:
    return None if num_windows is None else num_windows * window * CHARACTERS_PER_TOKEN
