"""What to do with a checkpoint that was just made: judge it, win quality back, run it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.load import is_pruned
from ..serving.capacity import Held
from .options import console


def next_steps(
    model: str, output: Path, config: Any, rows: Sequence[Held], recover: str, target: str | None
) -> list[str]:
    """Three commands, in the order in which they make sense; the last is of its `target`."""
    better = shlex.quote(str(output.with_name(f"{output.name}-recovered")))
    preset = "fit" if recover in ("none", "closed-form") else "full"
    cut, dense = shlex.quote(str(output)), shlex.quote(model)
    return [
        f"judge:   rap evaluate fidelity {cut} --dense {dense}",
        f"recover: rap recover {cut} --teacher {dense} --preset {preset} -o {better}",
        f"serve:   {_serve(str(output), config, rows, target)}",
    ]


def _serve(output: str, config: Any, rows: Sequence[Held], target: str | None) -> str:
    cut = shlex.quote(output)
    if target == "llamacpp":
        return f"rap export gguf {cut} -o {shlex.quote(f'{output}.gguf')}"
    if target in ("mlx", "stock"):
        return f"rap export stock {cut} -o {shlex.quote(f'{output}-plain')}"
    if not is_pruned(config):
        return f"vllm serve {cut}  (a plain checkpoint: any engine takes it)"
    if any(row.ratio is not None for row in rows):
        return f"rap serve {cut}"
    return "in transformers, after `import rap`: no engine takes this checkpoint"


def say_next(steps: Sequence[str]) -> None:
    """Print them on standard error, in plain text that can be copied."""
    for step in steps:
        console.print(step)
