"""What every form of a model keeps by the default recovery, and with distillation behind it.

    python experiments/recovered-forms/run.py [ROW ...] [--together 3] [--list]

A row is MODEL-FORM-RATIO, such as smollm2-plain-0.5, the same with `-distilled` behind it, or
MODEL-dense. Its commands are those that users type; ROW.json beside this file has them all with
what they found. Texts are read from the current folder, as experiments/README.md names them.
Models and parts of results lie in runs/recovered-forms, and a killed run goes on where it stood.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance

HERE = Path(__file__).parent
WORK = Path("runs/recovered-forms")
RATIOS = ("0.7", "0.5")
FORMS = {
    "plain": "--target plain",
    "merged": "",
    "single": "",
    "separate": "--method rap:merge=1",
    "palu": "--method palu",
}
# Gemma 3 has one KV head, so that there is nothing to merge, and no plain form; PaLU on it is
# measured in experiments/gemma3-default-palu-*.
KEPT = {"smollm2": ("plain", "merged", "separate", "palu"), "gemma3": ("single",)}
DISTILLED, DENSE = "-distilled", "dense"
DATASETS = {
    "wikitext2": "wikitext2-test.txt",
    "novels": "bundled",
    "code": "code.txt",
    "chat": "chat.jsonl",
}
LENGTHS = {1024: 8, 4096: 4, 8192: 2}  # tokens a document, and documents a forward pass
TASKS = "arc_easy,arc_challenge,piqa,openbookqa,winogrande,hellaswag"
# Four times the tokens of the preset: 36 seconds on an H200 for SmolLM2.
DATA = "bundled,own,repeated:own,repeated:encyclopedia,python"
STEPS = "steps=64 global_batch=16 window=1024 num_windows=1600 evaluate_every=64"
# What fits side by side into the memory of a GPU; the vocabulary of Gemma 3 is five times as large.
MICRO, QUESTIONS = {"smollm2": 16, "gemma3": 4}, {"smollm2": 32, "gemma3": 8}


@dataclass(frozen=True)
class Row:
    """A model in a form, by name."""

    name: str

    @property
    def model(self) -> str:
        """The dense model."""
        return self.name.partition("-")[0]

    @property
    def base(self) -> "Row | None":
        """What is distilled, where this is."""
        cut = self.name.removesuffix(DISTILLED)
        return None if cut == self.name else Row(cut)

    @property
    def is_dense(self) -> bool:
        """Whether nothing is pruned."""
        return self.name.endswith(DENSE)

    @property
    def folder(self) -> Path:
        """Where its checkpoint and the parts of its result lie."""
        return WORK / self.name

    @property
    def checkpoint(self) -> str:
        """What commands read."""
        return self.model if self.is_dense else (self.folder / "out").as_posix()

    @property
    def made(self) -> bool:
        """Whether its checkpoint is there: it appears whole."""
        return self.is_dense or Path(self.checkpoint).is_dir()

    def making(self) -> dict[str, str]:
        """The commands that make the checkpoint, by what they write."""
        if self.is_dense:
            return {}
        if self.base is None:
            _, form, ratio = self.name.split("-")
            command = f"rap compress {self.model} --retain {ratio} {FORMS[form]}"
            return {self.checkpoint: f"{' '.join(command.split())} -o {self.checkpoint}"}
        steps = " ".join(f"--set {x}" for x in (*STEPS.split(), f"micro_batch={MICRO[self.model]}"))
        trained = (
            f"rap recover {self.base.checkpoint} --teacher {self.model} --preset full --text "
            f"{DATA} {steps} -o {self.checkpoint}"
        )
        return {self.checkpoint: trained}

    def evaluating(self) -> dict[str, str]:
        """The commands that evaluate it, by the part of the result that each writes."""
        read, found = "wikitext2-test.txt", {}
        fidelity = f"rap evaluate fidelity {self.checkpoint} --dense {self.model} --window 2048"
        for name, text in {} if self.is_dense else DATASETS.items():
            found[f"fidelity_{name}"] = f"{fidelity} --text {text} --max-windows 8"
        for length, batch in LENGTHS.items():
            found[f"retrieval_{length}"] = (
                f"rap evaluate retrieval {self.checkpoint} --text {read} --documents 32 --length "
                f"{length} --task single-needle --task multi-key --batch-size {batch}"
            )
        tasks = ",".join(f"local_{name}" for name in TASKS.split(","))
        found["zero_shot"] = (
            f"rap evaluate zero-shot {self.checkpoint} --task-folder tasks --tasks {tasks} "
            f"--limit 500 --batch-size {QUESTIONS[self.model]} --dtype float32"
        )
        if not self.is_dense:
            found["fidelity_full_test_set"] = f"{fidelity} --text {read}"
        parts = {name: (self.folder / f"{name}.json").as_posix() for name in found}
        return {parts[name]: f"{command} -o {parts[name]}" for name, command in found.items()}

    def run(self) -> None:
        """Make the checkpoint, evaluate it, and write the result with all of its commands."""
        commands: dict[str, str] = {**self.making(), **self.evaluating()}
        for written, command in commands.items():
            if not Path(written).exists():
                _run(command)
        found: dict[str, Any] = {
            Path(part).stem: json.loads(Path(part).read_text("utf-8")) for part in self.evaluating()
        }
        if not self.is_dense:
            report = Path(self.checkpoint) / "rap_report.json"
            found["report"] = json.loads(report.read_text("utf-8"))
        made = provenance(commands=[*commands.values()])
        command = f"python experiments/recovered-forms/run.py {self.name}"
        write_json(HERE / f"{self.name}.json", {"command": command, **found, "provenance": made})


def _run(command: str) -> None:
    """A `rap` command in this process, which spares its start; its seconds go to the log."""
    from rap.cli import main as rap

    began, sys.argv = time.monotonic(), shlex.split(command)
    Path(sys.argv[-1]).parent.mkdir(parents=True, exist_ok=True)
    try:
        rap()
    except SystemExit as end:
        if end.code:
            sys.exit(f"exit code {end.code}: {command}")
    print(f"{time.monotonic() - began:.0f} s: {command}", flush=True)


def rows() -> list[str]:
    """All rows, those that others are made of before these."""
    found = [f"{model}-{DENSE}" for model in KEPT]
    for model, forms in KEPT.items():
        found += [f"{model}-{form}-{ratio}" for form in forms for ratio in RATIOS]
        found += [f"{model}-{forms[0]}-{ratio}{DISTILLED}" for ratio in RATIOS]
    return found


def together(names: list[str], most: int) -> int:
    """Every row in a process of its own, `most` at a time; what it prints goes to its log."""
    waiting = [Row(name) for name in names]
    running: dict[Row, subprocess.Popen[bytes]] = {}
    failed = 0
    while waiting or running:
        for place, row in enumerate(waiting) if len(running) < most else ():
            others = (*waiting[:place], *running)
            if row.base is None or row.base.made or row.base not in others:
                waiting.remove(row)
                running[row] = _begin(row)
                break
        time.sleep(0.5)
        for row, process in [*running.items()]:
            if process.poll() is not None:
                del running[row]
                failed += bool(process.returncode)
                print(f"{row.name}: exit code {process.returncode}", flush=True)
    return failed


def _begin(row: Row) -> subprocess.Popen[bytes]:
    """A row in a process of its own."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / f"{row.name}.log").open("a") as log:
        return subprocess.Popen([sys.executable, __file__, row.name], stdout=log, stderr=log)


def main() -> int:
    """Run what was asked for; exit code 1 if a row failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", nargs="*", help="names of rows; all by default")
    parser.add_argument("--together", type=int, default=1, help="rows at a time, as processes")
    parser.add_argument("--list", action="store_true", help="name the rows, and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(rows()))
        return 0
    names = arguments.rows or rows()
    if arguments.together > 1:
        return int(together(names, arguments.together) > 0)
    for name in names:
        Row(name).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
