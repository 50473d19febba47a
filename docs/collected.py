"""Tables on pages whose rows are of many results: data, recovery, limits, and speed in engines.

    python docs/collected.py

`collected.toml` says which rows a table has and where their figures are. Every figure is read.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from default_tables import MODELS, retrieval
from real_model import Evidence, Key
from sources import REPOSITORY, put_all

from rap.methods.naming import result_today
from rap.studies.report.report import markdown_table

TABLES = REPOSITORY / "docs/collected.toml"
RECOVERY, LIMITS = "docs/measurements/recovery.md", "docs/explanation/limitations.md"
BEGIN = "<!-- measured: python docs/collected.py {} -->\n"
END = "<!-- end of what is measured -->\n"
WIKITEXT2, NOVELS, CODE, CHAT = "WikiText-2", "novels", "Python code", "chat"
TEXTS = {"bundled": NOVELS, "code.txt": CODE, "chat.jsonl": CHAT}  # as comparisons name them
FILES = {"wikitext2-test": WIKITEXT2, "novels": NOVELS, "code": CODE, "chat": CHAT}
RETAINS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.35)
FORMS = {"separate": "rap:merge=1", "plain": "rap:merge=all:profile=stock"}
METHODS = ("rap:merge=1", "palu", "svdllm", "a3", "matryoshka", "rap:paper")
# What limitations.md calls the forms of default_tables.py.
NAMES = {"dense": "dense", "**`rap`**": "plain checkpoint (`--target plain`)"}
Table = dict[str, Any]
Spec = Mapping[str, Any]


@cache
def _read(file: str) -> Any:
    """A result, by its path in the repository."""
    return json.loads((REPOSITORY / file).read_text(encoding="utf-8"))


def _compared(folder: str) -> list[dict[str, Any]]:
    """The models of a comparison, with the names that methods have today."""
    cells: list[dict[str, Any]] = result_today(_read(f"experiments/{folder}/compare.json"))["cells"]
    return cells


@dataclass(frozen=True)
class Source:
    """Where the perplexities of a model after layer-wise distillation are.

    A cell of a comparison, by its method and ratio if it has several. Or the files of `rap evaluate
    fidelity` in a folder, and for novels without one, the report of the compression in `made`.
    """

    folder: str
    method: str = ""
    retain: float = 0.0
    made: str = ""

    def perplexities(self) -> dict[str, tuple[float, float]]:
        """Of the pruned and the dense model, by dataset."""
        folder = f"experiments/{self.folder}"
        if (REPOSITORY / folder / "compare.json").is_file():
            return self._of_the_cell()
        found = {}
        for file, name in FILES.items():
            if (REPOSITORY / folder / f"fidelity-{file}.json").is_file():
                one = _read(f"{folder}/fidelity-{file}.json")
                found[name] = one["perplexity"]["value"], one["dense_perplexity"]["value"]
        if self.made:
            report = _read(f"experiments/{self.made}/compress.json")
            found[NOVELS] = report["pruned"]["perplexity"], report["dense"]["perplexity"]
        return found

    def _of_the_cell(self) -> dict[str, tuple[float, float]]:
        cells = _compared(self.folder)
        (dense,) = (one for one in cells if one["method"] == "dense")
        (cell,) = (
            one
            for one in cells
            if one["recover"] == "fit"
            if one["method"] == (self.method or one["method"])
            if one["retain"] == (self.retain or one["retain"])
        )
        whole = _by_dataset(dense)
        return {name: (value, whole[name]) for name, value in _by_dataset(cell).items()}


def _by_dataset(cell: Mapping[str, Any]) -> dict[str, float]:
    """Perplexity by dataset of a model of a comparison."""
    others = {TEXTS[text]: one["perplexity"] for text, one in cell["other_texts"].items()}
    return {WIKITEXT2: cell["perplexity"], **others}


def _sources(table: Spec) -> list[tuple[list[str], dict[str, tuple[float, float]]]]:
    """Labels and perplexities of every row."""
    found = []
    for row in table["rows"]:
        named = {key: value for key, value in row.items() if key != "labels"}
        found.append((row["labels"], Source(**named).perplexities()))
    return found


def perplexity(table: Spec) -> list[list[str]]:
    """A column a dataset, and a row of the dense model first."""
    found, names = _sources(table), table["columns"]
    dense = [f"{found[0][1][name][1]:.1f}" for name in names]
    rows = [[*labels, *(f"{one[name][0]:.1f}" for name in names)] for labels, one in found]
    return [[*table["dense"], *dense], *rows]


def ratio(table: Spec) -> list[list[str]]:
    """Perplexity over that of the dense model, a column a dataset."""
    rows = []
    for labels, one in _sources(table):
        ratios = (pruned / dense for pruned, dense in (one[name] for name in table["columns"]))
        rows.append([*labels, *(f"{value:.1f}x" for value in ratios)])
    return rows


def facts(table: Spec) -> list[list[str]]:
    """How many capitals each model names."""
    right = {
        row[0]: row[1] for row in _read("experiments/smollm2-facts/facts.json")["table"]["rows"]
    }
    return [[*row["labels"], str(right[row["model"]])] for row in table["rows"]]


def needles(table: Spec) -> list[list[str]]:
    """Single-needle accuracy, a column a length, empty where not measured."""
    folders = {4096: "smollm2-ruler", 8192: "smollm2-ruler-8k"}
    return [
        [
            *row["labels"],
            *(_needle(folder, row["file"], length) for length, folder in folders.items()),
        ]
        for row in table["rows"]
    ]


def _needle(folder: str, stem: str, length: int) -> str:
    """Accuracy in documents of a length; nothing where there is no such file."""
    file = f"experiments/{folder}/{stem}.json"
    if not (REPOSITORY / file).is_file():
        return ""
    (one,) = (
        one
        for one in _read(file)["ruler"]
        if (one["task"], one["length"]) == ("single-needle", length)
    )
    return f"{one['accuracy']['value']:.0%}"


def samples(table: Spec) -> list[list[str]]:
    """Needles in documents of two lengths, and KL, of models in folders; last the dense model."""
    rows = []
    for row in table["rows"]:
        found = [_needle(row["folder"], f"retrieval-{n}", n) for n in (1024, 4096)]
        rows.append([*row["labels"], *found, f"{_divergence(row):.2f}"])
    dense = ("smollm2-default", "retrieval-dense-1024", 1024), ("smollm2-ruler", "dense", 4096)
    blank = [""] * (len(table["header"]) - 1)
    return [*rows, ["dense model", *blank, *(_needle(*one) for one in dense), "0"]]


def _divergence(row: Mapping[str, str]) -> float:
    """KL on WikiText-2 of a model in a folder, or after recovery in a comparison."""
    if "compared" in row:
        (cell,) = (one for one in _compared(row["compared"]) if one["recover"] == "fit")
        return float(cell["kl"]["value"])
    return float(_read(f"experiments/{row['folder']}/fidelity-wikitext2-test.json")["kl"]["value"])


def vllm(table: Spec) -> list[list[str]]:
    """Speed of a decode step over dense, a row a point and a column a method."""
    rows = _read(f"benchmarks/results/{table['result']}")["rows"]
    found = {
        (row["point"], row["method"]): row["decode_step"]
        for row in rows
        if row["mode"] == table["mode"]
    }
    points = dict.fromkeys(point for point, _ in found)
    return [
        [_point(point), *(f"{found[point, method]:.2f}" for method in table["methods"])]
        for point in points
    ]


def _point(point: str) -> str:
    requests, _, context = point.partition("x")
    return f"{requests} x {int(context):,}"


def llamacpp(table: Spec) -> list[list[str]]:
    """Median speeds over dense with a 16-bit cache."""
    rows = []
    for row in table["rows"]:
        (one,) = (
            one
            for one in _read(f"benchmarks/results/{row['result']}")["rows"]
            if (one["method"], one["cache"]) == (row["method"], "f16")
        )
        speeds = (one[what]["median"] for what in ("prefill", "decode"))
        rows.append([*row["labels"], *(f"{speed:.2f}" for speed in speeds)])
    return rows


def presses(table: Spec) -> list[list[str]]:
    """Fact recall with half of the tokens evicted by a press, a column a model; first with none."""
    none = [_recalls(model, "snapkv", "exact") for model in table["models"]]
    rows = [["none", *none]]
    for row in table["rows"]:
        found = [_recalls(model, row["press"], "compressed") for model in table["models"]]
        rows.append([*row["labels"], *found])
    return rows


def _recalls(model: str, press: str, cache: str) -> str:
    (one,) = _read(f"experiments/smollm2-presses/{model}-{press}.json")[cache]["recall"]
    return f"{one['accuracy']:.0%}"


def quantized(table: Spec) -> list[list[str]]:
    """Capacity, KL and perplexity in llama.cpp, by head dimension and cache type."""
    models = _read("experiments/width-bits/width_bits.json")["fidelity"]
    found = {(one["model"], one["cache"]): one for one in models}
    whole, rows = found["dense", "f16"]["bytes_per_token"], []
    for row in table["rows"]:
        one = found[row["model"], row["labels"][-1]]
        capacity, kl = whole / one["bytes_per_token"], f"{one['kl']:#.2g}" if one["kl"] else "0"
        rows.append([*row["labels"], f"{capacity:.1f}x", kl, f"{one['perplexity']:.1f}"])
    return rows


def reach(table: Spec) -> list[list[str]]:
    """Perplexity over dense at two ratios, and needles at the first, before recovery."""
    rows = []
    for row in table["rows"]:
        at = [_reached(folder, row["setting"]) for folder in table["folders"]]
        needle = _needle("smollm2-plain-reach-needles", row["file"], 4096)
        rows.append([*row["labels"], at[0], needle, at[1]])
    return rows


def _reached(folder: str, setting: str) -> str:
    (cell,) = (one for one in _compared(folder) if one["method"].endswith(setting))
    return f"{cell['perplexity_ratio']['value']:.3f}"


SHOWN: dict[str, Callable[[Spec], list[list[str]]]] = {
    one.__name__: one
    for one in (
        *(perplexity, ratio, facts, needles, samples, vllm, llamacpp),
        *(presses, quantized, reach),
    )
}


def by_retain(evidence: Evidence) -> Table:
    """Increase in perplexity by ratio, before and after layer-wise distillation."""
    rows = []
    for retain in RETAINS:
        cells = []
        for method in FORMS.values():
            cells.append(f"{_increase(evidence, Key(method, retain)):+.0%}")
            key = Key(method, retain, "fit")
            short = "" if key in evidence.cells else " (60 steps)"
            cells.append(f"{_increase(evidence, key):+.0%}{short}")
        rows.append([f"{retain:g}", *cells])
    recoveries = ("no recovery", "distilled")
    header = ["retain", *(f"{form}, {how}" for form in FORMS for how in recoveries)]
    return {"header": header, "rows": rows}


def by_method(evidence: Evidence) -> Table:
    """The share of the increase that layer-wise distillation recovers."""
    rows = []
    for method in METHODS:
        shares = []
        for retain in (0.7, 0.5):
            before, after = (_increase(evidence, Key(method, retain, x)) for x in ("none", "fit"))
            shares.append(f"{1 - after / before:.0%}")
        rows.append([f"`{method}`", *shares])
    return {"header": ["method", "retain 0.7", "retain 0.5"], "rows": rows}


def _increase(evidence: Evidence, key: Key) -> float:
    """Of the perplexity over the dense model's, as a share of it."""
    cell = evidence.cells.get(key) or evidence.short[key]
    return float(cell["perplexity"] / evidence.dense["perplexity"] - 1)


