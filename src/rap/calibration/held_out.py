"""Text to judge on: the split of a dataset that nothing is calibrated or trained on."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import assets
from ..model.errors import RapError
from .repeats import repeat_passages
from .text import REPEATED, encode, read_text

_WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1:test"
# Names that stand for another split where a text is calibrated on.
HELD_OUT = {
    "wikitext2": _WIKITEXT,
    "wikitext-2-raw-v1": _WIKITEXT,
    "paper": _WIKITEXT,
    "c4": "allenai/c4:en:validation",
}
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
