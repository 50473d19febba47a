"""A tokenizer whose tokens can be read back by eye."""

from types import SimpleNamespace
from typing import Any


class Characters:
    """One token per character, its code; begins with BOS where it has one and is asked for it."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        # Read as models are: without special tokens, where nothing asks for BOS.
        assert self.bos_token_id is not None or not add_special_tokens
        start = [self.bos_token_id] if add_special_tokens else []
        return SimpleNamespace(input_ids=start + [ord(character) for character in text])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self(text, add_special_tokens).input_ids
