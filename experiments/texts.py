"""Two texts of the data table in README.md: code, and chats of SmolLM2 or another chat model.

    python experiments/texts.py [--model smollm2]

Writes code.txt and chat.jsonl to the current folder, unless they are there. The chats are the
bundled fifty prompts with the dense model's sampled answers, in its chat template: nothing of them
is in a calibration set. They depend on the CPU that generates them, so results name their hash.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch

from rap.checkpoint.files import whole_file
from rap.checkpoint.load import load_dense, load_tokenizer
from rap.checkpoint.source import resolve_source
from rap.evaluation.quality.decoding import Sampling, end_tokens, write
from rap.evaluation.quality.generation import chat_tokens, read_prompts

CODE, CHAT = Path("code.txt"), Path("chat.jsonl")
CODE_CHARACTERS, ANSWER_TOKENS, BATCH = 200_000, 512, 25


def write_code() -> None:
    """The beginning of the standard library's modules [a-d]*.py, joined by name."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in modules)
    CODE.write_text(text[:CODE_CHARACTERS], encoding="utf-8")


def write_chats(name: str) -> None:
    """The bundled prompts and what the model answers, a chat a line."""
    source = resolve_source(name)
    model, tokenizer = load_dense(source, dtype="float32"), load_tokenizer(source)
    asked = chat_tokens(read_prompts("bundled"), tokenizer)
    texts = write(
        model,
        asked,
        ANSWER_TOKENS,
        ends=end_tokens(model),
        sampling=Sampling(0.7, 0.9, seed=0),
        batch_size=BATCH,
    )
    with whole_file(CHAT) as partial:
        chats = (torch.cat([a, b.tokens]) for a, b in zip(asked, texts, strict=True))
        lines = [json.dumps({"text": tokenizer.decode(chat)}) for chat in chats]
        partial.write_text("\n".join([*lines, ""]), encoding="utf-8")


def main() -> None:
    """Write what is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    asked = parser.parse_args()
    if not CODE.is_file():
        write_code()
    if not CHAT.is_file():
        write_chats(asked.model)


if __name__ == "__main__":
    main()
