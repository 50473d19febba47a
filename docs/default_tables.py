"""The tables of what `rap compress MODEL` keeps, on README.md and on their own page.

    python docs/default_tables.py

A table entry is empty, and a column left out, where no result file has it yet.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sources import REPOSITORY, put, with_error

from rap.checkpoint.card import interval_text
from rap.studies.report.report import markdown_table

EXPERIMENTS = REPOSITORY / "experiments"
PAGE, README = "docs/measurements/defaults.md", "README.md"
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
LENGTHS = (1024, 4096, 8192)
TASKS = ("single-needle", "multi-key")
ANSWERS = {
    "tokens": ("length", ".0f"),
    "reach an end": ("ended", ".0%"),
    "end in a loop": ("looping", ".0%"),
    "repeated 4-grams": ("repetition", ".0%"),
    "KL along them, nats/token": ("kl", ".2f"),
}  # by column, the key of the result and its format
TODAY = "**`rap`**"
SECOND = "`rap`, a second run"
SEPARATE = "`rap:merge=1`"
NEAR = "`rap:reach=90`"  # the default before foldings were compared up to 1,024 tokens


def _read(file: str) -> dict[str, Any]:
    """A result file of an experiment."""
    found: dict[str, Any] = json.loads((EXPERIMENTS / file).read_text("utf-8"))
    return found


@dataclass(frozen=True)
class Kept:
    """A compressed model: the report of its compression, and the folder of its evaluations.

    Or without a report, a row of `recovered-forms`, one file that has all of them. `name` is what
    tables call it. Where each model read the full test set by itself, `alone` has the pruned
    model's result and the dense model's; the first page shows those of `again`, a second run.
    """

    report: str
    folder: str
    name: str = TODAY
    alone: tuple[str, str] | None = None
    again: tuple[str, str] | None = None

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
        if not found and self.alone and DATASETS[file] == WHOLE:
            pruned, dense = (_read(one) for one in self.alone)
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


# The full test set as each model read it by itself: that of the pruned one, and the dense one's.
DENSE_WHOLE = "smollm2-default-articles/default-whole-test.json"
SECOND_70 = ("smollm2-default-far-0.7-again/perplexity-full-test-set.json", DENSE_WHOLE)
SECOND_50 = ("smollm2-default-far-0.5-again/perplexity-full-test-set.json", DENSE_WHOLE)
GEMMA_70, GEMMA_50 = (
    (f"gemma3-whole-test/{name}.json", "gemma3-whole-test/dense.json")
    for name in ("rap-0.7", "rap-0.5")
)

MODELS = (
    Model(
        "SmolLM2-135M-Instruct",
        (
            Kept(
                "smollm2-default-far-0.7-plain/compress.json",
                "smollm2-default-far-0.7",
                again=SECOND_70,
            ),
            Kept(
                "smollm2-default-far-0.7-again-plain/compress.json",
                "smollm2-default-far-0.7-again",
                SECOND,
                SECOND_70,
            ),
            Kept(
                "smollm2-default-far-0.7-per-head/compress.json",
                "smollm2-default-far-0.7-per-head-kept",
                SEPARATE,
            ),
            Kept("", f"{FORMS}/smollm2-plain-0.7.json", NEAR),
            Kept(
                "smollm2-default-far-0.5-plain/compress.json",
                "smollm2-default-far-0.5",
                again=SECOND_50,
            ),
            Kept(
                "smollm2-default-far-0.5-again-plain/compress.json",
                "smollm2-default-far-0.5-again",
                SECOND,
                SECOND_50,
            ),
            Kept(
                "smollm2-default-far-0.5-merged/compress.json",
                "smollm2-default-far-0.5-merged-kept",
                "`rap`, without `--target`",
            ),
            Kept(
                "smollm2-default-far-0.5-per-head/compress.json",
                "smollm2-default-far-0.5-per-head-kept",
                SEPARATE,
            ),
            Kept("smollm2-default-articles-plain/compress.json", "smollm2-default-articles", NEAR),
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
            Kept(
                "gemma3-default-far-0.7-model/compress.json",
                "gemma3-default-far-0.7",
                alone=GEMMA_70,
            ),
            Kept(
                "gemma3-default-far-0.5-model/compress.json",
                "gemma3-default-far-0.5",
                alone=GEMMA_50,
            ),
            Kept("gemma3-default-recovered/recover.json", "gemma3-default", "repeated samples"),
            Kept("gemma3-default-palu-0.7-model/compress.json", "gemma3-default-palu-0.7", "PaLU"),
            Kept("gemma3-default-palu-0.5-model/compress.json", "gemma3-default-palu-0.5", "PaLU"),
        ),
        "gemma3-zero-shot/dense.json",
        tuple(f"gemma3-needles/dense-{length}.json" for length in LENGTHS),
    ),
)

COMPARED = {
    "smollm2-dense": "dense",
    "smollm2-plain-0.7": "plain",
    "smollm2-palu-0.7": "PaLU",
    "smollm2-plain-0.5": "plain",
    "smollm2-plain-0.5-distilled": "plain, distilled end to end",
    "smollm2-palu-0.5": "PaLU",
}  # rows of FORMS


def _score(found: dict[str, Any]) -> str:
    return with_error(found["mean"], found["mean_stderr"]) if found else ""


def today() -> list[Model]:
    """The models with what today's default keeps alone, where that was measured."""
    kept = [
        tuple(replace(one, alone=one.again or one.alone) for one in model.kept if one.name == TODAY)
        for model in MODELS
    ]
    return [replace(model, kept=own or model.kept) for model, own in zip(MODELS, kept, strict=True)]


