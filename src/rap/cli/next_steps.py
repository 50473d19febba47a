"""Commands for a checkpoint that was just made: evaluate it, recover it, serve it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.gguf import is_gguf
from ..checkpoint.load import is_pruned
from ..checkpoint.source import BUNDLED
from ..data.held_out import HELD_OUT, split
from ..data.protocol import EVALUATION_WINDOWS
from ..serving.capacity import EngineCapacity
from .groups import ReadingOptions
from .options import console

BUNDLED_PRE = "smollm"  # the bundled tokenizer splits text alike, in llama.cpp's words


@dataclass(frozen=True, kw_only=True)
class CompressionRun:
    """A run of `rap compress`: what was made of which model, with the data that was read.

    `evaluate` is the option as it was given, `window` the tokens per evaluation window where they
    are fewer than by default.
    """

    model: str
    output: Path
    read: ReadingOptions
    recover: str = "none"
    evaluate: str = HELD_OUT
    target: str | None = None
    window: int | None = None

    def next_steps(self, config: Any, rows: Sequence[EngineCapacity]) -> list[str]:
        """Three commands, in the order in which they make sense; the last is of the target."""
        return [
            f"evaluate: {shlex.join(self._evaluate())}",
            f"recover:  {shlex.join(self._recover())}",
            f"serve:    {self._serve(config, rows)}",
        ]

    def _evaluate(self) -> list[str]:
        """The measurement of the report again."""
        asked = HELD_OUT if self.evaluate == "none" else self.evaluate
        dataset = split(self.read.calibration, asked)[1]
        command = ["rap", "evaluate", "fidelity", str(self.output), "--dense", self.model]
        command += ["--text", str(dataset), "--max-windows", str(EVALUATION_WINDOWS)]
        command += [] if self.window is None else ["--window", str(self.window)]
        return command + self._shared()

    def _recover(self) -> list[str]:
        """Recovery on the data of calibration, with the same part of it held out."""
        preset = "fit" if self.recover in ("none", "closed-form") else "full"
        command = ["rap", "recover", str(self.output), "--teacher", self.model]
        command += ["--preset", preset, "--text", self.read.calibration]
        command += [] if self.evaluate == HELD_OUT else ["--evaluate", self.evaluate]
        command += [] if self.read.seed == 0 else ["--seed", str(self.read.seed)]
        command += [] if self.read.dtype == "auto" else ["--teacher-dtype", self.read.dtype]
        better = self.output.with_name(f"{self.output.name}-recovered")
        return [*command, *self._shared(), "-o", str(better)]

    def _serve(self, config: Any, rows: Sequence[EngineCapacity]) -> str:
        """To a server, or to the form that the target reads."""
        output = str(self.output)
        if self.target == "llamacpp":
            export = ["rap", "export", "gguf", output, "-o", f"{output}.gguf"]
            return shlex.join([*export, *self._tokenizer()])
        if self.target in ("mlx", "stock"):
            return shlex.join(["rap", "export", "stock", output, "-o", f"{output}-plain"])
        if not is_pruned(config):
            served = shlex.join(["vllm", "serve", output])
            return f"{served}  # a plain checkpoint: any engine loads it"
        if any(row.ratio is not None for row in rows):
            return shlex.join(["rap", "serve", output])
        return "no engine loads this checkpoint; use transformers after `import rap`"

    def _tokenizer(self) -> list[str]:
        """Flags of a tokenizer that llama.cpp's table may lack."""
        if is_gguf(self.model):
            return ["--tokenizer-from", self.model]
        return ["--pre", BUNDLED_PRE] if self.model == BUNDLED else []

    def _shared(self) -> list[str]:
        """What both read alike, where it is not the default."""
        default = ReadingOptions()
        flags = {"--bos": "bos", "--device": "device", "--device-map": "device_map"}
        changed = {
            flag: getattr(self.read, name)
            for flag, name in flags.items()
            if getattr(self.read, name) != getattr(default, name)
        }
        return [word for pair in changed.items() for word in pair]


def say_next(steps: Sequence[str]) -> None:
    """Print them on standard error, in plain text that can be copied."""
    for step in steps:
        console.print(step)
