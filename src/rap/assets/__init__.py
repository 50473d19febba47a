"""The bundled reference model and corpus: demo and tests run on real weights and text, offline.

Provenance and licence of every file are stated in README.md beside this file.
"""

import lzma
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..model.errors import RapError

SPLITS = ("calibration", "validation", "test")

_FOLDER = Path(__file__).parent


def reference_path() -> Path:
    """Directory of the bundled model: a plain Hugging Face checkpoint with its tokenizer."""
    return _FOLDER / "model"


def reference_model(dtype: torch.dtype | None = None) -> Any:
    """A fresh copy of the bundled Llama in eval mode; `dtype` None keeps the stored bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(
        reference_path(), dtype=dtype or "auto", local_files_only=True
    )
    return model.eval()


def reference_tokenizer() -> Any:
    """The tokenizer of the bundled model: byte-level BPE, 4096 tokens, adds no special token."""
    return AutoTokenizer.from_pretrained(reference_path(), local_files_only=True)


def prompts_path() -> Path:
    """The bundled prompts of a chat: fifty lines of JSON, each with its `kind` and `text`."""
    return _FOLDER / "prompts.jsonl"


def reference_text(split: str) -> str:
    """One split of the bundled novels: "calibration" (seen in training), "validation" or "test".

    Raises RapError for any other name.
    """
    if split not in SPLITS:
        raise RapError(
            f"unknown split {split!r} of the bundled text: use one of {', '.join(SPLITS)}"
        )
    return _unpacked(split)


def encyclopedia_text() -> str:
    """Articles of an encyclopedia, whose facts and style novels lack."""
    return _unpacked("encyclopedia")


def _unpacked(name: str) -> str:
    return lzma.decompress((_FOLDER / "corpus" / f"{name}.txt.xz").read_bytes()).decode("utf-8")
