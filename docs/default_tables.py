"""The tables of what `rap compress MODEL` keeps, on README.md and on their own page.

    python docs/default_tables.py

A table has no empty entry: a row is in those for which all of their columns were measured.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sources import INDEX, REPOSITORY, link, put_all, runs, with_error, wrapped

from rap.checkpoint.card import interval_text
from rap.studies.report.report import markdown_table

EXPERIMENTS = REPOSITORY / "experiments"
PAGE, README = "docs/measurements/defaults.md", "README.md"
CHOICE = "docs/how-to/choose.md"
BEGIN = "<!-- measured: python docs/default_tables.py {} -->\n"
END = "<!-- end of the defaults -->\n"
NOVELS, WHOLE = "fidelity-novels.json", "full WikiText-2"
# The result file of every dataset; of WikiText-2 eight windows, and all of its test set.
DATASETS = {
    "fidelity-wikitext2-test.json": "WikiText-2",
    "default-whole-test.json": WHOLE,
    NOVELS: "novels",
    "fidelity-code.json": "Python code",
    "fidelity-chat.json": "chat",
}
# A row of experiments/recovered-forms has them as parts of one file.
FORMS = "recovered-forms"
PARTS = {
    "fidelity-wikitext2-test.json": "fidelity_wikitext2",
    "default-whole-test.json": "fidelity_full_test_set",
}
ALONE = "perplexity-full-test-set.json"
LENGTHS = (1024, 4096, 8192)
ANSWERS = {
    "tokens": ("length", ".0f"),
    "reach an end": ("ended", ".0%"),
    "end in a loop": ("looping", ".0%"),
    "repeated 4-grams": ("repetition", ".0%"),
    "KL along them, nats/token": ("kl", ".2f"),
}  # by column, the key of the result and its format
TODAY = "**`rap`**"
SEPARATE = "`rap:merge=1`"
UNTARGETED = "`rap`, without `--target`"
PALU = "PaLU"


def _read(file: str) -> dict[str, Any]:
    """A result file of an experiment."""
    found: dict[str, Any] = json.loads((EXPERIMENTS / file).read_text("utf-8"))
    return found


@dataclass(frozen=True)
class Kept:
    """A compressed model: the report of its compression, and the folder of its evaluations.

    Or without a report, a row of `recovered-forms`, one file that has all of them. `name` is what
    tables call it. Where each model read the full test set by itself, `whole` is the dense model's
    result, and `alone` the pruned one's, if it is not in `folder`.
    """

    report: str
    folder: str
    name: str = TODAY
    whole: str = ""
    alone: str = ""

    def read(self, file: str) -> dict[str, Any]:
        """A result file of the folder; empty where there is none."""
        if not self.report:
            part = PARTS.get(file, file.removesuffix(".json").replace("-", "_"))
            found: dict[str, Any] = _read(self.folder).get(part, {})
            return found
        path = f"{self.folder}/{file}"
        return _read(path) if (EXPERIMENTS / path).is_file() else {}

    def compressed(self) -> dict[str, Any]:
        """The report of the compression."""
        found: dict[str, Any] = _read(self.report) if self.report else _read(self.folder)["report"]
        return found

    def fidelity(self, file: str) -> dict[str, Any]:
        """Perplexities and KL on a dataset, without KL where each model was read by itself.

        Of novels they are the report's, where there is no other.
        """
        found = self.read(file)
        pruned = _read(self.alone) if self.alone else self.read(ALONE)
        if pruned and self.whole and DATASETS[file] == WHOLE:
            dense = _read(self.whole)
            return {"perplexity": pruned, "dense_perplexity": dense.get("dense_perplexity", dense)}
        report = self.compressed()
        if found or file != NOVELS or "perplexity" not in report["pruned"]:
            return found
        dense, pruned = ({"value": report[one]["perplexity"]} for one in ("dense", "pruned"))
        return {"dense_perplexity": dense, "perplexity": pruned, "kl": report["pruned"]["kl"]}

    def cache(self) -> tuple[int, int]:
        """Bytes that the dense and the pruned cache grow by per token."""
        report = self.compressed()
        dense, pruned = (int(report[one]["kv_bytes_per_token"]) for one in ("dense", "pruned"))
        return dense, pruned

    def share(self) -> str:
        """What is left of the cache that grows."""
        dense, pruned = self.cache()
        return f"{pruned / dense:.0%}"


@dataclass(frozen=True)
class Model:
    """A model and what is kept of it, the largest cache first.

    `scored` has the zero-shot scores of the dense model, `retrieved` what that one retrieves.
    """

    name: str
    kept: tuple[Kept, ...]
    scored: str = ""
    retrieved: tuple[str, ...] = ()

    def row(self, kept: Kept | None = None) -> str:
        """What the row of the dense model is called, or that of what is kept of it."""
        return f"{self.name}, {kept.name if kept else 'dense'}"

    def dense_perplexity(self, file: str) -> str:
        """That of the dense model on a dataset, beside any of what is kept."""
        found = (one.fidelity(file) for one in self.kept)
        return next((f"{x['dense_perplexity']['value']:.2f}" for x in found if x), "")

    def dense_score(self) -> str:
        """The zero-shot mean of the dense model with its standard error, where measured."""
        found = _read(self.scored) if self.scored else {}
        rows = [row for row in found.get("rows", [found]) if row.get("name", "dense") == "dense"]
        return _score(rows[0])


def _smollm2(model: str, folder: str, name: str = TODAY, again: str = "") -> Kept:
    """What the command in the folder SMOLLM2 + `model` kept; evaluated in SMOLLM2 + `folder`.

    Where that command ran once more, the full test set is in SMOLLM2 + `again`.
    """
    whole = "smollm2-default-articles/default-whole-test.json"
    alone = f"{SMOLLM2}-{again}/{ALONE}" if again else ""
    return Kept(f"{SMOLLM2}-{model}/compress.json", f"{SMOLLM2}-{folder}", name, whole, alone)


def _gemma3(folder: str, name: str = TODAY, alone: str = "") -> Kept:
    """What the command in the folder GEMMA3 + `folder` + `-model` kept; evaluated in `folder`."""
    path, whole = f"{GEMMA3}-{folder}", "gemma3-whole-test/dense.json"
    return Kept(f"{path}-model/compress.json", path, name, whole, alone)


SMOLLM2, GEMMA3 = "smollm2-default-far", "gemma3-default"
MODELS = (
    Model(
        "SmolLM2-135M-Instruct",
        (
            _smollm2("0.7-again-plain", "0.7-again"),
            _smollm2("0.7-merged", "0.7-merged-kept", UNTARGETED),
            _smollm2("0.7-per-head", "0.7-per-head-kept", SEPARATE, "0.7-per-head-again"),
            Kept("", f"{FORMS}/smollm2-palu-0.7.json", PALU),
            _smollm2("0.5-again-plain", "0.5-again"),
            _smollm2("0.5-merged", "0.5-merged-kept", UNTARGETED),
            _smollm2("0.5-per-head", "0.5-per-head-kept", SEPARATE, "0.5-per-head-again"),
            Kept("", f"{FORMS}/smollm2-palu-0.5.json", PALU),
        ),
        "smollm2-zero-shot/zero-shot.json",
        (
            "smollm2-default/retrieval-dense-1024.json",
            "smollm2-ruler/dense.json",
            "smollm2-ruler-8k/dense.json",
        ),
    ),
    Model(
        "Gemma 3 270M",
        (
            _gemma3("far-0.7", alone="gemma3-whole-test/rap-0.7.json"),
            _gemma3("palu-0.7", PALU, f"{GEMMA3}-palu-0.7-again/{ALONE}"),
            _gemma3("far-0.5", alone="gemma3-whole-test/rap-0.5.json"),
            _gemma3("palu-0.5", PALU),
        ),
        "gemma3-zero-shot/dense.json",
        tuple(f"gemma3-needles/dense-{length}.json" for length in LENGTHS),
    ),
)


def _distilled(model: str) -> Kept:
    """What end-to-end distillation made of a model of the default, evaluated in its folder."""
    folder = f"{SMOLLM2}-{model}-distilled"
    return Kept(f"{folder}/recover.json", folder)


# Pairs of what the default keeps and of what distillation makes of it: on a CPU, and on a GPU.
ON_CPU = (
    (_smollm2("0.7-merged", "0.7-merged-kept"), _distilled("0.7-merged")),
    (_smollm2("0.5-again-plain", "0.5-again"), _distilled("0.5-again")),
)
ON_GPU = (
    (
        Kept("", f"{FORMS}/smollm2-plain-0.5.json"),
        Kept("", f"{FORMS}/smollm2-plain-0.5-distilled.json"),
    ),
)
STAGES = ("layer-wise distillation, the default", "end-to-end distillation after it")


# What a checkpoint can be, by the name of its row: its option, where it runs, its W_q and W_o.
PLUGIN = "Transformers, vLLM (plugin)"
FORMS_OF = {
    TODAY: ("plain checkpoint", "`--target plain`", "any engine, without `rap`", "may grow"),
    UNTARGETED: ("merged heads", "none: the default", PLUGIN, "may grow"),
    SEPARATE: ("separate heads", f"`--method {SEPARATE[1:]}", PLUGIN, "shrink"),
}


def _score(found: dict[str, Any]) -> str:
    return with_error(found["mean"], found["mean_stderr"]) if found else ""


def today() -> list[Model]:
    """The models with what today's default keeps alone."""
    kept = [tuple(one for one in model.kept if one.name == TODAY) for model in MODELS]
    return [replace(model, kept=own) for model, own in zip(MODELS, kept, strict=True)]


