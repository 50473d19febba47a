"""BOS: the token that a model takes for a beginning, and whether windows of text start with it.

A model trained with one at every beginning attends to it whatever it reads, so that a window
without is not what the model knows. Others have none, or know it as the end of a document.

Shapes: N windows, T tokens of a window.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..model.errors import RapError
from ..model.families import FAMILIES
from ..model.layers import base_model_type, text_config

BOS_CHOICES = ("auto", "always", "never")

# One of BOS_CHOICES, the token itself, or None for no such token.
Bos = str | int | None


def check_bos(bos: Bos) -> Bos:
    """The choice itself; RapError if there is no such."""
    if isinstance(bos, str) and bos not in BOS_CHOICES:
        raise RapError(f"unknown bos {bos!r}: use {', '.join(BOS_CHOICES)}")
    return bos


def bos_token(
    bos: Bos,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PreTrainedConfig | None = None,
) -> int | None:
    """The token that every window starts with, or None.

    `auto` is what the tokenizer does by itself when it may add special tokens; it is a BOS too
    where the family of the model's `config` needs one (`needs_bos` of its row). `always` is the
    tokenizer's BOS, or the config's. Without a tokenizer `auto` can only go by the family.

    Raises RapError for an unknown choice, or for `always` if neither knows a BOS.
    """
    check_bos(bos)
    if bos == "never" or not isinstance(bos, str):
        return None if isinstance(bos, str) else bos
    token = getattr(tokenizer, "bos_token_id", None)
    if bos == "auto" and token is not None and _adds(tokenizer, token):
        return int(token)
    if bos == "auto" and not _needs(config):
        return None
    if token is None and config is not None:
        token = getattr(text_config(config), "bos_token_id", None)
    if token is None and bos == "always":
        raise RapError("the tokenizer and the config have no BOS token: use auto or never")
    return token


def with_bos(rows_NT: Tensor, bos: int | None) -> Tensor:
    """Rows [N, T - 1] of text with BOS before each, [N, T]; without one the rows themselves."""
    if bos is None:
        return rows_NT
    return torch.cat([torch.full_like(rows_NT[:, :1], bos), rows_NT], 1)


def describe_bos(bos: int | None) -> str:
    """How windows begin, for a report."""
    return "without BOS" if bos is None else f"each beginning with BOS (token {bos})"


def _adds(tokenizer: Any, token: int) -> bool:
    ids = list(tokenizer("a", add_special_tokens=True).input_ids)
    return ids[:1] == [token]


def _needs(config: PreTrainedConfig | None) -> bool:
    if config is None:
        return False
    spec = FAMILIES.get(base_model_type(text_config(config)))
    return spec is not None and spec.needs_bos
