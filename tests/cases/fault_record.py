"""How each fault ended, noted as it ends: a run of all of them that was stopped goes on."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Case = dict[str, str]


@dataclass
class FaultRecord:
    """The cases of the tests that passed, by the tests' names.

    `kept` is the file that holds them until the run is through; None keeps nothing.
    """

    kept: Path | None
    cases: dict[str, list[Case]] = field(default_factory=dict)
    _open: dict[str, list[Case]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take over what a stopped run kept, less a last line that was cut short."""
        if self.kept is not None and self.kept.exists():
            whole = self.kept.read_text("utf-8").rpartition("\n")[0].splitlines()
            self.kept.write_text("".join(f"{line}\n" for line in whole), "utf-8")
            for line in whole:
                self.cases |= json.loads(line)

    def note(self, test: str, case: Case) -> None:
        """Remember how a fault ended; it counts once the whole test has passed."""
        self._open.setdefault(test, []).append(case)

    def passed(self, test: str) -> None:
        """Keep what the test noted."""
        noted = self._open.pop(test, None)
        if noted is None:
            return
        self.cases[test] = noted
        if self.kept is not None:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({test: noted}) + "\n")

    def through(self) -> None:
        """Forget what was kept: the run was not stopped, so the next one tries everything."""
        if self.kept is not None:
            self.kept.unlink(missing_ok=True)


def kept_file(folder: Path, commit: str | None) -> Path | None:
    """Where a run keeps its cases, of this code alone; None for code that no commit names."""
    if commit is None or commit.endswith("+"):
        return None
    return folder / f"faults-{commit}.jsonl"


def result_of(cases: list[Case], command: str, made: dict[str, Any]) -> dict[str, Any]:
    """The result file: every case, and a table that counts them."""
    counts = Counter((case["kind"], case["ended"]) for case in cases)
    return {
        "command": command,
        "provenance": made | {"command": command},
        "cases": sorted(cases, key=lambda case: sorted(case.items())),
        "table": {
            "title": "Faults, and how commands ended",
            "header": ["fault", "ended", "cases"],
            "rows": [[kind, end, str(count)] for (kind, end), count in sorted(counts.items())],
        },
    }
