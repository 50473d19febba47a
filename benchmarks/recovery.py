"""Peak memory and speed of recovery: the chunked loss, and the precision of the teacher.

    python benchmarks/recovery.py [--steps 8] [--output benchmarks/results/recovery-cpu.json]

Every row runs in a process of its own. The loss is measured at a vocabulary of 128k, chunked and
plain, beside a process that only makes its inputs. The teacher's precision is measured on the
bundled model at half of its cache, by the tokens per CPU second of a short `fast` recovery and by
the held-out perplexity it ends with. CPU seconds, because wall time of a shared machine says
nothing. Linux only: it reads /proc.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from speed import resident_peak

from rap import Rap, apply, assets, calibrate, load_windows
from rap.checkpoint.provenance import provenance
from rap.evaluation.quantization import KINDS, quantize_weights
from rap.recovery.config import RecoveryConfig, recovery_config
from rap.recovery.data import recovery_windows
from rap.recovery.distillation import distill
from rap.recovery.loss import distillation_loss, token_loss

MIB = 2**20
TOKENS, WIDTH, VOCABULARY = 512, 128, 131072
LOSSES = ("inputs", "chunked", "plain")
TEACHERS = ("float32", "bfloat16", "int8")


def measure_loss(how: str) -> dict[str, Any]:
    """One forward and backward of the loss over 512 tokens of 128k logits."""
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, TOKENS, WIDTH)
    hidden.requires_grad_()
    heads = torch.randn(2, VOCABULARY, WIDTH)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    config, start = RecoveryConfig(), time.process_time()
    loss = torch.zeros(())
    if how == "chunked":
        maps = (lambda x: x @ heads[0].T, lambda x: x @ heads[1].T)
        loss = distillation_loss(hidden, teacher, targets, maps, config)
    elif how == "plain":
        loss = token_loss(hidden @ heads[0].T, teacher @ heads[1].T, targets, config).mean()
    if how != "inputs":
        loss.backward()
    gradient = 0.0 if hidden.grad is None else float(hidden.grad.norm())
    return {"loss": float(loss), "gradient": gradient, "cpu_seconds": time.process_time() - start}


def measure_teacher(dtype: str, steps: int) -> dict[str, Any]:
    """A short recovery of the paper's cut of the bundled model, with a teacher of that dtype."""
    model, tokenizer = assets.reference_model(torch.float32), assets.reference_tokenizer()
    method = Rap.paper(retain=0.5)
    calibration = load_windows("bundled", tokenizer, num_windows=8, window=256)
    small = apply(model, method.plan(model, calibrate(model, calibration, method.needs)))
    config = recovery_config("fast", steps=steps, evaluate_every=steps, validation_windows=16)
    windows, validation = recovery_windows(["bundled"], tokenizer, config)
    if dtype in KINDS:
        teacher = quantize_weights(assets.reference_model(torch.float32), dtype)
    else:
        teacher = assets.reference_model(getattr(torch, dtype))
    start = time.process_time()
    report = distill(small, teacher, windows, config, validation=validation).report
    seconds = time.process_time() - start
    trained = steps * config.global_batch * config.window
    return {
        "tokens": trained,
        "cpu_seconds": seconds,
        "tokens_per_cpu_second": trained / seconds,
        "perplexity_before": report["perplexity_before"],
        "perplexity_after": report["perplexity_after"],
    }


def run(kind: str, name: str, steps: int) -> dict[str, Any]:
    """One row in a new process."""
    command = [sys.executable, __file__, "--perform", kind, name, "--steps", str(steps)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def table(
    losses: dict[str, dict[str, Any]], teachers: dict[str, dict[str, Any]], steps: int
) -> dict[str, Any]:
    """Both measurements as one table of `rap report`."""
    rows = [
        [f"loss, {name}", f"{row['peak_mib']:.0f}", f"{row['cpu_seconds']:.1f}", "", ""]
        for name, row in losses.items()
    ]
    for name, row in teachers.items():
        cells = [f"{row['peak_mib']:.0f}", f"{row['cpu_seconds']:.1f}"]
        cells += [f"{row['tokens_per_cpu_second']:.0f}", f"{row['perplexity_after']:.4f}"]
        rows.append([f"recovery, teacher in {name}", *cells])
    return {
        "title": "What recovery costs: the chunked loss, and the teacher's precision",
        "note": (
            f"Loss: forward and backward over {TOKENS} tokens of {VOCABULARY:,} logits, beside a "
            f"process that only makes the inputs. Recovery: {steps} steps of `fast` on the bundled "
            "model at half of its cache, held-out perplexity after them."
        ),
        "header": ["what", "peak MiB", "CPU s", "tokens per CPU s", "perplexity"],
        "rows": rows,
    }


def main() -> None:
    """Measure every row, write the file, and print what a person looks at first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/recovery-cpu.json"))
    parser.add_argument("--perform", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.perform:
        kind, name = options.perform
        row = measure_loss(name) if kind == "loss" else measure_teacher(name, options.steps)
        print(json.dumps(row | {"peak_mib": round(resident_peak() / MIB, 1)}))
        return
    losses = {name: run("loss", name, options.steps) for name in LOSSES}
    teachers = {name: run("teacher", name, options.steps) for name in TEACHERS}
    made = provenance()
    result = {
        "table": table(losses, teachers, options.steps),
        "command": made["command"],
        "provenance": made,
        "loss": {"tokens": TOKENS, "vocabulary": VOCABULARY, "rows": losses},
        "teacher": {"model": "bundled", "retain": 0.5, "steps": options.steps, "rows": teachers},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    for name, row in (losses | teachers).items():
        print(f"{name:10s} peak {row['peak_mib']:8.1f} MiB, {row['cpu_seconds']:6.1f} CPU s")
    ratio = (losses["plain"]["peak_mib"] - losses["inputs"]["peak_mib"]) / (
        losses["chunked"]["peak_mib"] - losses["inputs"]["peak_mib"]
    )
    print(f"the plain loss holds {ratio:.1f} times what the chunked one does")


if __name__ == "__main__":
    main()