def quality(models: Sequence[Model], *left_out: str) -> dict[str, Any]:
    """Perplexity by dataset and zero-shot accuracy: a row a dense model, and one for all kept."""
    files, columns = _asked("PPL", left_out)
    rows = []
    for model in models:
        whole, _ = model.kept[0].cache()
        dense = [model.dense_perplexity(file) for file in files]
        rows.append([model.row(), f"{whole:,}", *dense, model.dense_score()])
        for kept in model.kept:
            found = [kept.fidelity(file) for file in files]
            against = [_against(x) if x else "" for x in found]
            size = f"{kept.cache()[1]:,} ({kept.share()})"
            scored = _score(kept.read("zero-shot.json"))
            rows.append([model.row(kept), size, *against, scored])
    header = ["model", "KV cache, bytes/token", *columns, "zero-shot mean"]
    return {"header": header, "rows": rows}


def full_test_set() -> dict[str, Any]:
    """Perplexity over the full test set, a row a dense model, and one for all kept."""
    others = [name for name in DATASETS.values() if name != WHOLE]
    table = quality(MODELS, *others)
    # Tasks are no part of it.
    return {"header": table["header"][:-1], "rows": [row[:-1] for row in table["rows"]]}


def divergence() -> dict[str, Any]:
    """KL to the dense model by dataset, a row for each kept."""
    files, columns = _asked("KL", (WHOLE,))
    rows = []
    for model in MODELS:
        for kept in model.kept:
            found = [kept.fidelity(file) for file in files]
            cells = [interval_text(x["kl"], ".3f") if "kl" in x else "" for x in found]
            rows.append([model.row(kept), kept.share(), *cells])
    return {"header": ["model", "KV cache", *columns], "rows": rows}


