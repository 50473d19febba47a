"""Long answers and small sums of SmolLM2-135M-Instruct, dense and with 0.7 of its cache.

    python experiments/archive/smollm2-long-output/run.py --kept-in FOLDER
        [--checkpoint NAME=DIRECTORY ...] [--part greedy] [--part sampled]
        [--part sums] [--shards 5]

The bundled fifty prompts are answered greedily and sampled, and a hundred additions greedily, each
after four others. Calibration reads wikitext2-valid-tokenized.txt in the current folder; FOLDER
keeps its statistics and whatever is finished, so that the command can be killed and repeated. A
shard is every fifth prompt. Writes long-output.json beside this file when all it was asked for is
there.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.card import interval_text
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load
from rap.checkpoint.provenance import provenance
from rap.checkpoint.source import resolve_source
from rap.data.protocol import evaluation_rng
from rap.evaluation.quality.answers import divergences, long_output
from rap.evaluation.quality.decoding import Sampling, Text, end_tokens, write
from rap.evaluation.quality.generation import chat_tokens, read_prompts
from rap.evaluation.quality.intervals import share_interval
from rap.methods import parse_method
from rap.model.fingerprint import fingerprint_model
from rap.studies.report.report import markdown_table

SOURCE, CUT = "smollm2", "rap 0.7"
READING = CalibrationText("wikitext2-valid-tokenized.txt", num_windows=24, window=1024)
MODES: dict[str, Sampling | None] = {"greedy": None, "sampled": Sampling(0.7, 0.9, seed=0)}
SUMS = {"one digit": (1, 9), "two digits": (10, 99)}
NUM_SUMS, EXAMPLES, SUM_TOKENS = 50, 4, 6
NUM_TOKENS, SHARDS, BATCH_SIZE = 1024, 5, 10
HERE = Path(__file__).parent


class Subjects:
    """The dense model and those cut from it, each made when it is first asked for."""

    def __init__(self, kept_in: Path, checkpoints: Sequence[tuple[str, Path]]) -> None:
        self.bench = DenseContext.open(
            SOURCE, dtype=torch.float32, reading=READING, kept_in=kept_in, progress=True
        )
        self.kept_in, self._folders = kept_in, dict(checkpoints)
        self.pruned = [CUT, *self._folders]
        self._made: dict[str, Any] = {"dense": self.bench.model}
        self._fingerprints: dict[str, str] = {}

    def model(self, name: str) -> Any:
        """The model of that name."""
        if name not in self._made:
            # One cut model at a time beside the dense one.
            self._made = {"dense": self.bench.model}
            if name == CUT:
                text, retain = name.split()
                method = parse_method(text, retain=float(retain), merge=1)
                self._made[name] = method.apply(self.bench.model, self.bench.plan(method))
            else:
                self._made[name] = load(resolve_source(self._folders[name]), dtype="float32")
        return self._made[name]

    def fingerprint(self, name: str) -> str:
        """Of the weights of the model of that name."""
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint_model(self.model(name))
        return self._fingerprints[name]

    def kept(self, what: str, name: str, make: Callable[[], Any], **settings: Any) -> Any:
        """What `make` gives of a model, from the folder if it was made before.

        A file is named by the weights of that model and the dense one too, and by the settings:
        one that was fitted anew in the same folder has its own.
        """
        about = {"dense": self.bench.fingerprint, "model": self.fingerprint(name), **settings}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
        path = self.kept_in / f"{f'{what} {name}'.replace(' ', '-')}-{key}.pt"
        if not path.is_file():
            started = time.monotonic()
            torch.save(make(), path)
            print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)
        return torch.load(path)

    def answers(
        self, name: str, mode: str, shard: int, prompts: list[Tensor], ends: frozenset[int]
    ) -> list[Text]:
        """What a model writes after a shard of the prompts."""
        chosen = MODES[mode]
        # Rows of a shard count from 0, so another seed gives them other numbers.
        sampling = chosen and replace(chosen, seed=shard)

        def make() -> list[dict[str, Tensor]]:
            written = write(
                self.model(name),
                prompts,
                NUM_TOKENS,
                ends=ends,
                sampling=sampling,
                batch_size=BATCH_SIZE,
            )
            return [asdict(text) for text in written]

        found = self.kept(f"answers {mode} {shard}", name, make, **asked_of(mode, shard))
        return [Text(**fields) for fields in found]


def asked_of(mode: str, shard: int) -> dict[str, Any]:
    """What the answers to a shard of the prompts depend on beside the model."""
    chosen = MODES[mode]
    sampling = None if chosen is None else asdict(chosen)
    sizes = {"tokens": NUM_TOKENS, "batch": BATCH_SIZE, "shard": [shard, SHARDS]}
    return {"sampling": sampling, "prompts": read_prompts("bundled")[shard::SHARDS], **sizes}


def measure_answers(subjects: Subjects, mode: str, shards: Sequence[int]) -> list[dict[str, Any]]:
    """A row a pruned model: its answers beside those of the dense one."""
    dense, tokenizer = subjects.bench.model, subjects.bench.tokenizer
    prompts, ends = chat_tokens(read_prompts("bundled"), tokenizer), end_tokens(dense)
    found: dict[str, list[Any]] = {name: [[], [], []] for name in subjects.pruned}
    for shard in shards:
        asked = prompts[shard::SHARDS]
        for name in subjects.pruned:
            ours, theirs = (
                subjects.answers(one, mode, shard, asked, ends) for one in (name, "dense")
            )
            kl = subjects.kept(
                f"divergence {mode} {shard}",
                name,
                lambda name=name, asked=asked, ours=ours, theirs=theirs: divergences(
                    subjects.model(name), dense, asked, ours, theirs, progress=True
                ),
                **asked_of(mode, shard),
            )
            for part, more in zip(found[name], (ours, theirs, kl), strict=True):
                part += more
    return [
        {
            "model": name,
            "mode": mode,
            "fingerprint": subjects.fingerprint(name),
            **asdict(long_output(*parts, num_tokens=NUM_TOKENS, ends=ends)),
        }
        for name, parts in found.items()
    ]


def measure_sums(subjects: Subjects) -> list[dict[str, Any]]:
    """A row a model: the share of additions that it finishes right, greedily."""
    tokenizer = subjects.bench.tokenizer

    def share(model: Any, low: int, high: int) -> dict[str, float]:
        rng = evaluation_rng(0, low, high)
        drawn = rng.integers(low, high + 1, size=(NUM_SUMS, EXAMPLES + 1, 2)).tolist()
        asked = ["".join(f"{a} + {b} = {a + b}\n" for a, b in sums) for sums in drawn]
        prompts = [
            torch.tensor(tokenizer(text.rpartition(" ")[0], add_special_tokens=False).input_ids)
            for text in asked
        ]
        written = write(model, prompts, SUM_TOKENS, batch_size=BATCH_SIZE)
        said = [tokenizer.decode(text.tokens).strip().split("\n")[0].strip() for text in written]
        right = [one == str(sum(sums[-1])) for one, sums in zip(said, drawn, strict=True)]
        return asdict(share_interval(sum(right) / NUM_SUMS, NUM_SUMS))

    return [
        {
            "model": name,
            "mode": "sums",
            "sums": subjects.kept(
                "sums",
                name,
                lambda name=name: {
                    kind: share(subjects.model(name), *ends) for kind, ends in SUMS.items()
                },
                sums=[SUMS, NUM_SUMS, EXAMPLES, SUM_TOKENS],
            ),
        }
        for name in ("dense", *subjects.pruned)
    ]


def tables(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `rap report` shows: answers and divergence of each mode, and sums."""
    found = []
    for mode in MODES:
        rows = [one for one in cells if one["mode"] == mode]
        if rows:
            found += [answers_table(mode, rows), divergence_table(mode, rows)]
    sums = [one for one in cells if one["mode"] == "sums"]
    if sums:
        found.append(sums_table(sums))
    return found


