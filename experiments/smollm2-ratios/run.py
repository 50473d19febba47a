"""SmolLM2 distilled layer by layer at every ratio and evaluated, many models at once on one GPU.

    python experiments/smollm2-ratios/run.py OUTPUT [--device cuda] [--workers 15] [--minutes 5]
        [--model smollm2] [--tiny]

The current folder holds the texts and the tasks that the commands name. Every model is the work of
one process, and the most wanted come first; when the time is over, the rest is left. OUTPUT gets

    wikitext/, default/    comparisons: calibrated on WikiText-2, and on the default data
    */NAME.json            perplexity of a kept model over the full test set
    */retrieval, */zero-shot    of kept models
    results.tar.gz         all of it but the models
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rap.checkpoint.files import write_json
from rap.studies.report.report import markdown_table

RAP = [sys.executable, "-m", "rap"]
PLAIN, MERGED, SEPARATE = "rap:merge=all:profile=stock", "rap:merge=all", "rap:merge=1"
TEXT = "wikitext2-test.txt"
TASKS = "arc_easy", "arc_challenge", "piqa", "openbookqa", "winogrande", "hellaswag"
QUESTIONS = 500
PACKING = 15  # seconds at the end
# What cells are calibrated on and measured with; no times, since many models run at once.
READINGS = {
    "wikitext": ["--calibration", "wikitext2-valid-tokenized.txt", "--windows", "24"],
    "default": ["--calibration", "bundled,own,repeated:own,python", "--windows", "32"],
}
MEASURED = ["text=" + TEXT, "window=2048", "num_windows=8", "recall_documents=0", "decode_steps=0"]
MEASURED += ["other_texts=bundled,code.txt,chat.jsonl"]
# Reading, method, ratios in their order, and whether what is kept is evaluated further.
WANTED: tuple[tuple[str, str, tuple[float, ...], bool], ...] = (
    ("default", PLAIN, (0.5,), True),
    ("default", MERGED, (0.7,), True),
    ("default", PLAIN, (0.7, 0.35), True),
    ("default", MERGED, (0.5,), True),
    ("wikitext", PLAIN, (0.7, 0.5), True),
    ("wikitext", MERGED, (0.7, 0.5), True),
    ("wikitext", MERGED, (0.35, 0.25, 0.6), False),
    ("wikitext", MERGED, (0.9, 0.8), False),
    ("wikitext", PLAIN, (0.35, 0.25, 0.6), False),
    ("wikitext", PLAIN, (0.9, 0.8), False),
    ("wikitext", "palu", (0.35, 0.25), False),
    ("wikitext", "palu", (0.9, 0.8, 0.6), False),
    ("default", "palu", (0.5, 0.7), True),
    ("wikitext", "transmla", (0.7, 0.5, 0.35), False),
    ("wikitext", SEPARATE, (0.25, 0.5), False),
    ("wikitext", f"{SEPARATE}:budget=uniform", (0.7, 0.5, 0.35), False),
    ("wikitext", f"{MERGED}:budget=uniform", (0.7, 0.5, 0.35), False),
    ("default", SEPARATE, (0.5, 0.7), False),
)


@dataclass
class Run:
    """The processes of one call, all of which end with its time."""

    arguments: argparse.Namespace
    begun: float = field(default_factory=time.monotonic)
    living: set[Any] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False

    @property
    def output(self) -> Path:
        """Where everything goes."""
        return Path(self.arguments.output)

    def say(self, line: str) -> None:
        """A line with the seconds so far."""
        print(f"{time.monotonic() - self.begun:.0f} s: {line}", flush=True)

    def call(self, name: str, *arguments: str) -> bool:
        """Run a command of the package; whether it ended well."""
        log = self.output / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            if self.over:
                return False
            with log.open("w", encoding="utf-8") as file:
                made = subprocess.Popen(
                    [*RAP, *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                )
            self.living.add(made)
        code = made.wait()
        self.living.discard(made)
        last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
        self.say(f"{name}: {'done' if code == 0 else f'exit code {code}: {last}'}")
        return code == 0

    def end(self) -> None:
        """No more processes, and an end to those that run."""
        with self.lock:
            self.over = True
            for made in list(self.living):
                os.killpg(made.pid, signal.SIGKILL)


def grid(run: Run, reading: str, methods: list[str], retains: list[float]) -> list[str]:
    """`rap compare` without its output."""
    settings = READINGS[reading]
    made = ["compare", run.arguments.model, *settings, "--methods", ",".join(methods)]
    made += ["--retain", ",".join(f"{retain:g}" for retain in retains), "--recover", "fit"]
    made += ["--device", run.arguments.device, "--keep"]
    if run.arguments.tiny:
        made[4:6] = ["--windows", "4", "--window", "64", "--set", "fit.steps=2"]
        made += ["--set", "fit.num_windows=8", "--set", "fit.window=32"]
        made += ["--set", "fit.validation_windows=4"]
        measured = ["text=" + TEXT, "window=64", "num_windows=2", *MEASURED[3:]]
    else:
        measured = MEASURED
    return made + [word for setting in measured for word in ("--measure", setting)]


def stem(method: str, retain: float) -> str:
    """The name of a fitted model's files."""
    return f"{method}-{retain:g}-fit".replace(":", "-").replace("=", "-")


