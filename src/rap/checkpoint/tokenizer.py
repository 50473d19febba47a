"""What a tokenizer is: one hash over all that decides the tokens of a text."""

import hashlib
import json
from typing import Any

from .. import assets

_PASSING = ("truncation", "padding")  # of a call, and no part of the tokenizer
_PROBE = 20_000  # characters


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """64 hexadecimal digits of the rules, the vocabulary and the special tokens.

    Of a tokenizer without rules that can be read, one in plain Python, the tokens that it makes of
    a stretch of the bundled novels stand for them.
    """
    known: dict[str, Any] = {"special": _special(tokenizer)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        known["rules"] = {name: x for name, x in rules.items() if name not in _PASSING}
    else:
        text = assets.reference_text("test")[:_PROBE]
        known["tokens"] = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        vocabulary = getattr(tokenizer, "get_vocab", dict)
        known["vocabulary"] = sorted(vocabulary().items())
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _special(tokenizer: Any) -> dict[str, str]:
    found = getattr(tokenizer, "special_tokens_map", {})
    return {name: str(token) for name, token in found.items()}
