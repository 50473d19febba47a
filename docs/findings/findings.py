"""A page of findings: a paper's numbers, those of two models, verdicts, and effects on defaults.

SmolLM2 comes first, the bundled model second. Every number is read from result files. A verdict is
written by a person and checked against the numbers, so that it cannot outlive them.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sources import runs

from rap.methods.naming import result_today
from rap.model.errors import RapError

PAGE = "docs/explanation/paper-replication.md"
CONFIRMED, CONTRADICTED, PARTLY = "Confirmed", "Contradicted", "Confirmed in part"
RAP = "rap:merge=1"  # with separate heads: what was measured of `rap` before merged heads
OPEN, UNMEASURED = "Open", "Not measured"


class Results:
    """What was measured of one model: cells by method, retain ratio and recovery, and analyses.

    `files`, of the comparisons, `analyses` and names are paths below the folder of experiments,
    such as `needle/needle`. Times of decode steps are those of the comparison `timed`, if given.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        analyses: str = "analyses",
        timed: str | None = None,
    ) -> None:
        self.folder, self.analyses, self.timed = folder, analyses, timed
        self.cells: dict[tuple[str, float, str], dict[str, Any]] = {}
        self.read: set[str] = set()  # the folders of what was asked for
        self._folders: dict[tuple[str, float, str], str] = {}
        for name in files:
            found = result_today(json.loads((folder / name).read_text(encoding="utf-8")))
            for cell in found["cells"]:
                key = cell["method"], cell["retain"], cell["recover"]
                self.cells.setdefault(key, cell)
                self._folders.setdefault(key, name.partition("/")[0])
        self.dense = self.cells["dense", 1.0, "none"]

    def cell(self, method: str, retain: float = 0.7, recover: str = "none") -> dict[str, Any]:
        """One cell; RapError if the comparison lacks it."""
        key = method, retain, recover
        try:
            found = self.cells[key]
        except KeyError as error:
            raise RapError(f"no cell {method} at {retain} after {recover}: run it") from error
        self.read.add(self._folders[key])
        return found

    def file(self, name: str) -> dict[str, Any]:
        """A result file, by its path without the ending; RapError if it is not there."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise RapError(f"there is no {path}: run the experiment that writes it")
        self.read.add(name.partition("/")[0])
        return result_today(json.loads(path.read_text(encoding="utf-8")))

    def analysis(self, name: str) -> dict[str, Any]:
        """The data that `rap analyze NAME` measured."""
        return dict(self.file(f"{self.analyses}/analysis-{name}")["data"])

    def loss(self, method: str, retain: float = 0.7, recover: str = "none") -> float:
        """How much more perplexity than dense, as a part of it."""
        return self.ppl(method, retain, recover) / float(self.dense["perplexity"]) - 1

    def kl(self, method: str, retain: float = 0.7, recover: str = "none") -> float:
        """Its divergence from the dense model, nats per token."""
        return float(self.cell(method, retain, recover)["kl"]["value"])

    def column(self, name: str) -> dict[str, float]:
        """The second column of a file's table, by the first."""
        return {str(row[0]): float(row[1]) for row in self.file(name)["table"]["rows"]}

    def found(self, model: str, length: int | None = None) -> float:
        """Share of needles that a model of needle.json found, at one length or at all."""
        cells = self.file("needle/needle")["needle"][model]
        shares = [cell["accuracy"] for cell in cells if length in (None, cell["length"])]
        return float(sum(shares) / len(shares))

    def ppl(self, method: str, retain: float = 0.7, recover: str = "none") -> float:
        """Its perplexity."""
        return float(self.cell(method, retain, recover)["perplexity"])

    def share(self, method: str, key: str, retain: float = 0.7) -> float:
        """A cost of it as part of the dense model's."""
        return float(self.cell(method, retain)[key] / self.dense[key])

    def slower(self, method: str, retain: float = 0.7) -> float:
        """Its decode step as part of the dense model's, timed in turn."""
        cell = self.cell(method, retain)
        if self.timed is not None:
            asked = {"method": method, "retain": retain, "recover": "none"}
            cell = next(x for x in self.file(self.timed)["cells"] if asked.items() <= x.items())
        return float(cell["decode_seconds"] / cell["dense_decode_seconds"])

    def recalled(self, method: str, retain: float = 0.7, recover: str = "none") -> float:
        """Its recall, the mean over distances."""
        entries = self.cell(method, retain, recover)["recall"]
        return float(sum(entry["accuracy"] for entry in entries) / len(entries))

    def recall(self, method: str, retain: float = 0.7, recover: str = "none") -> str:
        """Its recall at every distance."""
        entries = self.cell(method, retain, recover)["recall"]
        return " / ".join(f"{entry['accuracy']:.0%}" for entry in entries)


@dataclass(frozen=True)
class Answer:
    """What one model says to a question: figures, a verdict they must bear out, and why."""

    verdict: str
    figures: Callable[[Results], str]
    holds: Callable[[Results], bool]
    why: str

    def measured(self, asked: str, results: Results) -> str:
        """Its numbers; RapError names the question whose verdict they contradict."""
        if not self.holds(results):
            raise RapError(f"results no longer support the verdict on {asked!r}; update it")
        return self.figures(results)


