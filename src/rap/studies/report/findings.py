"""A page of findings: what a paper says, what result files say, and whether the two agree.

Every figure is read from the files. A verdict is written by a person and checked against the
figures, so that it cannot outlive them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model.errors import RapError

CONFIRMED, CONTRADICTED, PARTLY = "Confirmed", "Contradicted", "Confirmed in part"


class Results:
    """Cells of the committed comparisons, by method, retain ratio and recovery.

    `files` and names are paths below the folder of experiments, such as `needle/needle`.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.folder = folder
        self.cells: dict[tuple[str, float, str], dict[str, Any]] = {}
        for name in files:
            for cell in json.loads((folder / name).read_text(encoding="utf-8"))["cells"]:
                self.cells.setdefault((cell["method"], cell["retain"], cell["recover"]), cell)
        self.dense = self.cells["dense", 1.0, "none"]

    def cell(self, method: str, retain: float = 0.7, recover: str = "none") -> dict[str, Any]:
        """One cell; RapError if the comparison lacks it."""
        try:
            return self.cells[method, retain, recover]
        except KeyError as error:
            raise RapError(f"no cell {method} at {retain} after {recover}: run it") from error

    def file(self, name: str) -> dict[str, Any]:
        """A result file, by its path without the ending; RapError if it is not there."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise RapError(f"there is no {path}: run the experiment that writes it")
        return dict(json.loads(path.read_text(encoding="utf-8")))

    def analysis(self, name: str) -> dict[str, Any]:
        """The data that `rap analyze NAME` measured."""
        return dict(self.file(f"analyses/analysis-{name}")["data"])

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
class Finding:
    """What the paper says, what is seen here, and why they differ where they do."""

    title: str
    paper: str
    verdict: str
    here: Callable[[Results], str]
    holds: Callable[[Results], bool]
    why: str


def findings_page(head: str, findings: Sequence[Finding], results: Results) -> str:
    """The page in Markdown; RapError names a verdict that the figures do not bear out."""
    parts = [head.format(dense=f"{results.dense['perplexity']:.2f}")]
    for finding in findings:
        if not finding.holds(results):
            raise RapError(f"the figures no longer bear out {finding.title!r}: write it anew")
        parts.append(
            f"## {finding.title}\n\nPaper: {finding.paper}\n\nHere: {finding.here(results)}\n\n"
            f"{finding.verdict}. {finding.why}\n"
        )
    return "\n".join(parts)
