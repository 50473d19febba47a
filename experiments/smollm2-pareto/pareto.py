"""SmolLM2-135M-Instruct: pruning, a quantized cache, evicted tokens and quantized weights together.

    python experiments/smollm2-pareto/pareto.py --statistics FOLDER
        [--checkpoint NAME=DIRECTORY ...] [--windows 2]

Calibration reads wikitext2-valid-tokenized.txt in the current folder; its statistics are kept in
FOLDER. Checkpoints are pruned models with a recovery, NAME is as in 'rap 0.7 fit'. Writes
pareto.json beside this file after every row; repeated with the same settings, it measures only what
that lacks.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import front
import torch
from continuations import DenseContinuations, Prefixes

from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load
from rap.checkpoint.provenance import installed_version, provenance
from rap.checkpoint.source import resolve_source
from rap.evaluation.cache.compressed import CacheCompression, held_bytes
from rap.evaluation.cache.presses import Press
from rap.evaluation.quantization import quantize_weights
from rap.methods import parse_method
from rap.studies.report.report import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import relative, weights_of

SOURCE, TEXT = "smollm2", "wikitext2-test.txt"
READING = CalibrationText("wikitext2-valid-tokenized.txt", num_windows=24, window=1024)
RESULT = Path(__file__).with_suffix(".json")
WINDOW, PREFIX, PIECE = 640, 384, 128  # a piece is as many new tokens as stay unquantized
PACKAGES = ("hqq", "optimum-quanto", "kvpress", "torchao", "bitsandbytes")

BITS = ("hqq8", "hqq4", "hqq3", "hqq2")
ALL_BITS = (*BITS, "quanto4", "quanto2")
PRESSES = tuple(Press(name, 0.5) for name in ("snapkv", "keydiff", "tova", "expected"))
HARDER = tuple(Press(press.name, 0.75) for press in PRESSES)
WEIGHTS = ("int8", "nf4")
BARE = CacheCompression()
Axis = tuple[str, CacheCompression]  # bits of the weights, and what happens to the cache


def is_done(key: dict[str, Any], row: front.Row) -> bool:
    """Whether a row is what is to be measured; those of earlier releases have no fingerprint."""
    return all(row.get(name, value) == value for name, value in key.items())


@dataclass(frozen=True)
class Subject:
    """A model by method, retain ratio and recovery; a recovered one is a checkpoint."""

    method: str
    retain: float
    recover: str = "none"
    directory: Path | None = None

    def make(self, bench: DenseContext) -> Any:
        """The model, in float32."""
        if self.directory is not None:
            return load(resolve_source(self.directory), dtype="float32")
        if self.method == "dense":
            return bench.model
        method = parse_method(self.method, retain=self.retain, merge=1)
        return method.apply(bench.model, bench.plan(method))

    def axes(self) -> list[list[Axis]]:
        """What is measured, in stages: the first of all models come before the second of any."""
        dense, palu = self.method == "dense", self.method == "palu"
        studied = dense or self.recover == "fit+full"
        kinds = ALL_BITS if dense else BITS if studied else ("hqq4", "hqq3" if palu else "hqq2")
        bits = [BARE, *(CacheCompression(bits=kind) for kind in kinds)]
        # The keys of palu are rotated by their places, which eviction changes.
        presses = [] if palu else [CacheCompression(press=press) for press in PRESSES]
        small = (["hqq4"] if studied else []) + (["hqq3"] if dense else [])
        both = [replace(one, bits=kind) for kind in small for one in presses]
        harder = [CacheCompression(press=press) for press in HARDER if dense]
        first, last = ([*presses, *both], harder) if studied else ([], presses)
        of_bits, of_presses, of_the_rest = (
            [(front.AS_IT_IS, cache) for cache in stage] for stage in (bits, first, last)
        )
        return [of_bits, of_presses, [(kind, BARE) for kind in WEIGHTS], of_the_rest]

    def key(self, weights: str, cache: CacheCompression) -> dict[str, Any]:
        """What a measured row must agree in."""
        press = None if cache.press is None else str(cache.press)
        made: dict[str, Any] = {
            "method": self.method,
            "retain": self.retain,
            "recover": self.recover,
        }
        if self.directory is not None:
            made["fingerprint"] = weights_of(self.directory)
        return made | {"weights": weights, "bits": cache.bits, "press": press}


def subjects(checkpoints: Sequence[Subject]) -> list[Subject]:
    """All models, those that say most first."""
    distilled = sorted(checkpoints, key=lambda one: (one.recover != "fit+full", -one.retain))
    cuts = [Subject(method, retain) for method in ("palu", "rap") for retain in (0.7, 0.5)]
    return [Subject("dense", 1.0), *distilled, *cuts]


class Bench:
    """The dense model, what it predicts, and how many bytes of cache it holds a token."""

    def __init__(self, statistics: Path, num_windows: int):
        self.dense = DenseContext.open(
            SOURCE, dtype=torch.float32, reading=READING, kept_in=statistics
        )
        sizes = {"window": WINDOW, "prefix": PREFIX, "piece": PIECE, "num_windows": num_windows}
        self.judge = DenseContinuations(self.dense.model, self.dense.held_out(TEXT), **sizes)
        plain = self.judge.read(self.dense.model)
        self.whole = held_bytes(plain.cache(self.dense.model, None, torch.bfloat16)) / PREFIX

    def rows(
        self,
        subject: Subject,
        axes: Sequence[Axis],
        done: Sequence[front.Row],
    ) -> Iterator[front.Row]:
        """The rows of a model that are not done."""
        keyed = [(*axis, subject.key(*axis)) for axis in axes]
        lacking = [one for one in keyed if not any(is_done(one[2], row) for row in done)]
        if not lacking:
            return
        whole = subject.make(self.dense)
        states: dict[tuple[str, Press | None], Prefixes] = {}
        for weights, cache, key in lacking:
            started = time.monotonic()
            model = whole
            if weights != front.AS_IT_IS:
                model = quantize_weights(copy.deepcopy(whole), weights)
            read = weights, cache.press
            if read not in states:
                states[read] = self.judge.read(model, cache.press)
            found = asdict(self.judge.compare(model, states[read], cache.bits))
            share = {"share": found["bytes_per_token"] / self.whole}
            yield key | found | share | {"seconds": round(time.monotonic() - started, 1)}


def note(settings: dict[str, Any]) -> str:
    """What was measured, for the table."""
    return (
        f"SmolLM2-135M-Instruct on {settings['windows']} windows of {WINDOW} tokens, spread over "
        f"the WikiText-2 test set: the first {PREFIX} are read, their cache is compressed, and the "
        f"rest is evaluated in pieces of {PIECE} against the dense model with its cache as it is. "
        "Bytes are those of the first tokens' cache, in bfloat16, a token, counted on all tensors "
        "that the cache holds; scales and zero points count. Tokens that follow stay as they are, "
        "hqq and quanto quantize them in turn, and nothing evicts them."
    )


def stored(settings: dict[str, Any], fingerprint: str, calibration: str) -> list[front.Row]:
    """The rows of an earlier run with these settings, this model, text and packages."""
    if not RESULT.is_file():
        return []
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    about = found["provenance"]["settings"], found["fingerprint"], found["calibration"]
    same = about == (settings, fingerprint, calibration)
    rows: list[front.Row] = found["rows"] if same else []
    return rows


def write(bench: Bench, rows: Sequence[front.Row], settings: dict[str, Any]) -> None:
    """The result file of what has been measured so far."""
    made = provenance(**settings)
    result = {
        "title": "Pruning combined with other compression, SmolLM2",
        "tables": front.tables(rows, note(settings)),
        "model": SOURCE,
        "calibration": READING.describe(bench.dense.bos),
        "fingerprint": bench.dense.fingerprint,
        "dense_bytes_per_token": bench.whole,
        "rows": rows,
        "command": made["command"],
        "provenance": made,
    }
    write_json(RESULT, result)


def checkpoint(text: str) -> Subject:
    """A model from 'METHOD RETAIN RECOVERY=DIRECTORY'."""
    parts = text.split(maxsplit=2)
    recover, _, directory = parts[-1].partition("=")
    if len(parts) != 3 or recover not in front.RECOVERED or not directory:
        raise argparse.ArgumentTypeError(f"{text}: write 'METHOD RETAIN RECOVERY=DIRECTORY'")
    return Subject(parts[0], float(parts[1]), recover, relative(directory))


def main() -> None:
    """Measure what is missing, write after every row, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--statistics", type=relative, required=True)
    parser.add_argument("--checkpoint", type=checkpoint, action="append", default=[])
    parser.add_argument("--windows", type=int, default=2)
    arguments = parser.parse_args()
    versions = {name: installed_version(name) for name in PACKAGES}
    sizes = {"window": WINDOW, "prefix": PREFIX, "piece": PIECE}
    settings = {"windows": arguments.windows, "text": TEXT, **sizes, **versions}
    chosen = subjects(arguments.checkpoint)
    stages = zip(*(one.axes() for one in chosen), strict=True)
    plan = [pair for stage in stages for pair in zip(chosen, stage, strict=True)]
    for _, cache in (axis for _, axes in plan for axis in axes):
        cache.check()
    bench = Bench(arguments.statistics, arguments.windows)
    rows = stored(settings, bench.dense.fingerprint, READING.describe(bench.dense.bos))
    for subject, axes in plan:
        for row in bench.rows(subject, axes, list(rows)):
            rows.append(row)
            print(front.name_of(row), f"{row['kl']:.4f} {row['share']:.3f}", flush=True)
            write(bench, rows, settings)
    for table in front.tables(rows, note(settings)):
        print(f"\n{table['title']}\n\n{markdown_table(table)}")


if __name__ == "__main__":
    main()
