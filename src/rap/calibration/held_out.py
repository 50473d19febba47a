"""Text to judge on: the split of a dataset that nothing is calibrated or trained on."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import assets
from ..model.errors import RapError
from .hub import HELD_OUT
from .repeats import REPEATED, repeat_passages
from .text import encode, read_text

STREAMED_CHARACTERS = 4_000_000  # about a million tokens, 450 windows of 2048


def evaluation_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Token ids [N] of a held-out text: `bundled` test novels, a name of HELD_OUT, or any other.

    After `repeated:` it is that text with its passages twice. Of a streamed dataset (C4) the first
    four million characters are read. Raises RapError for a text without a word in it, or one that
    cannot be read.
    """
    content = _content(text)
    if not content.strip():
        raise RapError("the evaluation text is empty: give a text with some words in it")
    return torch.tensor(encode(tokenizer, content))


def _content(text: str) -> str:
    if text.startswith(REPEATED):
        return repeat_passages(_content(text.removeprefix(REPEATED)))
    if text == "bundled":
        return assets.reference_text("test")
    return read_text(HELD_OUT.get(text, text), max_characters=STREAMED_CHARACTERS)