@dataclass(frozen=True)
class Finding:
    """What the paper says, and what the real model and the bundled one answer.

    `real` is text where it was not measured there: what is missing. `follows` says, where their
    verdicts differ, what that means for a claim or a default.
    """

    title: str
    paper: str
    real: Answer | str
    bundled: Answer
    follows: str = ""

    @property
    def verdict(self) -> str:
        """Of the real model."""
        return self.real.verdict if isinstance(self.real, Answer) else UNMEASURED

    @property
    def disagree(self) -> bool:
        """Whether the models answer differently, as far as both do."""
        return self.verdict not in (OPEN, UNMEASURED, self.bundled.verdict)


@dataclass(frozen=True)
class Default:
    """A setting that the bundled model chose: why, and whether the real model bears it out."""

    title: str
    bundled: Callable[[Results], str]
    real: Answer | str


@dataclass(frozen=True)
class Models:
    """The results of both models."""

    real: Results
    bundled: Results


def findings_page(
    head: str, findings: Sequence[Finding], defaults: Sequence[Default], models: Models
) -> str:
    """The page in Markdown; RapError names a verdict that the figures do not bear out."""
    dense = {
        "real": f"{models.real.dense['perplexity']:.2f}",
        "bundled": f"{models.bundled.dense['perplexity']:.2f}",
    }
    parts = [head.format(**dense), _tally(findings)]
    parts += [_section(finding, models) for finding in findings]
    return "\n".join([*parts, _closing(findings, defaults, models)])


def _tally(findings: Sequence[Finding]) -> str:
    """How many findings either model bears out."""
    order = (CONFIRMED, PARTLY, CONTRADICTED, OPEN, UNMEASURED)
    rows = ["| | SmolLM2 | bundled test model |", "| --- | ---: | ---: |"]
    real = Counter(finding.verdict for finding in findings)
    bundled = Counter(finding.bundled.verdict for finding in findings)
    reached = [name for name in order if real[name] or bundled[name]]
    rows += [f"| {name} | {real[name]} | {bundled[name]} |" for name in reached]
    return "\n".join(rows) + "\n"


def _section(finding: Finding, models: Models) -> str:
    """A finding: a table of what was measured, its runs, why, and the difference."""
    _forget(models)
    real = _measured(finding.real, finding.title, models.real)
    bundled = _measured(finding.bundled, finding.title, models.bundled)
    rows = [
        "| | measured | verdict |",
        "| --- | --- | --- |",
        f"| Paper | {_cell(finding.paper)} | |",
        f"| SmolLM2 | {_cell(real)} | {finding.verdict} |",
        f"| Bundled test model | {_cell(bundled)} | {finding.bundled.verdict} |",
    ]
    reasons = [("SmolLM2", finding.real), ("Bundled test model", finding.bundled)]
    items = [_item(name, one.why) for name, one in reasons if isinstance(one, Answer)]
    made = runs(read, PAGE) if (read := _forget(models)) else ""
    parts = [f"## {finding.title}", "\n".join(rows), made, "\n".join(items)]
    parts = [part for part in parts if part]
    if finding.disagree and finding.follows:
        parts.append(_wrapped(f"The models differ: {finding.follows}"))
    return "\n\n".join(parts) + "\n"


def _forget(models: Models) -> list[str]:
    """The folders of results that were read since the last call."""
    found = sorted(models.real.read | models.bundled.read)
    models.real.read.clear()
    models.bundled.read.clear()
    return found


def _measured(answer: Answer | str, asked: str, results: Results) -> str:
    return answer if isinstance(answer, str) else answer.measured(asked, results)


def _cell(numbers: str) -> str:
    """Numbers as a cell of a table, one measurement per line."""
    return re.sub(r"[;.] (?=\S)", "<br>", numbers.rstrip("."))


def _item(title: str, text: str) -> str:
    return _wrapped(f"* **{title}**: {text}", indent="  ")


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _closing(findings: Sequence[Finding], defaults: Sequence[Default], models: Models) -> str:
    """The findings on which the models differ, and what SmolLM2 shows about each default."""
    differences = [
        f"| {finding.title} | {finding.verdict} | {finding.bundled.verdict} | {finding.follows} |"
        for finding in findings
        if finding.disagree
    ]
    rows, items = [], []
    _forget(models)
    for default in defaults:
        real = _measured(default.real, default.title, models.real)
        answered = isinstance(default.real, Answer)
        verdict = default.real.verdict if answered else UNMEASURED
        bundled = _cell(default.bundled(models.bundled))
        rows.append(f"| {default.title} | {bundled} | {_cell(real)} | {verdict} |")
        if answered:
            items.append(_item(default.title, default.real.why))
    return "\n".join(
        [
            "## Differences between the models, and defaults\n",
            "| finding | SmolLM2 | bundled test model | implication |",
            "| --- | --- | --- | --- |",
            *differences,
            "",
            "Defaults that were chosen on the bundled test model, and their effect on SmolLM2:\n",
            "| default | bundled test model | SmolLM2 | verdict |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            runs(_forget(models), PAGE),
            *([""] * bool(items)),
            *items,
            "",
        ]
    )