def _asked(what: str, left_out: Sequence[str]) -> tuple[list[str], list[str]]:
    """The result files of every dataset but some, and the header of what was measured on it."""
    kept = {file: data for file, data in DATASETS.items() if data not in left_out}
    return list(kept), [f"{what}, {data}" for data in kept.values()]


def _against(found: dict[str, Any]) -> str:
    value, dense = found["perplexity"]["value"], found["dense_perplexity"]["value"]
    return f"{value:.2f} ({value / dense - 1:+.0%})"


def retrieval(
    task: str, lengths: Sequence[int], models: Sequence[Model] | None = None
) -> dict[str, Any]:
    """Accuracy at a task by length, of the dense model and each kept."""
    rows = []
    for model in models or MODELS:
        found = [_read(file) for file in model.retrieved]
        rows.append([model.row(), "100%", *_accuracies(found, task, lengths)])
        for kept in model.kept:
            found = [kept.read(f"retrieval-{length}.json") for length in lengths]
            rows.append([model.row(kept), kept.share(), *_accuracies(found, task, lengths)])
    header = ["model", "KV cache", *(f"{length:,} tokens" for length in lengths)]
    return {"header": header, "rows": rows}


def _accuracies(files: list[dict[str, Any]], task: str, lengths: Sequence[int]) -> list[str]:
    """Accuracy at a task with its interval, by length."""
    scored = [one for file in files for one in file.get("ruler", [])]
    found = {one["length"]: one["accuracy"] for one in scored if one["task"] == task}
    return [interval_text(found[n], ".0%") if n in found else "" for n in lengths]


def answers() -> dict[str, Any]:
    """How models answer chat prompts, and KL along the answers, of the dense model and each kept.

    A row needs a result file, and the dense model is one of each.
    """
    rows = []
    for model in MODELS:
        found = [(kept, kept.read("generation.json")) for kept in model.kept]
        some = [(kept, one) for kept, one in found if one]
        rows += [[model.row(), "100%", *_answered(one["dense"])] for _, one in some[:1]]
        rows += [[model.row(kept), kept.share(), *_answered(one["pruned"])] for kept, one in some]
    return {"header": ["model", "KV cache", *ANSWERS], "rows": rows}


