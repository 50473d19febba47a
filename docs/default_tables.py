"""The tables of what `rap compress MODEL --retain 0.5` keeps, on README.md and on their own page.

    python docs/default_tables.py

A table entry is empty, and a column left out, where no result file has it yet.
"""

import json
from dataclasses import dataclass
from typing import Any

from sources import REPOSITORY, put

from rap.checkpoint.card import interval_text
from rap.studies.report.report import markdown_table

EXPERIMENTS = REPOSITORY / "experiments"
PAGE, README = "docs/measurements/defaults.md", "README.md"
BEGIN = "<!-- measured: python docs/default_tables.py {} -->\n"
END = "<!-- end of the defaults -->\n"
NOVELS = "fidelity-novels.json"
# The result file of every dataset; of WikiText-2 eight windows, and all of its test set.
DATASETS = {
    "fidelity-wikitext2-test.json": "WikiText-2",
    "default-whole-test.json": "full test set",
    NOVELS: "novels",
    "fidelity-code.json": "Python code",
    "fidelity-chat.json": "chat",
}
LENGTHS = (1024, 4096, 8192)
TASKS = ("single-needle", "multi-key")
PRUNED = "**`rap`**"


@dataclass(frozen=True)
class Model:
    """A model, the folder of its evaluations, and the report of its compression.

    `compared` has the zero-shot scores of its dense model, and `ruled` what that one retrieves,
    where another study measured them.
    """

    name: str
    folder: str
    report: str
    compared: str = ""
    ruled: str = ""

    def read(self, file: str) -> dict[str, Any]:
        """A result file of the folder; empty where there is none."""
        path = EXPERIMENTS / self.folder / file
        found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        return found

    def compressed(self) -> dict[str, Any]:
        """The report of the compression."""
        found: dict[str, Any] = json.loads((EXPERIMENTS / self.report).read_text("utf-8"))
        return found

    def fidelity(self, file: str) -> dict[str, Any]:
        """Perplexities and KL on a dataset; of novels the report's, where there is no other."""
        found, report = self.read(file), self.compressed()
        if found or file != NOVELS:
            return found
        dense, pruned = ({"value": report[one]["perplexity"]} for one in ("dense", "pruned"))
        return {"dense_perplexity": dense, "perplexity": pruned, "kl": report["pruned"]["kl"]}

    def cache(self) -> tuple[int, int]:
        """Bytes that the dense and the pruned cache grow by per token."""
        report = self.compressed()
        dense, pruned = (int(report[one]["kv_bytes_per_token"]) for one in ("dense", "pruned"))
        return dense, pruned

    def scores(self) -> tuple[str, str]:
        """Zero-shot means with their standard errors, of the dense and the pruned model."""
        scored = self.read("zero-shot-dense.json")
        if self.compared:
            rows = json.loads((EXPERIMENTS / self.compared).read_text("utf-8"))["rows"]
            scored = next(row for row in rows if row["name"] == "dense")
        return _score(scored), _score(self.read("zero-shot.json"))


MODELS = (
    Model(
        "SmolLM2-135M-Instruct",
        "smollm2-default",
        "smollm2-default-plain/compress.json",
        "smollm2-zero-shot/zero-shot.json",
        "smollm2-ruler/dense.json",
    ),
    Model("Gemma 3 270M", "gemma3-default", "gemma3-default-recovered/recover.json"),
)


def _score(found: dict[str, Any]) -> str:
    return f"{found['mean']:.1%} +- {found['mean_stderr']:.1%}" if found else ""


def quality() -> dict[str, Any]:
    """Perplexity by dataset and zero-shot accuracy: two rows a model."""
    rows = []
    for model in MODELS:
        found = [model.fidelity(file) for file in DATASETS]
        dense = [f"{x['dense_perplexity']['value']:.2f}" if x else "" for x in found]
        half = [_against(x) if x else "" for x in found]
        (whole, kept), (before, after) = model.cache(), model.scores()
        rows.append([model.name, f"{whole:,}", *dense, before])
        rows.append([PRUNED, f"{kept:,} ({kept / whole:.0%})", *half, after])
    header = ["model", "KV cache, bytes/token", *DATASETS.values(), "zero-shot mean"]
    return {"header": header, "rows": rows}


def divergence() -> dict[str, Any]:
    """KL to the dense model by dataset, a row a model."""
    rows = []
    for model in MODELS:
        found = [model.fidelity(file) for file in DATASETS]
        rows.append([model.name, *(f"{x['kl']['value']:.3f}" if x else "" for x in found)])
    return {"header": ["model", *DATASETS.values()], "rows": rows}


def _against(found: dict[str, Any]) -> str:
    value, dense = found["perplexity"]["value"], found["dense_perplexity"]["value"]
    return f"{value:.2f} ({value / dense - 1:+.0%})"


def retrieval() -> dict[str, Any]:
    """Accuracy by task and length, of the dense and the pruned model."""
    header = ["model", *(f"{task}, {length:,}" for task in TASKS for length in LENGTHS)]
    rows = []
    for model in MODELS:
        for name, suffix in ((model.name, "-dense"), (PRUNED, "")):
            files = [model.read(f"retrieval{suffix}-{length}.json") for length in LENGTHS]
            if suffix and model.ruled:
                files.append(json.loads((EXPERIMENTS / model.ruled).read_text("utf-8")))
            found = {
                (one["task"], one["length"]): one["accuracy"]
                for file in files
                for one in file.get("ruler", [])
            }
            cells = [found.get((task, length)) for task in TASKS for length in LENGTHS]
            rows.append([name, *(interval_text(one, ".0%") if one else "" for one in cells)])
    return {"header": header, "rows": rows}


def filled(table: dict[str, Any]) -> str:
    """A table in Markdown, without columns and rows that nothing is in."""
    header, rows = table["header"], [row for row in table["rows"] if any(row[1:])]
    some = [number for number in range(len(header)) if any(row[number] for row in rows)]
    kept = [[row[number] for number in some] for row in rows]
    return str(markdown_table({"header": [header[number] for number in some], "rows": kept}))


def made() -> dict[str, dict[str, str]]:
    """What is generated, by page and by the name in the mark above it."""
    return {
        README: {"quality": filled(quality())},
        PAGE: {
            "quality": filled(quality()),
            "KL": filled(divergence()),
            "retrieval": filled(retrieval()),
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
