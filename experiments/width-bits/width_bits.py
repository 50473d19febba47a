"""Cut the width of the cache, its bits, or both? Fidelity and bytes in llama.cpp.

    python experiments/width-bits/width_bits.py [MODEL] [--calibration TEXT] [--windows 32]
        [--text TEXT] [--held-out 4] [--length 1024] [--checkpoint NAME=FOLDER ...] [--output FILE]

The dense model, cuts of the stock profile, and checkpoints of that profile made before (fitted
ones), exported as F16 files, each with a cache of 16, 8 and 4 bits: KL to the dense model with a
16-bit cache, and from the model itself with one, perplexity, and bytes of cache by the engine's
account. Writes width_bits.json beside this file. What widths and bits do to speed is in
benchmarks/llamacpp.py.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import installed_version, provenance
from rap.serving.engine import EngineError
from rap.serving.gguf.export import export_gguf
from rap.serving.llamacpp.verify import Asked, run_llamacpp
from rap.studies.report.report import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import cut

# Name, retain (None: dense), heads mixed for a quantized cache.
MODELS: list[tuple[str, float | None, bool]] = [
    ("dense", None, False),
    ("0.75", 0.75, False),
    ("0.5", 0.5, False),
    ("0.5, mixed", 0.5, True),
]
CACHES = ("f16", "q8_0", "q4_0")


@dataclass
class Judge:
    """The dense model's output projection, the held-out windows [N, T], and dense log-probs."""

    head: Any
    windows: Tensor

    @torch.no_grad()
    def logprobs(self, states: list[list[float]]) -> Tensor:
        """[T, V] of hidden states."""
        found: Tensor = self.head(torch.tensor(states)).log_softmax(-1)
        return found


def exported(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Path], Any, Any]:
    """A file per model of MODELS, and the dense model with its tokenizer."""
    reading = CalibrationText(arguments.calibration, arguments.windows)
    bench = DenseContext.open(
        arguments.model, dtype=torch.float32, reading=reading, kept_in=arguments.kept_in
    )
    files, saved = {}, {}
    dense = folder / "dense"
    bench.model.save_pretrained(dense)
    bench.tokenizer.save_pretrained(dense)
    for name, retain, mixed in MODELS:
        if retain is not None and retain not in saved:
            saved[retain] = cut(bench, retain, arguments.kept_in or folder)
        source = dense if retain is None else saved[retain]
        files[name] = folder / f"{name}.gguf"
        export_gguf(source, files[name], kind="f16", rotate=mixed, pre=arguments.pre)
    for number, (name, source) in enumerate(arguments.checkpoint):
        files[name] = folder / f"checkpoint-{number}.gguf"
        export_gguf(source, files[name], kind="f16", pre=arguments.pre)
    return files, bench.model, bench.tokenizer


def named_folder(text: str) -> tuple[str, Path]:
    """NAME=FOLDER in parts.

    Raises:
        argparse.ArgumentTypeError: There is no name, or no such folder.
    """
    name, _, folder = text.partition("=")
    if not name or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"NAME=FOLDER with a checkpoint's folder, not {text!r}")
    return name, Path(folder)


def fidelity(files: dict[str, Path], judge: Judge, cells: int) -> list[dict[str, Any]]:
    """A row per model and cache: bytes/token, KL, perplexity; or why the engine refuses."""
    rows: list[dict[str, Any]] = []
    prompts = judge.windows.tolist()
    dense: list[Tensor] = []
    for name, file in files.items():
        own: list[Tensor] = []
        for cache in CACHES:
            row: dict[str, Any] = {"model": name, "cache": cache}
            try:
                asked = Asked(hidden=prompts)
                run = run_llamacpp(
                    file, asked, context=cells, cache=cache, flash_attention="enabled"
                )
            except EngineError as error:
                rows.append(row | {"refused": str(error).splitlines()[0]})
                continue
            found = [judge.logprobs(states) for states in run.hidden]
            dense = dense or found
            own = own or found
            row["bytes_per_token"] = run.cache_bytes / run.cache_cells
            row["kl"] = divergence(dense, found)
            row["kl_own"] = divergence(own, found)
            row["perplexity"] = perplexity(judge.windows, found)
            rows.append(row)
            print(row, flush=True)
    return rows


def divergence(reference: list[Tensor], found: list[Tensor]) -> float:
    """Mean KL(reference || found) in nats/token."""
    each = [
        (one.exp() * (one - other)).sum(-1) for one, other in zip(reference, found, strict=True)
    ]
    return float(torch.cat(each).double().mean())


def perplexity(windows: Tensor, found: list[Tensor]) -> float:
    """Of the second token of every window and those behind it."""
    each = [
        one[:-1].gather(1, window[1:, None]) for one, window in zip(found, windows, strict=True)
    ]
    return float(torch.cat(each).double().mean().neg().exp())


def table(result: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """A row a model and cache, as `rap report` reads it."""
    base = result["fidelity"][0]["bytes_per_token"]
    rows = []
    for row in result["fidelity"]:
        about = [row["model"], row["cache"]]
        if "refused" in row:
            rows.append([*about, "refused", *[""] * 4])
            continue
        rows.append(
            [
                *about,
                f"{row['bytes_per_token'] / 1024:.2f}",
                f"{base / row['bytes_per_token']:.2f}",
                f"{row['kl']:.2g}",
                f"{row['kl_own']:.2g}",
                f"{row['perplexity']:.2f}",
            ]
        )
    return {
        "title": f"Width of the cache against its bits, {arguments.model} in llama.cpp",
        "note": (
            "Stock profile, no recovery where no name says more, files of type F16; KL in nats a "
            f"token over {arguments.held_out} windows of {arguments.length:,} tokens, from the "
            "dense model with a 16-bit cache and from the model itself with one. `mixed`: "
            "`--rotate`. Speed is in benchmarks/llamacpp.py."
        ),
        "header": ["model", "cache", "KiB/token", "tokens, x", "KL", "KL, own", "PPL"],
        "rows": rows,
    }


def main() -> None:
    """Measure, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--calibration", default="bundled")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--text", default="bundled", help="held-out text")
    parser.add_argument("--held-out", type=int, default=4, help="windows")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--pre", help="llama.cpp's pre-tokenizer, where its table has none")
    parser.add_argument("--kept-in", type=Path, help="folder of statistics and cuts")
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        type=named_folder,
        help="a stock checkpoint made before, e.g. a fitted one; more than one may be given",
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files, dense, tokenizer = exported(arguments, Path(folder))
        bench = DenseContext(dense, tokenizer, arguments.model)
        tokens = bench.held_out(arguments.text)
        size = arguments.held_out * arguments.length
        judge = Judge(dense.lm_head, tokens[:size].reshape(arguments.held_out, arguments.length))
        result: dict[str, Any] = {"model": arguments.model, "fingerprint": bench.fingerprint}
        result["fidelity"] = fidelity(files, judge, arguments.length)
    skipped = ("output", "kept_in")
    asked = {name: value for name, value in vars(arguments).items() if name not in skipped}
    asked["checkpoint"] = [name for name, _ in arguments.checkpoint]
    result["provenance"] = provenance(**asked, xllamacpp=installed_version("xllamacpp"))
    result["table"] = table(result, arguments)
    result["command"] = result["provenance"]["command"]
    write_json(arguments.output, result)
    print(markdown_table(result["table"]))


if __name__ == "__main__":
    main()