def distilled(pairs: Sequence[tuple[Kept, Kept]], *, tasks: bool) -> dict[str, Any]:
    """What end-to-end distillation adds: perplexity over dense, with `tasks` needles and tasks."""
    files, columns = _asked("PPL ratio", (WHOLE,))
    rows = []
    for pair in pairs:
        for recovery, kept in zip(STAGES, pair, strict=True):
            found = [kept.fidelity(file) for file in files]
            row = [recovery, kept.share(), *(_ratio(one) if one else "" for one in found)]
            if tasks:
                needles = [kept.read("retrieval-4096.json")]
                row += _accuracies(needles, "single-needle", (4096,))
                row.append(_score(kept.read("zero-shot.json")))
            rows.append(row)
    more = ["single-needle, 4,096 tokens", "zero-shot mean"] if tasks else []
    return {"header": ["recovery", "KV cache", *columns, *more], "rows": rows}


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['perplexity']['value'] / found['dense_perplexity']['value']:.3f}"


def _answered(side: dict[str, Any]) -> list[str]:
    """The cells of a model, in the order of the header."""
    return [interval_text(side[key], format_) for key, format_ in ANSWERS.values()]


def beside(table: dict[str, Any], other: dict[str, Any], column: str) -> dict[str, Any]:
    """A table, and under a header of its own the last column of another one of the same rows."""
    pairs = zip(table["rows"], other["rows"], strict=True)
    rows = [[*row, more[-1]] for row, more in pairs]
    return {"header": [*table["header"], column], "rows": rows}


def _forms_at_half() -> list[Kept]:
    caches = [(kept, *kept.cache()) for kept in MODELS[0].kept if kept.name in FORMS_OF]
    return [kept for kept, dense, pruned in caches if 2 * pruned == dense]


def forms() -> dict[str, Any]:
    """The forms that a checkpoint can have, and what each loses of the first model at half."""
    asked = ("fidelity-wikitext2-test.json", "fidelity-code.json")
    rows = []
    for kept in _forms_at_half():
        losses = [_against(kept.fidelity(file)) for file in asked]
        rows.append([*FORMS_OF[kept.name], *losses])
    columns = [f"PPL, {DATASETS[file]}" for file in asked]
    return {"header": ["form", "option", "runs in", "W_q and W_o", *columns], "rows": rows}


def compared() -> str:
    """Links to the commands of what `forms` compares."""
    return runs([one.folder for one in _forms_at_half()], CHOICE)


def shown() -> str:
    """Links to the commands of every result that the page shows, two paragraphs a model.

    Folders are named without the model.
    """
    distilled = Model(MODELS[0].name, tuple(one for pair in (*ON_CPU, *ON_GPU) for one in pair))
    folders: dict[str, set[str]] = {}
    for model in (*MODELS, distilled):
        files = [
            x for kept in model.kept for x in (kept.report, kept.folder, kept.whole, kept.alone)
        ]
        files += [model.scored, *model.retrieved]
        folders.setdefault(model.name, set()).update(file.partition("/")[0] for file in files)
    index = (REPOSITORY / INDEX).read_text(encoding="utf-8")
    found = []
    for name, some in folders.items():
        evaluated, models = [], []
        for folder in sorted(some - {""}):
            label = folder.removeprefix("smollm2-").removeprefix("gemma3-")
            if f"\n### {folder}\n" in index:
                evaluated.append(link(folder, PAGE, label))
            else:  # what makes a model has no figure of its own, and so no place in the index
                file = min((EXPERIMENTS / folder).glob("*.json")).relative_to(REPOSITORY)
                models.append(f"[{label}](../../{file.as_posix()})")
        found.append(wrapped(f"{name}: {', '.join(evaluated)}."))
        found.append(wrapped(f"{name}, the models: {', '.join(models)}."))
    return "\n\n".join(found)


def filled(table: dict[str, Any]) -> str:
    """A table in Markdown, of the rows of which everything was measured."""
    return str(markdown_table({**table, "rows": [row for row in table["rows"] if all(row)]}))


def made() -> dict[str, dict[str, str]]:
    """What is generated, by page and by the name in the mark above it."""
    own = today()
    found = retrieval("single-needle", (4096,), own)
    return {
        README: {"quality": filled(beside(quality(own, "WikiText-2"), found, "needle"))},
        CHOICE: {"forms": f"{filled(forms()).replace('---:', '---')}\n\n{compared()}"},
        PAGE: {
            "quality": filled(quality(MODELS, WHOLE)),
            "full test set": filled(full_test_set()),
            "KL": filled(divergence()),
            "one needle": filled(retrieval("single-needle", LENGTHS)),
            "one of several keys": filled(retrieval("multi-key", LENGTHS[:2])),
            "answers": filled(answers()),
            "distilled on a CPU": filled(distilled(ON_CPU, tasks=True)),
            "distilled on a GPU": filled(distilled(ON_GPU, tasks=False)),
            "runs": shown(),
        },
    }


def main() -> None:
    """Put the tables into their pages."""
    put_all(made(), BEGIN, END)


if __name__ == "__main__":
    main()