def answers_table(mode: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row a model: how its answers are, and how near those of the dense one."""

    def texts(answers: dict[str, Any]) -> list[str]:
        shares = [interval_text(answers[key], ".0%") for key in ("ended", "looping", "repetition")]
        return [interval_text(answers["length"], ".0f"), *shares]

    rows = [["dense", *texts(cells[0]["dense"]), "", ""]]
    for one in cells:
        near = [interval_text(one["agreement"], ".0%"), interval_text(one["common_prefix"], ".0f")]
        rows.append([one["model"], *texts(one["pruned"]), *near])
    return {
        "title": f"Long answers of SmolLM2-135M-Instruct, {described(mode)}",
        "note": (
            f"{cells[0]['num_prompts']} prompts, up to {cells[0]['num_tokens']:,} tokens, with "
            "95% intervals over prompts. In a loop: the last 256 tokens repeat a stretch of at "
            "most 64. Repeated: 4-grams that occurred before in the answer. Alike: places with the "
            "dense model's token, and tokens before the first other one."
        ),
        "header": ["model", "tokens", "ended", "in a loop", "repeated", "alike", "prefix"],
        "rows": rows,
    }


def divergence_table(mode: str, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row a model and whose answer is read: KL by position in the answer."""
    ranges = cells[0]["dense"]["positions"]
    rows = []
    for one in cells:
        for whose, writer in (("the dense model's", "dense"), ("its own", "pruned")):
            # A range that no answer reaches is left out of its cell.
            found = {part["start"]: part for part in one[writer]["positions"]}
            parts = [found.get(part["start"]) for part in ranges]
            shown = [
                f"{interval_text(part['kl'], '.3f')}, {part['num_texts']}" if part else ""
                for part in parts
            ]
            rows.append([one["model"], whose, interval_text(one[writer]["kl"], ".3f"), *shown])
    return {
        "title": f"KL along long answers, {described(mode)}",
        "note": (
            "KL(dense || pruned) in nats/token along answers that the one or the other wrote: "
            "means of means of answers, with 95% intervals over prompts, and how many answers "
            "reach the range of positions."
        ),
        "header": [
            "model",
            "along",
            "whole",
            *(f"{part['start']:,} to {part['stop'] - 1:,}" for part in ranges),
        ],
        "rows": rows,
    }


def sums_table(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row a model: the share of sums that are right."""
    rows = [
        [one["model"], *(interval_text(one["sums"][kind], ".0%") for kind in SUMS)] for one in cells
    ]
    return {
        "title": "Additions of SmolLM2-135M-Instruct",
        "note": (
            f"{NUM_SUMS} additions of two numbers of so many digits, each after {EXAMPLES} others "
            "with their sums, answered greedily; with Wilson's 95% interval."
        ),
        "header": ["model", *SUMS],
        "rows": rows,
    }


def described(mode: str) -> str:
    """How a mode chooses tokens."""
    sampling = MODES[mode]
    if sampling is None:
        return "greedy"
    return f"sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"


def relative(text: str) -> Path:
    """A folder as results may name it."""
    path = Path(text)
    if path.is_absolute():
        raise argparse.ArgumentTypeError(f"{text} is one machine's: give it from this folder")
    return path


def named(text: str) -> tuple[str, Path]:
    """NAME=DIRECTORY."""
    name, equals, directory = text.partition("=")
    if not (name and equals and directory):
        raise argparse.ArgumentTypeError(f"{text}: write NAME=DIRECTORY")
    return name, relative(directory)


def main() -> None:
    """Measure what is missing of the chosen parts; write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kept-in", type=relative, required=True)
    parser.add_argument("--checkpoint", type=named, action="append", default=[])
    parser.add_argument("--part", choices=[*MODES, "sums"], action="append")
    parser.add_argument("--shards", type=int, choices=range(1, SHARDS + 1), default=SHARDS)
    arguments = parser.parse_args()
    made = provenance(tokens=NUM_TOKENS, batch_size=BATCH_SIZE)
    subjects = Subjects(arguments.kept_in, arguments.checkpoint)
    rows: list[dict[str, Any]] = []
    for part in arguments.part or [*MODES, "sums"]:
        if part == "sums":
            rows += measure_sums(subjects)
        else:
            rows += measure_answers(subjects, part, range(arguments.shards))
    result = {
        "model": SOURCE,
        "fingerprint": subjects.bench.fingerprint,
        "calibration": READING.describe(subjects.bench.bos),
        "rows": rows,
        "tables": tables(rows),
        "command": made["command"],
        "provenance": made,
    }
    write_json(HERE / "long-output.json", result)
    print("\n\n".join(markdown_table(one) for one in result["tables"]))


if __name__ == "__main__":
    main()
