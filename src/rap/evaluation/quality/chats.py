"""Prompts of a chat, as a model's template writes them.

Shapes: P tokens of a prompt.
"""

from typing import Any

import torch
from torch import Tensor

from ... import assets
from ...data.entries import read_entries
from ...model.errors import RapError


def read_prompts(source: str) -> list[str]:
    """The prompts of a file, or the `bundled` fifty, which are of fourteen kinds.

    A .txt has a prompt a line, a .jsonl an object with a `text` a line. Raises RapError for a file
    without a prompt, or one that cannot be read.
    """
    path = assets.prompts_path() if source == "bundled" else source
    prompts = read_entries(path)
    if not prompts:
        raise RapError(f"{source} has no prompt: write one a line")
    return prompts


def chat_tokens(prompts: list[str], tokenizer: Any) -> list[Tensor]:
    """Each prompt as what a user says first, up to where the model answers: tokens [P].

    Special tokens are those of the template, BOS too. Raises RapError without one.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RapError("the tokenizer has no chat template: leave --chat out, or take a chat model")
    return [
        torch.tensor(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
            ).input_ids
        )
        for prompt in prompts
    ]
