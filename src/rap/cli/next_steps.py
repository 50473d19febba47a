"""What to do with a checkpoint that was just made: judge it, win quality back, run it."""

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
    better = output.with_name(f"{output.name}-recovered")
    preset = "fit" if recover in ("none", "closed-form") else "full"
    return [
        f"judge:   rap evaluate fidelity {output} --dense {model}",
        f"recover: rap recover {output} --teacher {model} --preset {preset} -o {better}",
        f"serve:   {_serve(output, config, rows, target)}",
    ]


def _serve(output: Path, config: Any, rows: Sequence[Held], target: str | None) -> str:
    if target == "llamacpp":
        return f"rap export gguf {output} -o {output}.gguf"
    if target in ("mlx", "stock"):
        return f"rap export stock {output} -o {output}-plain"
    if not is_pruned(config):
        return f"vllm serve {output}  (a plain checkpoint: any engine takes it)"
    if any(row.ratio is not None for row in rows):
        return f"rap serve {output}"
    return "in transformers, after `import rap`: no engine takes this checkpoint"


def say_next(steps: Sequence[str]) -> None:
    """Print them on standard error, in plain text that can be copied."""
    for step in steps:
        console.print(step)