def chain(run: Run, reading: str, method: str, retains: tuple[float, ...], further: bool) -> None:
    """Fit a method at its ratios, one after the other; evaluate each as soon as it is there."""
    for retain in retains:
        name = stem(method, retain)
        folder = run.output / "cells" / reading / stem(method, retains[0])
        asked = [*grid(run, reading, [method], [retain]), "-o", str(folder)]
        if run.call(f"{reading}-{name}", *asked) and further:
            kept = next(path.parent for path in (folder / "models").glob(f"*{retain:g}*/made.json"))
            evaluate(run, run.output / reading, name, str(kept))


def evaluate(run: Run, folder: Path, name: str, model: str) -> None:
    """The full test set, retrieval, and zero-shot tasks."""
    tiny, device = run.arguments.tiny, ["--device", run.arguments.device]
    for kind in ("retrieval", "zero-shot"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    title = f"{folder.name}-{name}"
    few = ["--max-windows", "2"] if tiny else []
    asked = ["perplexity", model, "--text", TEXT, "--window", "64" if tiny else "2048", *few]
    run.call(f"{title}-whole", "evaluate", *asked, *device, "-o", str(folder / f"{name}.json"))
    asked = ["retrieval", model, "--text", TEXT, "--documents", "2" if tiny else "16"]
    asked += ["--length", "256"] if tiny else ["--length", "1024", "--length", "4096"]
    asked += [] if tiny else ["--length", "8192"]
    for task in ("single-needle", "multi-key", "multi-value"):
        asked += ["--task", task]
    retrieved = folder / "retrieval" / f"{name}.json"
    run.call(f"{title}-retrieval", "evaluate", *asked, *device, "-o", str(retrieved))
    asked = ["zero-shot", model, "--tasks", ",".join(f"local_{task}" for task in TASKS)]
    asked += ["--task-folder", "tasks", "--limit", "4" if tiny else str(QUESTIONS)]
    asked += ["--batch-size", "16", "--dtype", "float32"]
    scored = folder / "zero-shot" / f"{name}.json"
    run.call(f"{title}-zero-shot", "evaluate", *asked, *device, "-o", str(scored))


def gather(run: Run) -> Iterator[Path]:
    """The finished cells of a reading in one folder, whose comparison `again` lists."""
    for reading in READINGS:
        target = run.output / reading
        for folder in sorted((run.output / "cells" / reading).glob("*")):
            for one in folder.glob("cells/*/result.json"):
                copy = target / "cells" / one.parent.name
                copy.mkdir(parents=True, exist_ok=True)
                for name in ("config.json", "result.json"):
                    shutil.copy(one.with_name(name), copy)
            for one in (*folder.glob("dense.*"), *folder.glob("texts.sha256")):
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(one, target)
        if target.is_dir():
            yield target


def scores(folder: Path) -> None:
    """A row of every model that answered the tasks, as the pages read it."""
    found = {file.stem: json.loads(file.read_text()) for file in (folder / "zero-shot").glob("*")}
    rows: list[dict[str, Any]] = []
    for _, method, retains, _ in WANTED:
        for retain in retains:
            one = found.pop(stem(method, retain), None)
            if one is not None:
                shown = {name: one[name] for name in ("tasks", "mean", "mean_stderr")}
                rows.append({"name": f"{method} {retain:g} fit", **shown})
    cells = [
        [row["name"], *(f"{task['value']:.1%}" for task in row["tasks"])]
        + [f"{row['mean']:.1%} +- {row['mean_stderr']:.1%}"]
        for row in rows
    ]
    table = {
        "title": f"Zero-shot accuracy after layer-wise distillation, {folder.name} data",
        "note": f"The first {QUESTIONS} questions of each task; the mean with its standard error.",
        "header": ["model", *TASKS, "mean"],
        "rows": cells,
    }
    if rows:
        write_json(folder / "zero-shot.json", {"rows": rows, "table": table})
        print(markdown_table(table), flush=True)


def pack(output: Path) -> None:
    """Everything but weights, whole or as it was before."""
    partial = output / "partial.tar.gz"
    with tarfile.open(partial, "w:gz") as tar:
        for name in (*READINGS, "logs"):
            if (output / name).is_dir():
                tar.add(output / name, arcname=name)
    partial.replace(output / "results.tar.gz")


def main() -> None:
    """Run all that time allows, the most wanted first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    run = Run(parser.parse_args())
    timer = threading.Timer(60 * run.arguments.minutes - PACKING, run.end)
    timer.daemon = True
    timer.start()
    with ThreadPoolExecutor(run.arguments.workers) as pool:
        dense = [pool.submit(evaluate, run, run.output / "wikitext", "dense", run.arguments.model)]
        work = [*dense, *(pool.submit(chain, run, *wanted) for wanted in WANTED)]
        for future in work:
            error = future.exception()
            if error is not None:  # of one chain; the others go on
                run.say(f"failed: {error!r}")
    for folder in gather(run):
        scores(folder)
    pack(run.output)
    run.say("packed")


if __name__ == "__main__":
    main()