def quality(models: Sequence[Model]) -> dict[str, Any]:
    """Perplexity by dataset and zero-shot accuracy: a row a dense model, and one for all kept."""
    rows = []
    for model in models:
        whole, _ = model.kept[0].cache()
        dense = [model.dense_perplexity(file) for file in DATASETS]
        rows.append([model.row(), f"{whole:,}", *dense, model.dense_score()])
        for kept in model.kept:
            found = [kept.fidelity(file) for file in DATASETS]
            against = [_against(x) if x else "" for x in found]
            size = f"{kept.cache()[1]:,} ({kept.share()})"
            scored = _score(kept.read("zero-shot.json"))
            rows.append([model.row(kept), size, *against, scored])
    header = ["model", "KV cache, bytes/token", *_columns("PPL"), "zero-shot mean"]
    return {"header": header, "rows": rows}


def divergence() -> dict[str, Any]:
    """KL to the dense model by dataset, a row for each kept."""
    rows = []
    for model in MODELS:
        for kept in model.kept:
            found = [kept.fidelity(file) for file in DATASETS]
            cells = [f"{x['kl']['value']:.3f}" if "kl" in x else "" for x in found]
            rows.append([model.row(kept), kept.share(), *cells])
    return {"header": ["model", "KV cache", *_columns("KL")], "rows": rows}


def _columns(what: str) -> list[str]:
    """The header of what was measured on every dataset."""
    return [f"{what}, {data}" for data in DATASETS.values()]


def _against(found: dict[str, Any]) -> str:
    value, dense = found["perplexity"]["value"], found["dense_perplexity"]["value"]
    return f"{value:.2f} ({value / dense - 1:+.0%})"


def retrieval() -> dict[str, Any]:
    """Accuracy by task and length, of the dense model and each kept."""
    header = ["model", "KV cache"]
    header += [f"{task}, {length:,}" for task in TASKS for length in LENGTHS]
    rows = []
    for model in MODELS:
        rows.append([model.row(), "100%", *_accuracies([_read(file) for file in model.retrieved])])
        for kept in model.kept:
            files = [kept.read(f"retrieval-{length}.json") for length in LENGTHS]
            rows.append([model.row(kept), kept.share(), *_accuracies(files)])
    return {"header": header, "rows": [row for row in rows if any(row[2:])]}


def _accuracies(files: list[dict[str, Any]]) -> list[str]:
    """Accuracy with its interval by task and length, in the order of the header."""
    found = {
        (one["task"], one["length"]): one["accuracy"]
        for file in files
        for one in file.get("ruler", [])
    }
    cells = [found.get((task, length)) for task in TASKS for length in LENGTHS]
    return [interval_text(one, ".0%") if one else "" for one in cells]


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


def forms() -> dict[str, Any]:
    """What the same recovery keeps of other forms, a row for each that was measured.

    Perplexity over that of the dense model, zero-shot accuracy, and one needle by length.
    """
    rows = []
    for name, said in COMPARED.items():
        kept = Kept("", f"{FORMS}/{name}.json")
        whole = name.endswith("-dense")
        found = [] if whole else [kept.fidelity(file) for file in DATASETS]
        ratios = ["1"] * len(DATASETS) if whole else [_ratio(x) if x else "" for x in found]
        files = [kept.read(f"retrieval-{length}.json") for length in LENGTHS]
        share = "100%" if whole else kept.share()
        needles = _accuracies(files)[: len(LENGTHS)]
        rows.append([said, share, *ratios, _score(kept.read("zero-shot.json")), *needles])
    needles = [f"needle, {length:,}" for length in LENGTHS]
    return {
        "header": ["model", "KV cache", *_columns("PPL ratio"), "zero-shot mean", *needles],
        "rows": rows,
    }


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['perplexity']['value'] / found['dense_perplexity']['value']:.3f}"


def _answered(side: dict[str, Any]) -> list[str]:
    """The cells of a model, in the order of the header."""
    return [interval_text(side[key], format_) for key, format_ in ANSWERS.values()]


def filled(table: dict[str, Any], left_out: str = "") -> str:
    """A table in Markdown, without columns that nothing is in, and without one that is named."""
    header, rows = table["header"], table["rows"]
    asked = [number for number, name in enumerate(header) if name != left_out]
    some = [number for number in asked if any(row[number] for row in rows)]
    kept = [[row[number] for number in some] for row in rows]
    return str(markdown_table({"header": [header[number] for number in some], "rows": kept}))


def made() -> dict[str, dict[str, str]]:
    """What is generated, by page and by the name in the mark above it."""
    return {
        README: {"quality": filled(quality(today()), left_out="PPL, WikiText-2")},
        PAGE: {
            "quality": filled(quality(MODELS)),
            "KL": filled(divergence()),
            "retrieval": filled(retrieval()),
            "answers": filled(answers()),
            "forms": filled(forms()),
        },
    }


def main() -> None:
    """Put the tables into their pages."""
    for page, tables in made().items():
        path = REPOSITORY / page
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = put(text, BEGIN.format(name), END, table, page)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
