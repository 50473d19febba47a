"""The tokenizer's part of a GGUF file: tokens, their types, merges, special tokens, chat template.

Built from a byte-level BPE tokenizer, or copied from another GGUF file of the same model.
"""

import hashlib
import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import gguf

from ...model.errors import CheckpointError, RapError

PREFIX = "tokenizer."
PRE_KEY = "tokenizer.ggml.pre"
_TABLE = Path(__file__).parent / "pre_tokenizers.json"
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


def add_tokenizer(writer: Any, tokenizer: Any, vocabulary: int, pre: str | None) -> None:
    """Write a byte-level BPE tokenizer; `pre` names llama.cpp's pre-tokenizer if it is not known.

    Raises CheckpointError for another kind of tokenizer, for one whose way to split text is not
    known, and for one with more tokens than the model; RapError as `check_pre`.
    """
    check_pre(pre)
    state = _byte_level(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or known_pre(tokenizer))
    tokens, types = _tokens(tokenizer, vocabulary)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = state["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    for name in _SPECIAL:
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    empty = tokenizer("").input_ids
    writer.add_add_bos_token(empty[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(empty[-1:] == [tokenizer.eos_token_id] != [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(_template(tokenizer.chat_template))


def check_pre(pre: str | None) -> None:
    """Raise RapError for a name that llama.cpp does not support."""
    names = json.loads(_TABLE.read_text(encoding="utf-8"))["names"]
    if pre is None or pre in names:
        return
    near = get_close_matches(pre.lower(), names)
    hint = f"near it: {', '.join(near)}" if near else "its names are such as llama-bpe or qwen2"
    raise RapError(
        f"llama.cpp has no pre-tokenizer {pre!r} ({hint}); choose another, or copy a tokenizer "
        "with --tokenizer-from FILE.gguf"
    )


def known_pre(tokenizer: Any) -> str:
    """llama.cpp's name for how a tokenizer splits text, by the hash of what it makes of a text.

    Raises CheckpointError for a tokenizer that is not in llama.cpp's table.
    """
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    ids = tokenizer.encode(table["check_text"])
    digest = hashlib.sha256(str(ids).encode()).hexdigest()
    if digest not in table["sha256"]:
        raise CheckpointError(
            f"llama.cpp's table has no pre-tokenizer for this tokenizer (hash {digest[:12]}); name "
            "a compatible one with --pre of `rap export gguf`, or copy a tokenizer with its "
            "--tokenizer-from FILE.gguf"
        )
    name: str = table["sha256"][digest]
    return name


def copy_tokenizer(writer: Any, file: str | Path, vocabulary: int, pre: str | None) -> None:
    """Write the tokenizer of another GGUF file, which must have as many tokens as the model.

    Raises CheckpointError for a file that cannot be read, or of another vocabulary; RapError as
    `check_pre`.
    """
    check_pre(pre)
    fields = _fields(file)
    tokens = fields.get("tokenizer.ggml.tokens")
    found = len(tokens.data) if tokens is not None else 0
    if found != vocabulary:
        raise CheckpointError(
            f"{file} has a vocabulary of {found} tokens, the model one of {vocabulary}: name a "
            "file of the same model"
        )
    for name, field in fields.items():
        if not name.startswith(PREFIX) or (pre is not None and name == PRE_KEY):
            continue
        whole = field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            # Of the stored type: numbers of any other width would be written in 32 bits.
            writer.add_key_value(name, whole, field.types[0], sub_type=field.types[-1])
        else:
            writer.add_key_value(name, whole, field.types[0])
    if pre is not None:
        writer.add_tokenizer_pre(pre)


def _fields(file: str | Path) -> dict[str, Any]:
    if not Path(file).is_file():
        raise CheckpointError(f"there is no file {file}: check the path")
    try:
        return dict(gguf.GGUFReader(file).fields)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"cannot read {file} as GGUF: {error}") from error


def _byte_level(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    kind = state.get("model", {}).get("type", "SentencePiece")
    steps = json.dumps(state.get("pre_tokenizer"))
    if kind != "BPE" or state["model"].get("byte_fallback") or '"ByteLevel"' not in steps:
        kind = "SentencePiece" if kind == "BPE" else kind
        raise CheckpointError(
            f"a {kind} tokenizer has scores that its files here do not hold: copy it from a GGUF "
            "file of the dense model with --tokenizer-from"
        )
    return state


def _tokens(tokenizer: Any, vocabulary: int) -> tuple[list[str], list[int]]:
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(known) >= vocabulary:
        raise CheckpointError(
            f"the tokenizer has a token {max(known)}, the model only {vocabulary}: they do not "
            "belong together"
        )
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for number in range(vocabulary):
        token = known.get(number)
        if token is None:
            kind = gguf.TokenType.UNUSED
        elif number not in added:
            kind = gguf.TokenType.NORMAL
        elif added[number].special or _looks_special(token):
            kind = gguf.TokenType.CONTROL
        else:
            kind = gguf.TokenType.USER_DEFINED
        tokens.append(token if token is not None else f"[PAD{number}]")
        types.append(int(kind))
    return tokens, types


def _looks_special(token: str) -> bool:
    """Some models do not mark all of their control tokens, and print them when they chat."""
    return token.startswith("<|") and token.endswith("|>")


def _template(template: Any) -> str:
    if isinstance(template, str):
        return template
    if not isinstance(template, dict) or "default" not in template:
        raise RapError("the tokenizer has several chat templates and none named default: keep one")
    default: str = template["default"]
    return default
