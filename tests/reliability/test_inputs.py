"""Texts and configs that nobody meant: an answer, or one line that says why not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cases.damage import QUICK, TEXT, Command
from cases.ending import contents, ended

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "one newline": b"\n",
    "only spaces": b" \t\r\n" * 500,
    "one token": b"a",
    "NUL bytes": b"\0" * 5000,
    "NUL bytes in words": TEXT.replace(" ", "\0").encode() * 100,
    "10 MB without a newline": b"word " * 2_000_000,
    "10 MB of one letter": b"a" * 10_000_000,
    "no UTF-8": b"\xff\xfe\x80 words " * 500,
    "half a character": (TEXT * 100).encode() + "\N{EURO SIGN}".encode()[:2],
    "UTF-16": (TEXT * 100).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + (TEXT * 100).encode(),
    "carriage returns": TEXT.replace("\n", "\r").encode() * 100,
    "controls": bytes(range(1, 32)) * 300,
    "emoji": "\U0001f600\U0001f1e9\u200d\u0301".encode() * 1000,
    "special tokens": b"<|endoftext|><s></s><unk>" * 300,
}
LINES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"words\n",
    "half an object": b'{"text": "a',
    "a list": b'["a"]\n',
    "a number": b"5\n",
    "no string": b'{"text": 5}\n',
    "lone surrogate": b'{"text": "\\ud800 words words"}\n' * 200,
    "deep": b"[" * 100_000 + b"\n",
    "huge number": b'{"n": ' + b"9" * 10_000 + b"}\n",
    "good": json.dumps({"text": TEXT * 100}).encode() + b"\n",
}
READING: dict[str, Command] = {
    "compress": ("compress", "dense", "-o", "out", *QUICK),
    "evaluate": ("evaluate", "perplexity", "dense", "--window", 32, "--max-windows", 1),
    "recover": (
        *("recover", "small", "--teacher", "dense", "--preset", "closed-form", "-o", "out"),
        *("--evaluate", "none"),
    ),
}
FLAGS = {"compress": "--calibration", "evaluate": "--text", "recover": "--text"}
OFTEN_TEXTS = {("evaluate", "NUL bytes"), ("compress", "half a character")}


def _texts() -> Iterator[Any]:
    for command in READING:
        for suffix, table in ((".txt", TEXTS), (".jsonl", LINES)):
            for what in table:
                often = suffix == ".txt" and (command, what) in OFTEN_TEXTS
                marks = () if often else (pytest.mark.faults,)
                yield pytest.param(
                    *(command, what, suffix), marks=marks, id=f"{command}: {what}{suffix}"
                )


@pytest.mark.parametrize(("command", "what", "suffix"), list(_texts()))
def test_an_odd_text_is_read_or_refused(place, judged, record, command, what, suffix):
    file = place / f"odd{suffix}"
    file.write_bytes((TEXTS if suffix == ".txt" else LINES)[what])
    words = [word for word in READING[command] if word != "text.txt"]
    if FLAGS[command] in words:
        words.remove(FLAGS[command])
    before = contents(place)
    end = ended((*words, FLAGS[command], file.name), place=place)
    how = judged(end, before, *(["out"] if "out" in words else []))
    record("odd text", READING[command], f"{what}{suffix}", how)


CONFIG: dict[str, tuple[Any, ...]] = {
    "num_attention_heads": (None, "four", 0, -1, 3, 1.5, []),
    "num_key_value_heads": ("two", 0, 3, 8, -2),
    "head_dim": (0, 15, -2, "wide", 8, None),
    "hidden_size": (0, 32, -64, "wide"),
    "intermediate_size": (0, 5, None, "wide"),
    "num_hidden_layers": (0, 1, 3, -1, "two", 10**5),
    "vocab_size": (0, 10, -1, "all"),
    "max_position_embeddings": (0, -1, None, "far"),
    "rms_norm_eps": ("small", None, -1),
    "hidden_act": ("none", None, 5),
    "model_type": (None, 7, "", "nothing", "gpt2", "rap_llama"),
    "architectures": (None, 5, [], ["Nothing"]),
    "dtype": ("float3", 5, "int8", None),
    "tie_word_embeddings": (True, "yes", None),
    "attention_bias": (True, "yes"),
    "quantization_config": ({}, [], "int4", {"quant_method": "unknown"}),
    "rope_parameters": (
        *(None, [], {}, "slow", {"rope_type": "none", "rope_theta": 1e4}),
        *({"rope_type": "default", "rope_theta": theta} for theta in (0, -1, "x", None, 1e400)),
        *({"rope_type": kind, "rope_theta": 1e4} for kind in ("yarn", "llama3", "longrope")),
    ),
}
SECTION: dict[str, tuple[Any, ...]] = {
    "layers": (None, [], {}, "two", [None], [{}], [{}, {}], [{"pairs": 1}] * 2, [None] * 3),
    "version": (None, 99, "new", -1),
    "base_model_type": (None, "gpt2", 5),
    "qk_norm": (None, "none", 5),
    "fingerprint": (5, "other", None),
    "method": (None, 5, {}),
}
OFTEN_CONFIGS = {
    ("num_attention_heads", 0),
    ("vocab_size", 10),
    ("num_hidden_layers", 3),
    ("layers", 3),
}
FROM_DENSE: dict[str, Command] = {
    "apply": ("apply", "dense", "plan.rap", "-o", "out"),
    "apply --stream": ("apply", "dense", "plan.rap", "-o", "out", "--stream"),
}
FROM_SMALL: dict[str, Command] = {
    "evaluate": ("evaluate", "perplexity", "small", "--text", "text.txt", "--window", 32),
    "inspect": ("inspect", "small"),
}


def _configs() -> Iterator[Any]:
    for table, commands in ((CONFIG, FROM_DENSE), (SECTION, FROM_SMALL)):
        for name, values in table.items():
            for number, value in enumerate(values):
                for command in commands:
                    often = (name, value if isinstance(value, int) else number) in OFTEN_CONFIGS
                    first = command in ("apply --stream", "evaluate")
                    marks = () if often and first else (pytest.mark.faults,)
                    yield pytest.param(
                        *(name, value, commands[command]),
                        marks=marks,
                        id=f"{command}: {name}={str(value)[:40]}",
                    )


@pytest.mark.parametrize(("name", "value", "command"), list(_configs()))
def test_an_odd_config_is_refused_or_does_no_harm(place, judged, record, name, value, command):
    path = place / command[2 if command[0] in ("evaluate", "export") else 1] / "config.json"
    _change(
        path, lambda config: (config["rap"] if name in SECTION else config).update({name: value})
    )
    before = contents(place)
    end = ended(command, place=place)
    how = judged(end, before, *(["out"] if "-o" in command else []))
    if name in ("num_hidden_layers", "vocab_size", "hidden_size", "head_dim") and value is not None:
        assert how == "refused" or command[0] == "inspect", "weights of other sizes were taken"
    record("odd config", command, f"{name}: {str(value)[:60]}", how)


def _change(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(path.read_text("utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")