def forms() -> Table:
    """Single-needle accuracy in 4,096 tokens by form of the first model."""
    model = MODELS[0]
    found = retrieval("single-needle", (4096,), (model,))["rows"]
    rows = []
    for name, share, accuracy in found:
        own = name.removeprefix(f"{model.name}, ")
        rows.append([NAMES.get(own, own), share, accuracy.partition(" ")[0]])
    return {"header": ["form", "KV cache", "single-needle accuracy"], "rows": rows}


def made() -> dict[str, dict[str, str]]:
    """What is generated, by page and by the name in the mark above it."""
    found: dict[str, dict[str, str]] = {}
    for table in tomllib.loads(TABLES.read_text(encoding="utf-8"))["tables"]:
        rows = SHOWN[table["shows"]](table)
        shown = markdown_table({"header": [*table["header"], *table["columns"]], "rows": rows})
        found.setdefault(table["page"], {})[table["name"]] = shown
    evidence = Evidence()
    found[RECOVERY] |= {
        "by retain ratio": markdown_table(by_retain(evidence)),
        "by method": markdown_table(by_method(evidence)),
    }
    found[LIMITS]["forms"] = markdown_table(forms())
    return found


def main() -> None:
    """Put it into the pages."""
    put_all(made(), BEGIN, END)


if __name__ == "__main__":
    main()
