"""A tokenizer's fingerprint: the same for the same tokens, another for any that differ."""

from typing import Any

import pytest
from tokenizers.normalizers import Lowercase

from cases.characters import Characters
from rap import assets
from rap.checkpoint.load import fingerprint_tokenizer


def lowercased(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = Lowercase()


def with_a_word(tokenizer: Any) -> None:
    tokenizer.add_tokens(["dark evening"])


def ended_otherwise(tokenizer: Any) -> None:
    tokenizer.eos_token = "a"


def test_reading_a_text_changes_nothing() -> None:
    tokenizer, other = assets.reference_tokenizer(), assets.reference_tokenizer()
    other.backend_tokenizer.enable_truncation(8)
    other.backend_tokenizer.enable_padding()
    assert fingerprint_tokenizer(other) == fingerprint_tokenizer(tokenizer)


@pytest.mark.parametrize("change", [lowercased, with_a_word, ended_otherwise])
def test_other_rules_words_or_special_tokens_are_another(tokenizer: Any, change: Any) -> None:
    other = assets.reference_tokenizer()
    change(other)
    assert fingerprint_tokenizer(other) != fingerprint_tokenizer(tokenizer)


def test_without_rules_to_read_the_tokens_of_a_text_tell() -> None:
    class Shifted(Characters):
        def __call__(self, text: str, **options: Any) -> Any:
            found = super().__call__(text, **options)
            found.input_ids = [one + 1 for one in found.input_ids]
            return found

    assert fingerprint_tokenizer(Characters()) == fingerprint_tokenizer(Characters())
    assert fingerprint_tokenizer(Characters()) != fingerprint_tokenizer(Shifted())
